"""How far a reader has to go, with today's counts as ceilings; a change that shortens the way lowers them.

What fails here first: a new file between two others, and an import that loads a feature nobody asked for. The command
`python -m zoo_tests.architecture.hops` prints the counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from shardformer.shard_spec import Part, ShardSpec, pad_to_multiple
from zoo_tests.architecture.hops import REPOSITORY, Hops, sizes

SIZES = {"files": 284, "lines": 75_724, "import lines": 4_645, "files with checks": 49}
HOPS = {
    "modules at import": 116,
    "files of boost": 75,
    "files of a first step": 48,
    "files of a step": 44,
    "functions of a step": 309,
    "depth of a step": 14,
    "calls of a step": 767,
}


def _over(found: Mapping[str, int], ceilings: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{found[name]} > {most}" for name, most in ceilings.items() if found[name] > most}


def test_the_library_does_not_grow() -> None:
    assert not _over(sizes(), SIZES)


@pytest.mark.slow
def test_the_ways_do_not_get_longer() -> None:
    """Of an import, of `boost`, and of steps of two tensor-parallel ranks, in a process of their own."""
    command = [sys.executable, "-m", "zoo_tests.architecture.hops"]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    assert not _over(json.loads(done.stdout), HOPS)


def test_calls_are_counted() -> None:
    """Files and functions of the library once, frames of it alone, and nothing outside of the context."""
    spec = ShardSpec((6, 4), 0, (Part(6, 2),), 0, 3)
    with Hops() as one:
        json.dumps(pad_to_multiple(5, 4))
    assert (len(one.files), len(one.functions), one.depth, one.calls) == (1, 1, 1, 1)
    with Hops() as nested:
        spec.pieces()
        spec.pieces()
    assert (len(nested.files), len(nested.functions), nested.depth) == (1, 3, 3), (
        "pieces, piece, and the generator in it"
    )
    spec.pieces()
    assert sys.getprofile() is None and len(one.functions) == 1
