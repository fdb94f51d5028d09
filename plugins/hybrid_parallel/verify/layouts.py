"""Which layouts stand for one of any size, and what their check has shown; a check that is kept needs no more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from plugins.hybrid_parallel.config.options import HybridParallelConfig

_MOST_RANKS = 8  # of a layout that is checked as it is
_LONGEST_AXIS = 16
_EXPERTS = 4  # of a small copy
_MAX_NORM = 0.05  # of gradients that are clipped, for which those of a small copy are large enough
# Options that decide what is computed where. The others are about devices, files, memory and time.
_KEPT = (
    ("tp_size", "pp_size", "cp_size", "ep_size", "enable_sequence_parallelism", "sequence_parallelism_mode")
    + ("zero_stage", "pp_style", "num_model_chunks", "custom_policy", "tp_info", "sharding_dim")
    + ("make_vocab_size_divisible_by", "expert_capacity_factor", "contrastive", "num_microbatches")
    + ("max_norm", "enable_fused_normalization", "enable_jit_fused", "enable_all_optimization")
)


@dataclass
class LayoutReport:
    """What a check has shown: sentences, one for each layout."""

    proved: list[str] = field(default_factory=list)  # a step has the loss and the gradients of plain training
    findings: list[str] = field(default_factory=list)  # it has not
    not_checked: list[str] = field(default_factory=list)  # it could not be tried, and why

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        return [f"{each}, exact on a small copy" for each in self.proved] + self.findings + self.not_checked


class NotCheckedError(Exception):
    """Says why a model cannot be checked."""


def checked_layouts(options: Mapping[str, Any], world_size: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the layouts that stand for one of any size: options, and number of ranks.

    A layout of up to 8 ranks stands for itself, and has at most two replicas. Of a larger one all axes together are
    tried with two ranks each, and each axis alone with all of its ranks, up to 16.
    """
    parallel = HybridParallelConfig.from_options(**options).parallel
    kept = {name: options[name] for name in _KEPT if name in options}
    if (kept.get("num_microbatches") or 1) > 1:
        kept["num_microbatches"] = None  # one for each stage
    if kept.get("max_norm"):
        kept["max_norm"] = _MAX_NORM
    sizes = {axis: getattr(parallel, f"{axis}_size") for axis in ("tp", "pp", "cp", "ep")}
    sizes["ep"] = math.gcd(sizes["ep"], _EXPERTS) if sizes["ep"] > _EXPERTS else sizes["ep"]
    replicas = parallel.data_parallel_size(world_size)

    def layout(chosen: Mapping[str, int], replicas: int) -> tuple[dict[str, Any], int]:
        # Experts are shared by replicas and by ranks that share sequences.
        dp_size = max(replicas, -(-chosen["ep"] // chosen["cp"]))
        dp_size += -(dp_size * chosen["cp"]) % chosen["ep"]
        made = kept | {f"{axis}_size": size for axis, size in chosen.items()} | {"dp_size": dp_size}
        made["nonfinite"] = "ignore"  # values are compared
        if chosen["tp"] * chosen["cp"] == 1:
            made["enable_sequence_parallelism"] = False
        if made.get("enable_sequence_parallelism") is False:
            made.pop("sequence_parallelism_mode", None)
        return made, dp_size * chosen["tp"] * chosen["pp"] * chosen["cp"]

    exact = layout(sizes, min(replicas, 2))
    if exact[1] <= _MOST_RANKS:
        yield exact
        return
    yield layout({axis: min(size, 2) for axis, size in sizes.items()}, 1)
    for axis in ("tp", "cp", "ep", "pp"):  # stages take longest
        if (size := sizes[axis]) > 2:
            yield layout(dict.fromkeys(sizes, 1) | {axis: min(size, _LONGEST_AXIS)}, 1)
