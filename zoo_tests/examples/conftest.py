"""The example's modules import one another by bare names, as scripts do: tests need their directory on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zoo_tests.examples.scripts import EXAMPLE

sys.path.insert(0, str(EXAMPLE))

_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
_LINE = "{label}\t{id}\t{id}\tThe cat \"sat on mat {id}.\tOn mat {id}, the cat 'sat.\n"


def _mrpc_text(num_pairs: int) -> str:
    """A file like the corpus's: a header and `num_pairs` lines with unbalanced quotes."""
    return _HEADER + "".join(_LINE.format(label=index % 2, id=index) for index in range(num_pairs))


@pytest.fixture
def mrpc_directory(tmp_path: Path) -> Path:
    """A small corpus: 21 training pairs and 13 test pairs."""
    directory = tmp_path / "mrpc"
    directory.mkdir()
    (directory / "msr_paraphrase_train.txt").write_text(_mrpc_text(21), encoding="utf-8")
    (directory / "msr_paraphrase_test.txt").write_text(_mrpc_text(13), encoding="utf-8-sig")
    return directory
