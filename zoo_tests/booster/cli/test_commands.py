"""The command line itself, in this process: help, its examples, versions, exit codes, a sentence for each mistake."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest

from booster.cli import front, run
from booster.cli.completion import parser_of
from booster.cli.main import main
from zoo_tests.harness.environment import environment_of_a_job

_USE = "use one of run, plan, inspect, verify, doctor, init, completion, as in `booster run --help`"


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
        (
            ["run", "-n", "2", "x"],
            "booster run has no option '-n'; use --nproc-per-node, as in `booster run --nproc-per-node 4 script.py`",
        ),
        (
            ["run", "--np", "2", "x"],
            "booster run has no option '--np'; use --nproc-per-node, as in `booster run --nproc-per-node 4 script.py`",
        ),
        (
            ["run", "-np", "2", "x"],
            "booster run has no option '-np'; use --nproc-per-node, as in `booster run --nproc-per-node 4 script.py`",
        ),
        (
            ["run", "--tp", "2", "x"],
            "booster run has no option '--tp'; use --layout, as in `booster run --nproc-per-node 4 --layout tp=2,pp=2 "
            "script.py`, or the plugin in the script",
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
        (["run", "--profile", "0", __file__], "--profile=0 is not a number of steps; use 1 or more"),
        (["run", "--profile", "few", __file__], "--profile=few is not a number of steps; use 1 or more"),
        (
            ["run", "--profile-output", "there", __file__],
            "--profile-output is where a profile is written; add --profile 3, say",
        ),
        (
            ["run", "--profile", "3", "--profile-output", "/dev/null/x", __file__],
            "--profile cannot write to /dev/null/x (Not a directory); give another folder with --profile-output",
        ),
        (["doctor", "more"], "unrecognized arguments: more; `booster doctor --help` lists what there is"),
        (
            [],
            "no command was given; " + _USE,
        ),
        (
            ["fly"],
            "command 'fly' does not exist; " + _USE,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert outcome(capsys, *arguments) == (2, "", f"error: {sentence}\n")


@pytest.mark.parametrize(
    ("source", "arguments", "is_told"),
    [
        ('"""booster run --nproc-per-node 2 script.py"""', ["--epochs", "3", "--nproc_per_node", "2"], True),
        ("", ["--epochs", "3", "layout"], False),
        ('parser.add_argument("--layout")', ["--layout=tp=2"], False),
        ("layout: str = ''", ["--layout", "two columns"], False),
        ("", ["--n", "3", "--nproc", "-h"], False),  # which argparse would take for beginnings of our options
    ],
)
def test_an_option_behind_the_script_is_told_unless_the_script_takes_it(
    source: str, arguments: list[str], is_told: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    start = ["--nproc-per-node", "2", "--max-restarts=1", "--nnode", "1", *(["--"] if is_told else [])]
    options = run.options_of([*start, str(script), *arguments])
    assert (options.nproc_per_node, options.training_script_args) == ("2", arguments)
    note = run._misplaced(options)
    assert (note is not None) is is_told
    assert note is None or note.endswith(f"write `booster run --nproc-per-node … {script}`")


@pytest.mark.parametrize("name", [None, *front.commands()])
def test_help_has_examples(capsys: pytest.CaptureFixture[str], name: str | None) -> None:
    arguments = ["--help"] if name is None else [name, "--help"]
    code, out, err = outcome(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: {' '.join(['booster', *arguments[:-1]])}")
    assert "\nexamples:\n  " in out


@pytest.mark.parametrize("name", front.commands())
def test_examples_are_parsed(name: str) -> None:
    """Each example is a command line that this command, or that of the pipe it is part of, understands."""
    own = parser_of(name)
    lines = [line.strip() for line in own.epilog.splitlines()[1:]]
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line.removeprefix("source <(").removesuffix(")").partition(" > ")[0])
        assert words[0] == "booster", line
        parser_of(words[1]).parse_args(words[2:])


def test_examples_of_the_top_are_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = outcome(capsys, "--help")
    block = out.partition("examples:\n")[2].partition("\n\n")[0]
    for line in block.splitlines():
        _, name, *rest = shlex.split(line)
        parser = front.parser() if name.startswith("-") else parser_of(name)
        parser.parse_args([name, *rest] if name.startswith("-") else rest)


@pytest.mark.parametrize("line", parser_of("inspect").examples[1:3])
def test_an_example_runs(line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    """Those that need no file: a picture, and JSON."""
    monkeypatch.chdir(tmp_path)
    assert outcome(capsys, *shlex.split(line)[1:])[0] == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "--version")
    assert (code, err) == (0, "")
    expected = {"booster": version("hybrid-booster"), "torch": version("torch")}
    expected |= {"transformers": version("transformers"), "python": platform.python_version()}
    assert dict(line.split() for line in out.splitlines()) == expected
    assert json.loads(outcome(capsys, "--version", "--json")[1]) == expected


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["init"], ["fly"], []])
def test_what_needs_no_torch_does_not_import_it(arguments: list[str]) -> None:
    """Otherwise each answer would take seconds."""
    text = (
        "import atexit, sys\n"
        "from hybrid_booster.command import main\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        f"main({arguments})"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment_of_a_job())
    assert done.stderr.endswith("False\n"), done.stderr
    assert done.returncode == (0 if arguments and arguments != ["fly"] else 2)


def test_the_installed_command_is_this_one() -> None:
    entry = next(iter(entry_points(group="console_scripts", name="booster")))
    assert entry.value == "hybrid_booster.command:main"


def test_ctrl_c_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("booster.cli.doctor.main", interrupted)
    assert outcome(capsys, "doctor") == (130, "", "interrupted\n")


def test_a_command_of_another_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "somebodys_command.py").write_text("def main(arguments):\n    print(*arguments)\n    return 3\n")
    metadata = tmp_path / "somebodys-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[booster.commands]\nfly = somebodys_command:main\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert outcome(capsys, "fly", "high") == (3, "high\n", "")
    assert "fly          from somebodys_command" in outcome(capsys, "--help")[1]
