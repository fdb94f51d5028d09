"""The grid on several machines: tp and cp inside, pp or dp across, and a line that says so.

What breaks here first: the order of the axes in `mesh.py`, on which the speed of a large job depends.
"""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
import torch.distributed as dist

from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.distributed.mesh import line_of, warning_of
from zoo_tests.harness.ranks import run_on_ranks

TP_CROSSES = (
    "tp_size=4 puts the tensor-parallel group of ranks 0 to 3 on 2 machines, and every layer waits for the network "
    "between them; a machine has 2 of the ranks, so use tp_size=2, and pp_size for the rest\n"
)


def said_by(sizes: dict[str, int], ranks_of_a_machine: int) -> str:
    """What this rank writes when two plugins of one layout ask for their grid."""
    heard = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stderr(heard):
        patched.setenv("GROUP_RANK", str(dist.get_rank() // ranks_of_a_machine))
        for _ in range(2):
            assert HybridParallelPlugin(**sizes).grid.size("tp") == sizes.get("tp_size", 1)
    return heard.getvalue()


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"tp_size": 2, "pp_size": 2}, "pp 2 x tp 2 on 2 machines; tp stays inside a machine, pp crosses machines"),
        ({"tp_size": 2}, "dp 2 x tp 2 on 2 machines; tp stays inside a machine, dp crosses machines"),
        ({"cp_size": 2, "pp_size": 2}, "pp 2 x cp 2 on 2 machines; cp stays inside a machine, pp crosses machines"),
        ({"pp_size": 2}, "pp 2 x dp 2 on 2 machines; dp stays inside a machine, pp crosses machines"),
        ({}, "dp 4 on 2 machines; dp crosses machines"),
    ],
)
def test_rank_0_says_once_where_the_axes_lie(sizes: dict[str, int], line: str) -> None:
    assert run_on_ranks(4, said_by, sizes, 2) == [f"mesh: {line}\n", "", "", ""]


def test_tp_across_machines_is_one_warning() -> None:
    first, *others = run_on_ranks(4, said_by, {"tp_size": 4}, 2)
    assert first == f"mesh: tp 4 on 2 machines; tp crosses machines\n[rank 0] {TP_CROSSES}"
    assert others == ["", "", ""]


def test_a_single_machine_is_quiet() -> None:
    assert run_on_ranks(4, said_by, {"tp_size": 2, "pp_size": 2}, 4) == ["", "", "", ""]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((16, 128, 1, 8), "tp stays inside a machine, pp and dp cross machines"),
        ((16, 128, 2, 4), "cp and tp stay inside a machine, pp and dp cross machines"),
        ((16, 64, 2, 8), "tp stays inside a machine, pp, dp and cp cross machines"),
        ((8192, 2, 1, 1), "dp stays inside a machine, pp crosses machines"),
        ((1, 16384, 1, 1), "dp crosses machines"),
    ],
)
def test_what_fits_into_a_machine_stays_there_on_16384_devices(shape: tuple[int, ...], words: str) -> None:
    grid = torch.arange(16384).view(shape)
    machines = [f"node{rank // 8}" for rank in range(16384)]
    assert line_of(grid, machines).partition(" on 2048 machines; ")[2] == words
    assert warning_of(grid, machines) is None


@pytest.mark.parametrize(
    ("machines", "tp_size", "cure"),
    [
        ("aaabbb", 2, "a machine has 3 of the ranks, so use tp_size=1, and pp_size for the rest"),
        ("aaaabb", 6, "a machine has 2 to 4 ranks, so use tp_size=2, and pp_size for the rest"),
        ("ababab", 3, "let the ranks of each machine follow one another, as srun --distribution=block does"),
    ],
)
def test_the_warning_says_what_would_do(machines: str, tp_size: int, cure: str) -> None:
    warning = warning_of(torch.arange(6).view(-1, 1, 1, tp_size), machines)
    assert warning is not None and warning.endswith(f"; {cure}")
    if machines == "aaabbb":
        assert "ranks 2 to 3 on 2 machines" in warning
