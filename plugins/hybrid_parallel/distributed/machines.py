"""Where the grid lies on the machines of a job: which axes stay inside a machine, and which cross the network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from booster.launch import machine_of_this_rank
from booster.logging import announce, get_logger
from plugins.hybrid_parallel.distributed.agreement import all_gather_json
from plugins.hybrid_parallel.distributed.mesh import AXES
from shardformer.distributed.process_groups import ProcessGroups

_logger = get_logger(__name__)


def announce_grid(grid: torch.Tensor) -> None:
    """Say on rank 0 which axes cross machines, once for each grid; warn if `tp` does. All ranks must call this.

    A job on one machine logs its sizes alone, at INFO.

    Args:
        grid: the ranks as [pp, dp, cp, tp].
    """
    key = ("announced", grid.shape, tuple(grid.flatten().tolist()))
    ProcessGroups.of_world().get_or_create(key, lambda: _announce(grid, all_gather_json(machine_of_this_rank())))


def _announce(grid: torch.Tensor, machines: Sequence[str]) -> None:
    line, warning = line_of(grid, machines), warning_of(grid, machines)
    if len(set(machines)) == 1:
        _logger.info("%s", line)
    else:
        announce(_logger, line)
    if warning is not None and dist.get_rank() == 0:
        _logger.warning("%s", warning)


def line_of(grid: torch.Tensor, machines: Sequence[str]) -> str:
    """Describe a grid: the sizes of its axes, and which of them stay inside a machine.

    Args:
        grid: the ranks as [pp, dp, cp, tp].
        machines: the machine of each rank.
    """
    used = [axis for axis, size in zip(AXES, grid.shape, strict=True) if size > 1]
    sizes = [f"{axis} {grid.shape[AXES.index(axis)]}" for axis in used]
    count = len(set(machines))
    line = f"mesh: {' x '.join(sizes) or 'one rank'} on {count} machine{'s' if count > 1 else ''}"
    across = [axis for axis in used if _first_crossing(grid, axis, machines)]
    inside = [axis for axis in used if axis not in across]
    parts = [_clause(inside, "stay", "inside a machine")] if count > 1 and inside else []
    parts += [_clause(across, "cross", "machines")] if across else []
    return "; ".join([line, ", ".join(parts)]) if parts else line


def warning_of(grid: torch.Tensor, machines: Sequence[str]) -> str | None:
    """Return a sentence if a tensor-parallel group crosses machines, with what would not; None otherwise.

    Args:
        grid: the ranks as [pp, dp, cp, tp].
        machines: the machine of each rank.
    """
    crossing = _first_crossing(grid, "tp", machines)
    if crossing is None:
        return None
    tp_size = grid.shape[-1]
    counts = Counter(machines).values()
    fits = math.gcd(tp_size, *counts)
    if fits == tp_size:
        cure = "let the ranks of each machine follow one another, as srun --distribution=block does"
    elif len(set(counts)) == 1:
        cure = f"a machine has {min(counts)} of the ranks, so use tp_size={fits}, and pp_size for the rest"
    else:
        cure = f"a machine has {min(counts)} to {max(counts)} ranks, so use tp_size={fits}, and pp_size for the rest"
    return (
        f"tp_size={tp_size} puts the tensor-parallel group of ranks {crossing[0]} to {crossing[-1]} on "
        f"{len({machines[rank] for rank in crossing})} machines, and every layer waits for the network between them; "
        f"{cure}"
    )


def _first_crossing(grid: torch.Tensor, axis: str, machines: Sequence[str]) -> list[int] | None:
    """Return the first group along an axis whose ranks are on several machines."""
    position = AXES.index(axis)
    groups = grid.movedim(position, -1).reshape(-1, grid.shape[position])
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    where = torch.tensor([numbers[machine] for machine in machines])[groups]
    crossing = (where != where[:, :1]).any(1).nonzero()
    return groups[crossing[0, 0]].tolist() if len(crossing) else None


def _clause(axes: Sequence[str], verb: str, where: str) -> str:
    """Return "pp and dp cross machines", for one axis "pp crosses machines"."""
    ending = "" if len(axes) > 1 else "es" if verb.endswith("s") else "s"
    names = axes[0] if len(axes) == 1 else f"{', '.join(axes[:-1])} and {axes[-1]}"
    return f"{names} {verb}{ending} {where}"
