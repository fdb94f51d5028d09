"""`verify`: a check that a user's module trains the same under a layout as unsharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from booster.plugin import Plugin


def verify(
    model_fn: Callable[[], nn.Module],
    batch: Mapping[str, Any],
    plugin: Plugin,
    *,
    criterion: Callable[[Any, Any], Any] | None = None,
    steps: int = 2,
    precision: str = "fp64",
    timeout_s: float = 300.0,
) -> Any:
    """Train a model unsharded and under a plugin's layout, and compare every loss, gradient and weight.

    In a job, all ranks call it with the same arguments, and train on CPUs. Outside of a job, it starts as many ranks on
    this machine as the layout needs; then `model_fn` and `criterion` must be functions of an importable module. Dropout
    is off in both runs.

    Args:
        model_fn: creates the model, which must be small enough to train on a CPU.
        batch: a global batch: tensors [samples, ...] keyed by argument name of the model's forward.
        plugin: the parallel training strategy; its precision is ignored.
        criterion: (outputs, batch) -> mean over the samples, or (sum, count); None for the model's own loss.
        steps: number of plain SGD steps.
        precision: "fp64" or "fp32", for both runs.
        timeout_s: time limit in seconds for the ranks that are started.

    Returns:
        A report whose `str` says what was compared.

    Raises:
        VerificationError: the runs differ; the message is the report, with the first module or parameter that differs.
        ConfigurationError: the model cannot be sharded like this, or has no loss.
    """
    return plugin.verify(model_fn, batch, criterion=criterion, steps=steps, precision=precision, timeout_s=timeout_s)
