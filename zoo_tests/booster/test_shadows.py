"""Beside other people's `plugins`, `booster` and `shardformer`: `hybrid_booster` finds ours, and theirs stay theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from booster.extensions import hidden_beside
from zoo_tests.harness.ranks import under_load

REPOSITORY = Path(__file__).resolve().parents[2]
_SCRIPT = """
from hybrid_booster import Booster, HybridParallelPlugin, launch_from_torch, shardformer
import torch
from plugins.mine import ANSWER
from plugins.hybrid_parallel.config.options import HybridParallelConfig
import booster

launch_from_torch()
model = torch.nn.Linear(2, 1)
model, optimizer = Booster(HybridParallelPlugin()).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
assert booster.Booster is Booster and shardformer.ShardConfig and HybridParallelConfig
print("trained beside", ANSWER)
"""
_ON_RANKS = """
import hybrid_booster
from plugins.hybrid_parallel.cli.doctor import measure_mesh
from plugins.hybrid_parallel.config.groups import ParallelOptions
from plugins.hybrid_parallel.distributed.local_ranks import run_on_local_ranks

print(len(run_on_local_ranks(measure_mesh, 2, ParallelOptions(), timeout_s=60.0)), "ranks")
"""


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A directory of somebody who has modules of these names."""
    for name in ("plugins", "booster"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "plugins" / "mine.py").write_text("ANSWER = 42\n")
    (tmp_path / "shardformer.py").write_text("raise SystemExit('not this one')\n")
    return tmp_path


def _run(directory: Path, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Python in `directory`, which it looks in first, with the repository behind it."""
    if text is not None:
        (directory / "script.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=under_load(120),
    )


@pytest.mark.slow
def test_the_alias_works_beside_modules_of_the_same_names(others: Path) -> None:
    done = _run(others, "script.py", text=_SCRIPT)
    assert (done.returncode, done.stdout) == (0, "trained beside 42\n"), done.stderr


@pytest.mark.slow
def test_ranks_that_are_started_find_ours_too(others: Path) -> None:
    done = _run(others, "script.py", text=_ON_RANKS)
    assert (done.returncode, done.stdout) == (0, "2 ranks\n"), done.stderr


@pytest.mark.slow
def test_the_command_line_works_there(others: Path) -> None:
    (others / "script.py").write_text("print('trained')")
    done = _run(others, "-m", "hybrid_booster", "run", "--nproc-per-node", "1", "script.py")
    assert done.returncode == 0 and done.stdout == "trained\n", done.stderr


def test_our_modules_run_when_they_are_used(tmp_path: Path) -> None:
    """And once: not when `inspect` looks for the file of each, as torch does while it is imported."""
    text = """
import inspect, sys
import hybrid_booster
inspect.getmodule(inspect.currentframe())
assert "torch" not in sys.modules
import booster.errors
assert booster.ConfigurationError is booster.errors.ConfigurationError
assert hybrid_booster.booster.Booster is hybrid_booster.Booster
"""
    done = _run(tmp_path, "-c", text)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_module_that_was_imported_before_is_named(others: Path) -> None:
    done = _run(others, "-c", "import booster, hybrid_booster")
    assert f"'booster' is {others / 'booster' / '__init__.py'} in this process" in done.stderr


@pytest.mark.slow
def test_plain_names_that_are_hidden_are_said(tmp_path: Path) -> None:
    (tmp_path / "plugins.py").write_text("")
    done = _run(tmp_path, "-c", "from booster import Booster; from plugins.hybrid_parallel import X")
    assert f"{tmp_path / 'plugins.py'} hides hybrid-booster's 'plugins': write `from hybrid_booster" in done.stderr


def test_what_is_beside_a_script_is_found(others: Path) -> None:
    assert f"{others / 'booster' / '__init__.py'} hides hybrid-booster's 'booster'" in hidden_beside(others / "x.py")
    assert hidden_beside(REPOSITORY / "x.py") is None
