"""Time a stranger's way to the first sharded step, by the commands of the README and nothing else.

    python -m zoo_tests.campaigns.first_hour --output docs/results/first_hour.md

Each way begins with a copy of the files under git and an empty virtual environment, in a new folder. The index is the
one that pip is configured with, and the package itself comes from the wheel that `make wheel` leaves.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from zoo_tests.docs.pages import COMMAND, scripts_of
from zoo_tests.harness.environment import REPOSITORY
from zoo_tests.hybrid_parallel.test_mistakes import MISTAKES, unanswered

_HEAD = """# A stranger's first hour

Written by `python -m zoo_tests.campaigns.first_hour --output docs/results/first_hour.md`; do not edit. From an empty
virtual environment to the last line of the README's script, saved model included, by the README's commands. {machine}
Nearly all of the time is pip's, which downloads torch.

{mistakes} mistakes of a script, each made on two ranks: **{answered} of {answers} answers** are one sentence that holds
the line to write (`zoo_tests/hybrid_parallel/test_mistakes.py`).

| Way | Installed after | First script ends after | Minutes in all | GB on the disk |
|---|---|---|---|---|
"""


def steps_of(way: str) -> tuple[str, str]:
    """Return the commands that install the library, and those that train for the first time."""
    run = "{python} -m booster run --nproc-per-node 4 script.py"
    return {
        "`pip install .` in a checkout": ("{pip} install .", run),
        "`pip install hybrid-booster` by its wheel": (
            "make wheel && {pip} install hybrid-booster --find-links dist",
            run,
        ),
        "`make bert`": ("make setup", 'make bert ARGS="--limit 64 --eval-limit 32"'),
    }[way]


WAYS = ("`pip install .` in a checkout", "`pip install hybrid-booster` by its wheel", "`make bert`")


def walk(way: str, folder: Path) -> tuple[float, float, float]:
    """Go one way in an empty folder; return the seconds of both steps, and GB that lie in it then."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    [script] = [each for each in scripts_of(REPOSITORY / "README.md") if each.how == COMMAND]
    (folder / "script.py").write_text(script.source, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "venv", "own"], cwd=folder, check=True)
    names = {"python": "own/bin/python", "pip": "own/bin/python -m pip"}
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    seconds = []
    for command in steps_of(way):
        start = time.monotonic()
        subprocess.run(command.format(**names), shell=True, cwd=folder, env=environment, check=True)
        seconds.append(time.monotonic() - start)
    return seconds[0], seconds[1], sum(_sizes(folder)) / 1e9


def _sizes(folder: Path) -> Iterator[int]:
    """Yield the bytes of each file that was installed."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and ".cache" not in path.parts:
            yield path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    machine = f"{os.cpu_count()} CPU cores, Python {platform.python_version()}."
    mistakes, answers = len(MISTAKES), 2 * len(MISTAKES)
    answered = answers - len(unanswered())
    page = _HEAD.format(machine=machine, mistakes=mistakes, answers=answers, answered=answered)
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            install, script, size = walk(way, Path(folder))
        page += f"| {way} | {install:.0f} s | {script:.0f} s | {(install + script) / 60:.1f} | {size:.1f} |\n"
        options.output.write_text(page, encoding="utf-8")  # an interrupt keeps the ways that are done


if __name__ == "__main__":
    main()
