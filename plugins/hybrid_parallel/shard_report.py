"""Report of the parameters that each rank of a layout holds, as data, JSON and HTML.

The model is sharded on the meta device, without devices or weights.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import build_mesh
from plugins.hybrid_parallel.setup.model import shard_model
from shardformer.distributed.random import random_numbers_apart
from shardformer.shard_spec import spec_of


@dataclass(frozen=True)
class ParamShard:
    """A rank's shard of a parameter."""

    name: str  # name in the whole model
    # shape, full_shape: shape of the shard, including padding, and of the whole parameter
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    dim: int | None  # sharded dim; None if the parameter is not sharded
    dtype: torch.dtype
    trains: bool  # whether the parameter requires a gradient

    @property
    def numel(self) -> int:
        """Number of elements of the shard."""
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        """Size of the shard in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class RankShards:
    """Shards of one rank of the first replica (with expert parallelism: of the first expert-parallel group)."""

    rank: int
    # stage, tp_rank: coordinates of the rank
    stage: int
    tp_rank: int
    pieces: tuple[ParamShard, ...]  # shards, in the order of the model
    ep_rank: int = 0  # coordinate on the expert-parallel axis

    @property
    def bytes(self) -> int:
        """Size of all shards of the rank in bytes."""
        return sum(piece.bytes for piece in self.pieces)


@random_numbers_apart()
def shard_report(build: Callable[[], nn.Module], config: HybridParallelConfig, world_size: int) -> list[RankShards]:
    """Return the shards of the first replica's ranks; `build`: called on the meta device for each of them."""
    if dist.is_initialized():
        raise ConfigurationError("process groups already exist; inspect a layout in a separate process")
    parallel = config.parallel
    shape = parallel.mesh_shape(world_size)
    grid = torch.arange(world_size).view(shape)
    found = []
    for stage, ep_rank, tp_rank in product(range(parallel.pp_size), range(parallel.ep_size), range(parallel.tp_size)):
        rank = int(grid.flatten(1, 2)[stage, ep_rank, tp_rank])
        with fake_rank(rank, world_size):
            mesh = build_mesh(*shape, ep_size=parallel.ep_size)
            with torch.device("meta"):
                model = build()
            shard_model(model, config, mesh)
            found.append(RankShards(rank, stage, tp_rank, tuple(_pieces(model, config.mixed_precision.dtype)), ep_rank))
    return found


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Set up fake process groups, whose collectives do nothing, from the view of rank `rank` of `world_size`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # init_process_group wraps it each time, to add the rank
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        sys.excepthook = hook
        dist.destroy_process_group()


def to_text(ranks: list[RankShards]) -> str:
    """Format a table of the parameters, with identical layers merged, and a list of the ranks."""
    rows = rows_of(ranks)
    width = max((len(name) for name, _, _ in rows), default=0)
    lines = [f"{name:<{width}}  {_who(ranks, pieces)}" for name, _, pieces in rows]
    shares_experts = any(each.ep_rank for each in ranks)
    totals = [
        f"rank {each.rank} (stage {each.stage}, {f'ep {each.ep_rank}, ' if shares_experts else ''}tp {each.tp_rank}): "
        f"{sum(piece.numel for piece in each.pieces):,} "
        f"parameters, {in_bytes(each.bytes)}"
        for each in ranks
    ]
    return "\n".join([*lines, "", *totals])


def rows_of(ranks: list[RankShards]) -> list[tuple[str, tuple[int, ...], list[ParamShard | None]]]:
    """Return rows of (name with layer ranges, full shape, shard of each rank); identical layers share one row."""
    by_name: dict[str, dict[int, ParamShard]] = {}
    for each in ranks:
        for piece in each.pieces:
            by_name.setdefault(piece.name, {})[each.rank] = piece
    rows: dict[tuple, tuple[list[int], list[ParamShard | None]]] = {}
    for name, held in by_name.items():
        pattern, number = _pattern(name)
        alike = tuple((rank, piece.shape, piece.dim, piece.dtype) for rank, piece in held.items())
        rows.setdefault((pattern, alike), ([], [held.get(each.rank) for each in ranks]))[0].append(number)
    return [
        (pattern.replace("*", _range(numbers)), next(piece for piece in pieces if piece is not None).full_shape, pieces)
        for (pattern, _), (numbers, pieces) in rows.items()
    ]


def _pieces(model: nn.Module, cast: torch.dtype | None) -> Iterator[ParamShard]:
    for name, param in model.named_parameters():
        spec = spec_of(param)
        dtype = (cast or param.dtype) if param.is_floating_point() else param.dtype
        yield ParamShard(name, tuple(param.shape), spec.full_shape, spec.dim, dtype, param.requires_grad)


def _who(ranks: list[RankShards], pieces: list[ParamShard | None]) -> str:
    held = [(each, piece) for each, piece in zip(ranks, pieces, strict=True) if piece is not None]
    piece = held[0][1]
    stages = sorted({each.stage for each, _ in held})
    where = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
    full = "x".join(map(str, piece.full_shape)) or "one number"
    if piece.dim is None:
        return f"{where}: {full}, whole on each rank, {in_bytes(piece.bytes)}"
    shapes = sorted({"x".join(map(str, each.shape)) for _, each in held})
    return f"{where}: {full}, cut along dim {piece.dim} into {' and '.join(shapes)}, {in_bytes(piece.bytes)}"


def _pattern(name: str) -> tuple[str, int]:
    """Replace the first number in a name by "*", and return both; the number is -1 if there is none."""
    found = re.search(r"(?<=\.)\d+(?=\.)", name)
    return (name, -1) if found is None else (f"{name[: found.start()]}*{name[found.end() :]}", int(found[0]))


def _range(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        return f"[{numbers[0]}-{numbers[-1]}]"
    return ",".join(map(str, numbers)) if len(numbers) == 1 else f"[{','.join(map(str, numbers))}]"


def in_bytes(count: float) -> str:
    """Format a byte count, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


_COLOURS = ("#dbe9f6", "#fde4cc", "#dcefd9", "#eadcf0", "#f8d7da", "#fff3bf", "#d8f1f0", "#e7e1d4")
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; }
table { border-collapse: collapse; }
th, td { border: 1px solid #ccc; padding: .25em .6em; text-align: left; white-space: nowrap; }
thead th { position: sticky; top: 0; background: #f4f4f4; }
td.none { color: #bbb; text-align: center; }
"""


def write_page(ranks: list[RankShards], title: str, path: Path) -> None:
    """Write the page to a self-contained file."""
    try:
        path.write_text(page(ranks, title), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}); give another path") from error


def page(ranks: list[RankShards], title: str) -> str:
    """Return the page as HTML text."""
    head = "".join(f"<th>rank {each.rank}<br>stage {each.stage}, tp {each.tp_rank}</th>" for each in ranks)
    total = "".join(f"<th>{in_bytes(each.bytes)}</th>" for each in ranks)
    body = "\n".join(
        f"<tr><th>{escape(name)}</th><td>{_shape(full)}</td>{''.join(map(_cell, ranks, pieces))}</tr>"
        for name, full, pieces in rows_of(ranks)
    )
    return (
        f"<!DOCTYPE html>\n<html lang='en'>\n<head><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n<table>\n"
        f"<thead><tr><th>parameter</th><th>whole</th>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n"
        f"<tfoot><tr><th>all of a rank</th><td></td>{total}</tr></tfoot>\n</table>\n</body>\n</html>\n"
    )


def _cell(rank: RankShards, piece: ParamShard | None) -> str:
    if piece is None:
        return "<td class='none'>·</td>"
    cut = "whole" if piece.dim is None else f"dim {piece.dim}"
    colour = _COLOURS[rank.stage % len(_COLOURS)]
    return f"<td style='background:{colour}'>{_shape(piece.shape)} <small>{cut}, {in_bytes(piece.bytes)}</small></td>"


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one number"


def shards_as_json(ranks: list[RankShards]) -> list[dict[str, Any]]:
    """Return each rank with its coordinates, its size, and its shards with their shapes."""
    return [
        {
            "rank": each.rank,
            "stage": each.stage,
            "tp_rank": each.tp_rank,
            "ep_rank": each.ep_rank,
            "parameters": sum(piece.numel for piece in each.pieces),
            "bytes": each.bytes,
            "shards": [
                {
                    "name": piece.name,
                    "shape": list(piece.shape),
                    "full_shape": list(piece.full_shape),
                    "dim": piece.dim,
                    "dtype": str(piece.dtype).removeprefix("torch."),
                    "bytes": piece.bytes,
                    "trains": piece.trains,
                }
                for piece in each.pieces
            ],
        }
        for each in ranks
    ]
