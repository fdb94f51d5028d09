"""How the tests start the example's scripts: in processes of their own, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "bert"
_TIMEOUT_S = 300  # cores may be shared; alone each script takes 10 s


def run_script(name: str, *arguments: object, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `examples/bert/<name>` to its end, under `booster run` on `ranks` ranks or by plain Python for 0."""
    launcher = ["-m", "booster", "run", "--nproc-per-node", str(ranks)] if ranks else []
    paths = [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE / name), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
