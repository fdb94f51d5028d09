"""Options for reproducing, recording and checking a training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.hybrid_parallel.config.option_group import (
    COUNT,
    SWITCH,
    OptionGroup,
    Rule,
    is_integer,
    one_of,
    option,
    positive,
)


def _is_power_of_two(value: Any) -> bool:
    return is_integer(value) and value > 0 and value & (value - 1) == 0


_POWER_OF_TWO = Rule(((_is_power_of_two, "is not a power of two; use 2, 4 or 8"),), 4)


@dataclass(frozen=True, kw_only=True)
class DebugOptions(OptionGroup):
    """What is seeded, recorded and checked.

    Attributes:
        nonfinite: handling of a step whose gradients are nan or inf on any rank: "raise" reports where it began, "skip"
            skips the step on all ranks, "ignore" does not check. fp16 skips such steps as long as its loss scale can
            shrink.
        seed: seed of the random streams; None for the seed that `launch` set.
        record_schedule: directory to which the times of pipeline actions are written, for `booster inspect --recorded`.
        check_layout: what happens if a small copy of the model trains otherwise under the layout than plainly: "refuse"
            raises an error before anything is changed, "warn" logs it, "off" does not look. Off by default: a third
            of the classes has been tried with it. `BOOSTER_CHECK_LAYOUT` in the environment overrides it.
        debug: check every module for nan and inf and every collective for mismatched calls, and compare what ranks must
            share; `BOOSTER_DEBUG=1` in the environment has the same effect.
        synchrony_interval: in debug mode, number of steps between two comparisons of parameters over ranks.
        reproducible: train to the same bits under every layout.
        reproducible_unit: number of samples of each pass under `reproducible=True`, the same for all layouts.
        reproducible_blocks: number of blocks that tensor-parallel layers are computed in under `reproducible=True`, the
            same for all layouts; `tp_size` divides it. None for 4, or fewer if the model cannot be divided so.
        reproducible_sequence_blocks: number of blocks that sequences are divided into between these layers, the same
            for all layouts; under sequence parallelism `tp_size` divides it. None for as many as `reproducible_blocks`,
            or 1 if sequence parallelism cannot divide the model.
    """

    nonfinite: str = option("raise", one_of("raise", "skip", "ignore"))
    seed: int | None = option(
        None,
        Rule(
            (
                (is_integer, "is not an integer; use one such as 42"),
                (lambda value: abs(value) < 2**62, "is beyond 62 bits; use a seed such as 42"),
            ),
            42,
        ),
    )
    record_schedule: str | Path | None = option(
        None,
        Rule(((lambda value: isinstance(value, str | Path), "is no path; use a directory such as 'recorded'"),), "."),
    )
    check_layout: str = option("off", one_of("refuse", "warn", "off"))
    debug: bool = option(False, SWITCH)
    synchrony_interval: int = option(1, positive(10))
    reproducible: bool = option(False, SWITCH)
    reproducible_unit: int = option(1, COUNT)
    reproducible_blocks: int | None = option(None, _POWER_OF_TWO)
    reproducible_sequence_blocks: int | None = option(None, COUNT)

    def conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between these options."""
        if self.reproducible:
            return []
        defaults = {"reproducible_unit": 1, "reproducible_blocks": None, "reproducible_sequence_blocks": None}
        return [
            f"{name}={getattr(self, name)} needs reproducible=True; use it, or {name}={default}"
            for name, default in defaults.items()
            if (getattr(self, name) or 1) > 1
        ]
