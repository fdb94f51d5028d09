"""`booster completion`: real shells complete commands, options, values and names of files by the printed script.

What breaks here first: a parser with an option that shtab does not understand.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from booster.cli import front
from zoo_tests.booster.cli.test_commands import outcome
from zoo_tests.harness.ranks import under_load

_CASES = [
    (["booster", "pl"], {"plan"}),
    (["booster", ""], set(front.COMMANDS)),
    (["booster", "verify", "--sche"], {"--schedule"}),
    (["booster", "verify", "--schedule", "z"], {"zero_bubble", "zbv"}),
    (["booster", "run", "--prof"], {"--profile", "--profile-output"}),
    (["booster", "doctor", "--npr"], {"--nproc-per-node"}),  # an option of a plugin
    (["booster", "init", "bert"], {"bert", "bert_trainer"}),
    (["booster", "completion", ""], {"bash", "zsh"}),
    (["booster", "run", "my_scr"], {"my_script.py"}),
    (["booster", "inspect", "--trace", "my_"], {"my_script.py"}),
]
_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_booster booster "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"""
# A shell inside of a shell types, as completion works in an interactive one alone.
_ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
until_seen() { local out; zpty -r -m shell out "*$1*"; print -r -- "$out"; }
zpty -w shell "PROMPT=; fpath=($1 \$fpath); autoload -Uz compinit; compinit -u -D"
zpty -w shell 'zle-line-init() { print READY$((1+1)) }; zle -N zle-line-init'
until_seen READY2 >/dev/null
zpty -w -n shell $'booster ver\t--sche\tz\t\C-u'
zpty -w shell 'print END$((1+1))'
until_seen END2
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts of both shells, named as they would be installed."""
    return tmp_path_factory.mktemp("completion")


def _script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    file = folder / {"bash": "booster", "zsh": "_booster"}[shell]
    if not file.exists():
        code, out, err = outcome(capsys, "completion", shell)
        assert (code, err) == (0, "")
        file.write_text(out)
    return file


@pytest.mark.parametrize(("words", "found"), _CASES, ids=[" ".join(words) for words, _ in _CASES])
def test_bash(
    words: list[str], found: set[str], scripts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash on this machine")
    (tmp_path / "my_script.py").touch()
    command = ["bash", "--norc", "-c", _BASH, "bash", str(_script("bash", scripts, capsys)), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=under_load(60))
    assert set(done.stdout.split()) == found, done.stderr


def test_zsh(scripts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _script("zsh", scripts, capsys)
    assert file.read_text().startswith("#compdef booster\n")
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh on this machine")
    command = ["zsh", "-f", "-c", _ZSH, "zsh", str(scripts)]
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=under_load(60), env=environment)
    for word in ("verify", "--schedule", "zbv", "zero_bubble"):
        assert word in done.stdout, done.stdout + done.stderr


def test_bad_shell(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "completion", "fish")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "invalid choice: 'fish' (choose from" in err


def test_without_shtab(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, out, err = outcome(capsys, "completion", "bash")
    assert (code, out) == (2, "")
    assert err == "error: `booster completion` needs the package shtab; pip install 'hybrid-booster[completion]'\n"
