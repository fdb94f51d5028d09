"""The notebooks that people learn by: each runs from its first cell to its last in a process of its own.

What breaks here first: a fork of a process that has trained, which a notebook has and a script has not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zoo_tests.examples.scripts import REPOSITORY
from zoo_tests.harness.environment import environment_of_a_job

NOTEBOOKS = sorted((REPOSITORY / "examples" / "notebooks").glob("*.ipynb"))
_SHELL = "import subprocess; subprocess.run({!r}, shell=True, check=True)"  # a cell that begins with "!"


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    """Its own assertions compare layouts with one process."""
    cells = [cell for cell in json.loads(notebook.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    assert not any(cell["outputs"] for cell in cells), "committed without outputs"
    program = "\n".join(_SHELL.format(text[1:]) if text.startswith("!") else text for text in sources)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # the `booster` command
    environment = environment_of_a_job(PATH=path) | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
