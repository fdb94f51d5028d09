"""The convergence benchmark: its commands, its arithmetic, and a few steps of it with a layout beside the reference."""

from __future__ import annotations

import json
import math
from pathlib import Path

import convergence
import pytest
from convergence import command, largest_relative_difference, main, parse_arguments
from layouts import GLOBAL_BATCH_SIZE, LAYOUTS, MICROBATCH_SIZE, REFERENCE

from zoo_tests.examples.scripts import run_on_pool


def test_every_layout_sees_the_same_global_batch() -> None:
    assert set(LAYOUTS) == {REFERENCE, "tp2", "pp2-zero1", "tp2-pp2", "pp2-dp2-zero1", "dp4"}
    for layout in LAYOUTS.values():
        assert GLOBAL_BATCH_SIZE % (layout.dp_size * MICROBATCH_SIZE) == 0
    assert not LAYOUTS[REFERENCE].is_sharded


def test_the_difference_is_relative_and_over_the_first_100_steps() -> None:
    reference = [2.0] * 150
    losses = [2.0] * 99 + [2.1] + [9.0] * 50
    assert largest_relative_difference(losses, reference) == pytest.approx(0.05)
    assert largest_relative_difference(losses[:99], reference) == 0.0


def test_the_reference_is_started_without_a_launcher(tmp_path: Path) -> None:
    options = parse_arguments(["--task", "topics", "--steps", "3", "--output", str(tmp_path)])
    assert command(LAYOUTS[REFERENCE], options)[1].endswith("convergence_run.py")
    sharded = command(LAYOUTS["tp2-pp2"], options)
    assert sharded[sharded.index("--nproc-per-node") + 1] == "4"
    assert sharded[sharded.index("--steps") + 1] == "3"
    assert "--limit" not in sharded


def test_unknown_layouts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--layouts", "tp2,tp3"])
    assert "'tp3' is not a layout; use unsharded, tp2" in capsys.readouterr().err


def _run_on_pool(command: list[str], **_: object) -> None:
    """Run a command of the benchmark without a process of its own."""
    script = next(number for number, part in enumerate(command) if part.endswith(".py"))
    ranks = int(command[command.index("--nproc-per-node") + 1]) if "--nproc-per-node" in command else 1
    run_on_pool(Path(command[script]).stem, *command[script + 1 :], ranks=ranks)


@pytest.mark.slow
def test_a_layout_follows_the_reference_and_finished_runs_are_reused(
    mrpc_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence.subprocess, "run", _run_on_pool)
    # 21 pairs: the second global batch holds 5, whose last micro-batch holds 1.
    files = ["--data-dir", str(mrpc_directory), "--output", str(tmp_path)]
    arguments = [*files, "--model", "tiny", "--epochs", "2", "--lr", "1e-3", "--layouts", "unsharded,pp2-zero1"]
    assert main(arguments) == 0
    reference, sharded = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("unsharded", "pp2-zero1"))
    assert len(reference["losses"]) == 4
    assert largest_relative_difference(sharded["losses"], reference["losses"]) < 1e-5
    assert sharded["losses"] != reference["losses"][:1] * 4
    assert sharded["samples"] == reference["samples"] == 13
    assert sharded["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    table = (tmp_path / "table.md").read_text()
    assert "| unsharded | 1 | no |" in table
    assert "| pp2-zero1 | 2 | yes |" in table
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    written = (tmp_path / "pp2-zero1.json").stat().st_mtime_ns
    assert main([*arguments, "--reuse"]) == 0
    assert (tmp_path / "pp2-zero1.json").stat().st_mtime_ns == written


@pytest.mark.slow
def test_reproducible_runs_have_the_same_bits_and_others_fail(
    mrpc_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence.subprocess, "run", _run_on_pool)
    files = ["--data-dir", str(mrpc_directory), "--output", str(tmp_path)]
    arguments = [*files, "--model", "tiny", "--epochs", "1", "--lr", "1e-3", "--layouts", "unsharded,pp2-dp2-zero1"]
    arguments += ["--reproducible", "--max-length", "40"]
    assert main(arguments) == 0
    single, sharded = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("unsharded", "pp2-dp2-zero1"))
    assert single == sharded
    assert "2 of 2 | " + single["weights"][:12] in (tmp_path / "table.md").read_text()

    sharded["losses"][1] = math.nextafter(sharded["losses"][1], 0)
    (tmp_path / "pp2-dp2-zero1.json").write_text(json.dumps(sharded))
    assert main([*arguments, "--reuse"]) == 1
    assert "1 of 2 | " in (tmp_path / "table.md").read_text()
