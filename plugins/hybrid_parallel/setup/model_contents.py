"""Checks of model contents that do not work with every layout: peft adapters and quantised weights."""

from __future__ import annotations

from torch import nn

from plugins.hybrid_parallel.config.parallel import ParallelOptions
from shardformer.peft import check_adapters, model_inside


def check_contents(model: nn.Module, parallel: ParallelOptions) -> None:
    """Check that the layout supports what the model contains, before anything is changed.

    Raises:
        ValueError: if it does not.
    """
    sizes = {name: getattr(parallel, name) for name in ("tp_size", "pp_size", "cp_size", "ep_size")}
    check_adapters(model, next((f"{name}={size}" for name, size in sizes.items() if size > 1), None))
    if parallel.tp_size > 1:
        _check_quantised(model_inside(model), parallel.tp_size)


def _check_quantised(model: nn.Module, tp_size: int) -> None:
    """Refuse quantised weights: several of them share a byte or a scale, so they cannot be sharded like others."""
    packed = next((name for name, each in model.named_parameters() if not each.is_floating_point()), None)
    if packed is None and getattr(model, "hf_quantizer", None) is None:
        return
    what = f"{packed} is" if packed is not None else "its weights are"
    raise ValueError(
        f"tp_size={tp_size} cannot shard a quantised {type(model).__name__}: {what} packed; use tp_size=1 (dp and pp "
        "work), or load it without quantization_config"
    )
