"""`verify`: does anyone's own module train under a layout as it does without."""

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
    """Train a model plainly and under a plugin's layout, and compare every loss, gradient and weight.

    In a job all ranks call it alike, and train on CPUs. Without one it starts as many ranks on this machine as the
    layout needs; then `model_fn` and `criterion` are functions of a module that can be imported. Dropout is off in both
    trainings.

    Args:
        model_fn: makes the model, small enough to be trained on a CPU.
        batch: a global batch: tensors [samples, ...] by name of the arguments of the model's forward.
        plugin: how to train in parallel; its precision is not looked at.
        criterion: (outputs, batch) -> mean over the samples, or (sum, count); None for the model's own loss.
        steps: of plain SGD.
        precision: "fp64" or "fp32", of both trainings.
        timeout_s: for the ranks that are started.

    Returns:
        A report whose `str` says what was compared.

    Raises:
        VerificationError: the trainings differ; the report, with the first module or parameter where they do.
        ConfigurationError: the model cannot be cut like this, or has no loss.
    """
    return plugin.verify(model_fn, batch, criterion=criterion, steps=steps, precision=precision, timeout_s=timeout_s)
