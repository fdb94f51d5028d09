"""Every python block of README and docs runs as it stands.

What fails here first is an example that the code has left behind: the traceback names the page and the line.
"""

from __future__ import annotations

import ast
import json
import linecache
import multiprocessing
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from booster.cli.main import load_command
from zoo_tests.docs.pages import ALONE, COMMAND, PAGES, Script, blocks_of, scripts_of
from zoo_tests.harness.ranks import rank_context, run_on_ranks

SCRIPTS = [script for page in PAGES for script in scripts_of(page)]
IN_POOL = [script for script in SCRIPTS if script.how not in (COMMAND, ALONE)]
BY_COMMAND = [script for script in SCRIPTS if script.how == COMMAND]
BY_PYTHON = [script for script in SCRIPTS if script.how == ALONE]
_TIMEOUT_S = 120


def run_here(source: str, name: str, directory: str) -> None:
    """Run a script on this rank, in `directory`, with the variables of `booster run`."""
    before = os.getcwd()
    os.chdir(directory)
    try:
        with pytest.MonkeyPatch.context() as patched:
            for variable, value in _variables().items():
                patched.setenv(variable, value)
            if dist.is_initialized():  # the ranks of the pool run other scripts after this one
                patched.setattr(dist, "destroy_process_group", lambda group=None: None)
            # As of a file: what a module's forward calls is read from its source.
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            exec(compile(source, name, "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
        _forget_job()


def _run_alone(source: str, name: str, directory: str) -> None:
    """Run a script as `python` does: its data loaders start workers by fork, not from the server of this process."""
    multiprocessing.set_start_method("fork", force=True)
    run_here(source, name, directory)


def _variables() -> dict[str, str]:
    """What `booster run` sets on this rank; nothing in a process that is no rank."""
    if not dist.is_initialized():
        return {}
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return {"RANK": rank, "LOCAL_RANK": rank, **world}


def _forget_job() -> None:
    """Let the next script of this rank find accelerate as it is in a new process."""
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.mark.parametrize("script", IN_POOL, ids=lambda script: script.name)
@pytest.mark.slow
def test_script_runs(script: Script, tmp_path: Path) -> None:
    for mark, name in {"bitsandbytes": "bitsandbytes", "from verl": "verl"}.items():
        if mark in script.source.lower():
            pytest.importorskip(name)
    run_on_ranks(script.num_ranks, run_here, script.source, script.name, str(tmp_path), timeout_s=_TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("script", BY_COMMAND, ids=lambda script: script.name)
def test_script_leaves_its_model(script: Script, tmp_path: Path) -> None:
    """The complete script of the README leaves the model that it promises; `.ci/run` starts it by its command."""
    from transformers import BertForSequenceClassification

    run_on_ranks(4, run_here, script.source, script.name, str(tmp_path), timeout_s=_TIMEOUT_S)
    _, report = BertForSequenceClassification.from_pretrained(tmp_path / "runs/tiny-bert", output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.slow
@pytest.mark.parametrize("script", BY_PYTHON, ids=lambda script: script.name)
def test_script_runs_by_itself(script: Script, tmp_path: Path) -> None:
    process = rank_context().Process(target=_run_alone, args=(script.source, script.name, str(tmp_path)))
    process.start()
    process.join(_TIMEOUT_S)
    assert process.exitcode == 0, "see the traceback in what the test printed"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_of_code_is_left_out(page: Path) -> None:
    """Each runs above, is another library's, or has commands whose options exist; what is none of these is no code."""
    for language, text in blocks_of(page):
        name, _, title = language.partition(" ")
        if name == "py":
            ast.parse(text)
            assert title and title != 'title="Hybrid Booster"', f"python of our own, which does not run: {text}"
        elif name == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                _check_command(shlex.split(line, comments=True) if line.startswith("booster ") else [])
        elif name == "json":
            json.loads(text)
        elif name in ("text", ""):
            assert not _is_code(text), f"code that does not run: {text}"
        else:
            assert name in ("python", "diff"), f"a block of {language}"


def _check_command(words: list[str]) -> None:
    if len(words) > 1 and words[1] not in ("init", "completion"):
        sys.modules[load_command(words[1]).__module__].parser().parse_args(words[2:])


def _is_code(text: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return bool(re.search(r"^\s*(from \w[\w.]* import |import \w|def \w+\(|class \w+[(:])", text, re.MULTILINE))
    return any(isinstance(node, ast.Call | ast.stmt) and not isinstance(node, ast.Expr) for node in nodes)


def test_there_is_a_script_for_the_main_job() -> None:
    """A slip in the comments must not leave the README untested."""
    assert [script.page.name for script in BY_COMMAND] == ["README.md"]
    assert {script.page.name for script in IN_POOL} >= {"concepts.md", "training.md", "writing_a_policy.md"}
