"""Adapt batches of the form ((inputs...), (labels...)) and losses `loss_func(logits, labels)` to the engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.compat.deepspeed_3d.logits import reading_cut_logits

LossFunction = Callable[[Any, Any], Any]
_FORM = "((inputs...), (labels...)), or a mapping of the model's keyword arguments"


def names_of_inputs(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional parameters of a model's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


class PairLoss:
    """Criterion of `execute_pipeline` that calls a loss function of logits and labels.

    Args:
        loss_func: (logits, labels) -> mean over samples, or (sum, count).
        model: the model that computed the logits; they stay sharded over the vocabulary if its head is.
        names: names of the labels in a batch, in order.
        is_tuple: whether `loss_func` takes a tuple of labels or a single tensor.
    """

    reads_parallel_logits = True

    def __init__(self, loss_func: LossFunction, model: nn.Module, names: Sequence[str], is_tuple: bool) -> None:
        self.loss_func, self.model = loss_func, model
        self.own_entries, self.is_tuple = tuple(names), is_tuple

    def __call__(self, outputs: Any, microbatch: Mapping[str, Any]) -> Any:
        """Compute the user's loss from the outputs and the labels of a micro-batch."""
        labels = tuple(microbatch[name] for name in self.own_entries)
        with reading_cut_logits(self.model):
            return self.loss_func(_logits_of(outputs), labels if self.is_tuple else labels[0])


def adapted(
    batch: Any, names: Sequence[str], model: nn.Module, criterion: LossFunction | None, needs_loss: bool
) -> tuple[Any, Callable[[Any, Any], Any] | None]:
    """Convert a batch to a mapping, and the loss function to a criterion for it.

    If the batch is a mapping, both are returned unchanged.

    Args:
        batch: a mapping, or ((inputs...), (labels...)).
        names: names of the model's inputs, in order.
        model: the model, for the criterion.
        criterion: the user's loss function, or None.
        needs_loss: whether a loss is required.

    Raises:
        ConfigurationError: the batch has another form or more inputs than the model, or a required loss function is
            missing.
    """
    if isinstance(batch, Mapping):
        return batch, criterion
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        what = f"{len(batch)} elements" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
        raise ConfigurationError(f"a batch is {what}; let batch_fn return {_FORM}")
    inputs, labels = batch
    is_tuple = isinstance(labels, tuple | list)
    labels = labels if is_tuple else (labels,)
    given = _by_name(inputs, names)
    if criterion is None:
        if needs_loss:
            raise ConfigurationError(
                "a batch of ((inputs...), (labels...)) says nothing about the loss; give execute_pipeline a "
                "criterion=loss_func, which is called as loss_func(logits, labels)"
            )
        return given, None
    labels = {f"labels[{number}]": value for number, value in enumerate(labels)}
    return {**given, **labels}, PairLoss(criterion, model, tuple(labels), is_tuple)


def _by_name(inputs: Any, names: Sequence[str]) -> dict[str, Any]:
    """Map inputs to their parameter names in the model's forward; None inputs are left out."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if len(inputs) > len(names):
        raise ConfigurationError(
            f"a batch has {len(inputs)} inputs, and the model's forward takes {len(names)} by position "
            f"({', '.join(names)}); use so many at most"
        )
    return {name: value for name, value in zip(names, inputs, strict=False) if value is not None}


def _logits_of(outputs: Any) -> Any:
    """Return the input of the loss: the logits, or the hidden states of a model without a head."""
    if isinstance(outputs, Mapping):
        return outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))
    return outputs[0] if isinstance(outputs, tuple) else outputs
