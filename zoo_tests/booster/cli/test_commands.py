"""The command line itself, in this process: help, versions, and one sentence for each mistake."""

from __future__ import annotations

import pytest

from booster.cli import main


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `booster` with these arguments."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run"], "no script was given; use `booster run --nproc-per-node 4 script.py`"),
        (["run", "--nproc-per-node", "4"], "no script was given; use `booster run --nproc-per-node 4 script.py`"),
        (
            ["run", "nowhere.py"],
            "script 'nowhere.py' is not a file; use one that exists, as in `booster run --nproc-per-node 4 script.py`",
        ),
        (["run", "--bad", "x"], "unrecognized arguments: --bad; `booster run --help` lists what there is"),
        (
            ["run", "--nproc-per-node", "0", __file__],
            "--nproc-per-node=0 is not a number of ranks; use 1 or more, or one of auto, cpu, gpu, xpu",
        ),
        (
            ["run", "--nnodes", "two", __file__],
            "--nnodes=two is not a number of machines; use N or MIN:MAX, as in 1:4",
        ),
        (
            ["run", "--module", "--no-python", "script"],
            "--module and --no-python exclude one another; use one of them",
        ),
        (["doctor", "more"], "unrecognized arguments: more; `booster doctor --help` lists what there is"),
        ([], "no command was given; use one of run, plan, inspect, verify, doctor, as in `booster run --help`"),
        (
            ["fly"],
            "command 'fly' does not exist; use one of run, plan, inspect, verify, doctor, as in `booster run --help`",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert outcome(capsys, *arguments) == (2, "", f"error: {sentence}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["doctor", "--help"]], ids=" ".join)
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = outcome(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: {' '.join(['booster', *arguments[:-1]])}")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "--version")
    assert code == 0
    assert out.startswith("booster ")
