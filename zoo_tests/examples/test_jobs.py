"""The examples that are people's jobs: each trains at a tiny size, says how to go on, and goes on in another layout.

What breaks here first: an argument of Trainer or TRL that was renamed. `examples/bert` has tests of its own.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from zoo_tests.docs.pages import rows_of
from zoo_tests.examples.scripts import REPOSITORY
from zoo_tests.harness.ranks import run_on_ranks

_TRAINER = ("--disable_tqdm", "True", "--logging_steps", "1", "--max_steps")
_PLAIN = ("--steps",)
_BATCH = ("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1")
_TWO_REPLICAS = ("--per_device_train_batch_size", "4")  # half of what one replica had: the global batch stays
# Example -> (the way to say the steps, more options, options of the layout, those of the layout that goes on)
JOBS = {
    "pretraining": (_PLAIN, ("--save-every", "3"), ("--tp", "2"), ("--pp", "2")),
    "sft_lora": (_TRAINER, ("--bf16", "False", "--save_steps", "3"), ("--pp", "2"), ("--tp", "2")),
    "dpo": (_TRAINER, ("--bf16", "False", "--save_steps", "3"), ("--tp", "2"), _TWO_REPLICAS),
    "grpo": (_TRAINER, ("--bf16", "False", "--save_steps", "3"), ("--tp", "2"), ("--pp", "2")),
    "grpo_vllm": (_TRAINER, ("--bf16", "False", "--save_steps", "3"), ("--pp", "2"), ("--tp", "2")),
    "bert_trainer": (_TRAINER, ("--save_steps", "3"), ("--tp", "2"), ("--pp", "2")),
    "t5_summarization": (_TRAINER, ("--save_steps", "3"), ("--tp", "2"), _TWO_REPLICAS),
    "whisper": (_TRAINER, ("--save_steps", "3"), ("--tp", "2"), _TWO_REPLICAS),
    "vit": (_TRAINER, ("--save_steps", "3"), ("--pp", "2"), ("--tp", "2")),
    "moe": (_TRAINER, ("--save_steps", "3"), ("--ep", "2"), ("--tp", "2")),
}


def _run(name: str, arguments: list[str]) -> str:
    """Run an example's script on this rank, as `python train.py` does; return what it printed."""
    from accelerate.state import AcceleratorState, GradientState

    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    script = REPOSITORY / "examples" / name / "train.py"
    kept, sys.argv = sys.argv, [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = kept
        sys.path.remove(str(script.parent))
        for path in script.parent.glob("*.py"):
            sys.modules.pop(path.stem, None)
    return out.getvalue()


def _losses(folder: Path) -> list[float]:
    """Losses by step, of the newest checkpoint of a Trainer."""
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_job_trains_and_goes_on_in_another_layout(name: str, tmp_path: Path) -> None:
    steps, more, layout, other = JOBS[name]
    flag = "--output" if steps == _PLAIN else "--output_dir"
    common = ["--tiny", flag, str(tmp_path / "out"), *(() if steps == _PLAIN else _BATCH), *more]
    printed = run_on_ranks(2, _run, name, [*common, *layout, *steps, "3"])
    assert "to continue:" in printed[0] and "to export:" in printed[0]
    assert "to continue:" not in printed[1], "one rank speaks"
    if "grpo" in name:
        assert re.search(
            r"tokens/s [1-9].*generated_tokens/s [1-9].*generating_share [1-9].*training_share [1-9]", printed[0]
        )
    resume = ["--resume"] if steps == _PLAIN else ["--resume_from_checkpoint", "True"]
    run_on_ranks(2, _run, name, [*common, *other, *resume, *steps, "5"])
    if steps == _PLAIN:
        assert {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()} == {"step-3", "step-5"}
    else:
        assert len(_losses(tmp_path / "out")) >= 3
    assert list((tmp_path / "out").glob("*.safetensors")), "the result opens plainly"


@pytest.mark.parametrize("name", JOBS)
def test_the_page_of_jobs_has_the_commands_of_the_scripts(name: str) -> None:
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    [block] = [text for text in page.split("```") if f"cd examples/{name}\n" in text]
    lines = (REPOSITORY / "examples" / name / "train.py").read_text(encoding="utf-8").partition("\n\n")[2].splitlines()
    commands = {line.partition("  #")[0].strip() for line in lines if line.strip().startswith("booster run")}
    assert len(commands) == 2
    assert {line for line in block.splitlines() if line.startswith("booster run")} == commands


def test_the_page_of_jobs_names_the_layouts_that_are_tested() -> None:
    rows = rows_of(REPOSITORY / "docs" / "recipes.md", "Job")
    said = [re.findall(r"`([^`]+)`", tested) for _, _, tested in rows]
    assert said == [
        [" ".join(layout) for layout in layouts if layout != _TWO_REPLICAS] for _, _, *layouts in JOBS.values()
    ]


@pytest.mark.parametrize("script", sorted((REPOSITORY / "examples").rglob("*.py")), ids=lambda path: path.parent.name)
def test_an_example_imports_booster_first(script: Path) -> None:
    """So that what transformers' Trainer imports logs nothing (`lower_missing_kernel`)."""
    imports = [node for node in ast.parse(script.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    found = [node.module.partition(".")[0] for node in imports if node.module]
    libraries = [name for name in found if name in ("booster", "transformers", "peft", "trl")]
    assert libraries[:1] in ([], ["booster"])
