"""`booster init`: each example is copied whole, nothing is overwritten, and the wheel carries them."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from booster.cli.init import EXAMPLES, examples, missing_extras, script_of
from zoo_tests.booster.cli.test_commands import outcome
from zoo_tests.harness.environment import REPOSITORY

_ALL = sorted(
    path.parent.name
    for name in ("train.py", "finetune.py", "first_layout.ipynb")
    for path in (REPOSITORY / "examples").glob(f"*/{name}")
)
_COPIED = (".py", ".md", ".ipynb")


def test_every_example_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(examples()) == _ALL
    code, out, err = outcome(capsys, "init")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == _ALL
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in out.splitlines()), "each says what it is"


@pytest.mark.parametrize("name", _ALL)
def test_a_copy_stands_alone(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = outcome(capsys, "init", name)
    assert (code, err) == (0, "")
    copied = {path.name for path in (tmp_path / name).iterdir()}
    assert copied == {path.name for path in (REPOSITORY / "examples" / name).iterdir() if path.suffix in _COPIED}
    script = f"{name}/{script_of(tmp_path / name)}"
    starts = f"jupyter lab {script}" if name == "notebooks" else f"booster run --nproc-per-node 2 {script} --tiny"
    assert out.endswith(f"  {starts}\n")
    for path in (tmp_path / name).glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "examples/" not in text, "a path of the repository"
        tree = ast.parse(text)
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        foreign = {module for module in modules if module and module.split(".")[0] in ("examples", "zoo_tests")}
        assert not foreign


def test_nothing_is_overwritten(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert outcome(capsys, "init", "vit", "--output", "mine")[0] == 0
    own = tmp_path / "mine" / "train.py"
    own.write_text("mine")
    code, out, err = outcome(capsys, "init", "vit", "--output", "mine")
    assert (code, out) == (2, "")
    assert err == "error: mine exists, and nothing is overwritten; give another folder with --output\n"
    assert own.read_text() == "mine"
    assert outcome(capsys, "init", "vit", "--output", str(own / "x"))[0] == 2
    (tmp_path / "empty").mkdir()
    assert outcome(capsys, "init", "vit", "--output", "empty")[0] == 0


def test_what_a_copy_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trl.trainer import x\nfrom datasets import y\nfrom timm import z\nfrom other import a")
    assert "trackers" not in missing_extras([script])
    monkeypatch.setattr("booster.cli.init.find_spec", lambda name: None)
    assert missing_extras([script]) == ["examples", "integrations", "vision"]


def test_names_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "init", "bret")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: argument NAME: invalid choice: 'bret' (choose from ") and "bert_trainer" in err


def test_a_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "init", "vit", "--output", "/proc/vit")
    assert (code, out) == (2, "")
    assert err.startswith("error: /proc/vit cannot be written (") and err.count("\n") == 1


def test_examples_travel_in_the_package() -> None:
    """The link, and the rule by which setuptools follows it."""
    assert EXAMPLES.resolve() == REPOSITORY / "examples"
    packages = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "booster*" in packages["packages"]["find"]["include"] and packages["packages"]["find"]["namespaces"]


@pytest.mark.slow
def test_the_wheel_has_them(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "docs", "zoo_tests", "benchmarks", "build", "dist", "runs")
    shutil.copytree(REPOSITORY, source, symlinks=True, ignore=ignored)
    command = ("setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path / "packed"))
    done = subprocess.run([sys.executable, *command], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in (REPOSITORY / "examples").glob("*/*"):
        if path.suffix in _COPIED:
            packed = tmp_path / "packed" / "booster" / "cli" / "examples" / path.parent.name / path.name
            assert packed.read_bytes() == path.read_bytes()
