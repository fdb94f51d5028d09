"""Options that `reproducible=True` excludes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Option -> the value it needs, and why another one is refused.
_NEEDED: dict[str, tuple[Any, str]] = {
    "cp_size": (1, "adds up attention over parts of sequences"),
    "enable_sequence_overlap": (False, "multiplies the tokens of each rank by themselves"),
    "ep_size": (1, "multiplies the tokens of several ranks at once"),
    "expert_capacity_factor": (None, "drops tokens by the whole batch of a rank"),
    "compile_layers": (False, "chooses kernels by measured time"),
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
    if options["enable_sequence_parallelism"] and options["sequence_parallelism_mode"] != "split_gather":
        mode = options["sequence_parallelism_mode"]
        problems.append(
            f"sequence_parallelism_mode={mode!r} multiplies parts of sequences by whole weights, so that "
            "reproducible=True refuses it; use 'split_gather', or reproducible=False"
        )
    blocks, tp_size = options["reproducible_blocks"], options["tp_size"]
    if blocks is not None and blocks % tp_size:
        problems.append(
            f"tp_size={tp_size} does not divide reproducible_blocks={blocks}; use "
            f"reproducible_blocks={1 << (tp_size - 1).bit_length()} in every layout, or another tp_size"
        )
    parts = options["reproducible_sequence_blocks"]
    if options["enable_sequence_parallelism"] and parts % tp_size:
        problems.append(
            f"tp_size={tp_size} does not divide reproducible_sequence_blocks={parts}, as enable_sequence_parallelism="
            f"True needs; use reproducible_sequence_blocks={tp_size} in every layout, or no sequence parallelism"
        )
    precision = options["precision"]
    if precision in _PRECISIONS:
        problems.append(
            f"precision={precision!r} {_PRECISIONS[precision]}, so that reproducible=True refuses it; use 'bf16' or "
            "'fp32', or reproducible=False"
        )
    return problems
