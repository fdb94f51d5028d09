"""Options for reproducing, recording and checking a training, and what `reproducible=True` excludes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from plugins.hybrid_parallel.config.parallel import ParallelOptions


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
            raises an error before anything is changed, "warn" logs it, "off" does not look. `BOOSTER_CHECK_LAYOUT` in
            the environment overrides it.
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
    check_layout: str = option("refuse", one_of("refuse", "warn", "off"))
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


# Option -> the value it needs, and why another one is refused.
_NEEDED: dict[str, tuple[Any, str]] = {
    "enable_sequence_overlap": (False, "multiplies the tokens of each rank by themselves"),
    "ep_size": (1, "multiplies the tokens of several ranks at once"),
    "expert_capacity_factor": (None, "drops tokens by the whole batch of a rank"),
    "compile_layers": (False, "chooses kernels by measured time"),
    "tiled_mlp": (False, "adds up the gradients of weights in tiles"),
    "offload_optimizer": (None, "adds up gradients outside of the device's memory"),
    "offload_parameters": (None, "adds up gradients outside of the device's memory"),
    "offload_activations": (None, "has not been shown to keep bits"),
}
_PRECISIONS = {
    "fp16": "has a loss scale that overflows at other steps",
    "fp8": "scales whole tensors",
}


def conflicts_with_reproducible(options: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each option that `reproducible=True` refuses.

    Args:
        options: all options of the plugin, by name.
    """
    problems = [
        f"{name}={options[name]!r} {why}, so that reproducible=True refuses it; use {name}={needed!r}, or "
        "reproducible=False"
        for name, (needed, why) in _NEEDED.items()
        if options[name] != needed
    ]
    shares = options["cp_size"] > 1  # in one way, whatever the mode, see `sharing_layers`
    mode = options["sequence_parallelism_mode"]
    if options["enable_sequence_parallelism"] and mode != "split_gather" and not shares:
        problems.append(
            f"sequence_parallelism_mode={mode!r} multiplies parts of sequences by whole weights, so that "
            "reproducible=True refuses it; use 'split_gather', or reproducible=False"
        )
    num_ranks, given = _sharing_ranks(options)
    blocks, parts = options["reproducible_blocks"], options["reproducible_sequence_blocks"]
    if shares and blocks is None and num_ranks.bit_count() > 1:
        problems.append(
            f"{given} is no power of two, as the blocks of layers that these ranks share under reproducible=True are; "
            "use powers of two, such as cp_size=2, or reproducible=False"
        )
    if blocks is not None and blocks % num_ranks:
        problems.append(
            f"{given} does not divide reproducible_blocks={blocks}; use "
            f"reproducible_blocks={1 << (num_ranks - 1).bit_length()} in every layout, or fewer ranks"
        )
    if (options["enable_sequence_parallelism"] or shares) and parts is not None and parts % num_ranks:
        why = f"cp_size={options['cp_size']}" if shares else "enable_sequence_parallelism=True"
        problems.append(
            f"{given} does not divide reproducible_sequence_blocks={parts}, as {why} needs; use "
            f"reproducible_sequence_blocks={num_ranks} in every layout, or no sequence parallelism"
        )
    precision = options["precision"]
    if precision in _PRECISIONS:
        problems.append(
            f"precision={precision!r} {_PRECISIONS[precision]}, so that reproducible=True refuses it; use 'bf16' or "
            "'fp32', or reproducible=False"
        )
    return problems


def _sharing_ranks(options: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of ranks that share layers, and the options that say so."""
    tp_size, cp_size = options["tp_size"], options["cp_size"]
    if cp_size == 1:
        return tp_size, f"tp_size={tp_size}"
    if tp_size == 1:
        return cp_size, f"cp_size={cp_size}"
    return tp_size * cp_size, f"tp_size*cp_size={tp_size}*{cp_size}={tp_size * cp_size}"


def sharing_layers(parallel: ParallelOptions) -> ParallelOptions:
    """Return the mesh on which `cp_size` ranks share sequences and layers as `split_gather` does.

    Attention that is added up over parts of sequences rounds otherwise than attention over whole ones, so that each
    rank computes some of the heads over whole sequences, and between layers has a part of each sequence.
    """
    return replace(
        parallel,
        tp_size=parallel.tp_size * parallel.cp_size,
        cp_size=1,
        sp_size=None,
        enable_sequence_parallelism=True,
        sequence_parallelism_mode="split_gather",
    )
