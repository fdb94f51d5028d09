"""Layouts that the convergence benchmark compares, and their common settings."""

from __future__ import annotations

from dataclasses import dataclass

GLOBAL_BATCH_SIZE = 16
MICROBATCH_SIZE = 2
WARMUP_FRACTION = 0.03


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes. The reference is one rank without the booster."""

    name: str
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    zero_stage: int = 0

    @property
    def num_ranks(self) -> int:
        """Number of processes to start."""
        return self.tp_size * self.pp_size * self.dp_size

    @property
    def is_sharded(self) -> bool:
        """Whether the layout has more than one rank."""
        return self.num_ranks > 1


REFERENCE = "unsharded"
_ALL = (
    Layout(name=REFERENCE),
    Layout(name="tp2", tp_size=2),
    Layout(name="pp2-zero1", pp_size=2, zero_stage=1),
    Layout(name="tp2-pp2", tp_size=2, pp_size=2),
    Layout(name="pp2-dp2-zero1", pp_size=2, dp_size=2, zero_stage=1),
    Layout(name="dp4", dp_size=4),
)
LAYOUTS = {layout.name: layout for layout in _ALL}
DEFAULT_LAYOUTS = (REFERENCE, "tp2", "pp2-zero1", "tp2-pp2", "pp2-dp2-zero1")
