"""How the tests run the example's scripts: on ranks of the pool, or in a process of their own as a user does."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from zoo_tests.harness.ranks import run_on_ranks, under_load

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "bert"
_TIMEOUT_S = 300  # cores may be shared; alone each script takes 10 s


@dataclass
class Printed:
    """What one rank printed."""

    out: str
    err: str


def run_on_pool(name: str, *arguments: object, ranks: int) -> list[Printed]:
    """Run the `main` of `examples/bert/<name>.py` on ranks that have imported torch and transformers already.

    Raises:
        RankError: the script failed on a rank.
    """
    return run_on_ranks(ranks, _run_main, name, [str(argument) for argument in arguments], timeout_s=_TIMEOUT_S)


def _run_main(name: str, arguments: list[str]) -> Printed:
    """Run it on this rank; its modules have common names, which must not stay for other tests."""
    out, err = io.StringIO(), io.StringIO()
    sys.path.insert(0, str(EXAMPLE))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            importlib.import_module(name).main(arguments)
    finally:
        sys.path.remove(str(EXAMPLE))
        for path in EXAMPLE.glob("*.py"):
            sys.modules.pop(path.stem, None)
    return Printed(out.getvalue(), err.getvalue())


def run_script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `examples/bert/<name>` to its end by plain Python."""
    paths = [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, str(EXAMPLE / name), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=under_load(_TIMEOUT_S),
    )
