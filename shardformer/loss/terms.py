"""Loss of each kind of head, expressed as sums and counts.

transformers computes a mean inside `forward`. The mean over one micro-batch on one rank does not determine the global
mean when counts differ (ignored labels, a short last batch). Here, therefore, a loss is a sum and a count. Counts
depend on the labels only, are known before the forward pass, and are added up over micro-batches and data-parallel
ranks. The sums read sharded vocabulary-parallel logits directly. Definitions follow transformers' `loss/loss_utils.py`
and, for BERT's older heads, their `forward`.

Losses of transformers that sum the numbers of boxes of all ranks, made to count those of their own batch.

The sum is over all ranks of the job, of which only those with the last pipeline stage compute a loss: the others would
never join. Micro-batches and replicas are put together by `HeadLoss`, which knows the counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, update_wrapper
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.loss.routers import RouterLoss
from shardformer.utils.source import names_read_by, with_globals

Batch = Mapping[str, Any]
IGNORE_INDEX = -100
# Keywords of transformers' loss functions in addition to labels, for forwards that pass keywords on to them.
DIVISOR, IGNORED, SHIFTED = LOSS_KEYWORDS = ("num_items_in_batch", "ignore_index", "shift_labels")


@dataclass(frozen=True)
class LossTerm:
    """One mean in a head's loss.

    Attributes:
        labels: batch key of the labels.
        count: (labels, batch) -> number of values that the mean is over (0-d).
        total: (outputs, labels) -> sum of the values (0-d, differentiable).
        weight: factor of this mean in the loss.
        is_input: whether the model's forward also reads the labels.
        epsilon: added to the global count.
        is_sum: whether the head sums the values instead of averaging them.
        prepare: (labels, batch) -> labels in the form that `count` and `total` take; None if unchanged.
        per_token: whether prepared labels are [batch, seq], each used only with the output of its own token.
        keywords: the `LOSS_KEYWORDS` that this term takes from the batch.
        is_divided: labels -> whether `num_items_in_batch` divides their sum; None if always.
    """

    labels: str
    count: Callable[[Tensor, Batch], Tensor]
    total: Callable[..., Tensor]
    weight: float = 1.0
    is_input: bool = False
    epsilon: float = 0.0
    is_sum: bool = False
    prepare: Callable[[Tensor, Batch], Tensor] | None = None
    per_token: bool = False
    keywords: tuple[str, ...] = ()
    is_divided: Callable[[Tensor], bool] | None = None

    def labels_of(self, batch: Batch) -> Tensor:
        """Return the labels of a batch in the form that `count` and `total` take: -100 where ignored."""
        labels = batch[self.labels]
        labels = labels if self.prepare is None else self.prepare(labels, batch)
        ignored = batch.get(IGNORED) if IGNORED in self.keywords else None
        if ignored is None:
            return labels
        # If another index is ignored, -100 is an ordinary label that is out of range.
        return labels.masked_fill(labels == IGNORE_INDEX, -1).masked_fill(labels == ignored, IGNORE_INDEX)

    def factor(self, batch: Batch, global_count: Tensor) -> Tensor:
        """Return the factor of the sum of values in the loss (0-d)."""
        divisor = batch.get(DIVISOR) if DIVISOR in self.keywords else None
        if divisor is not None and (self.is_divided is None or self.is_divided(batch[self.labels])):
            # Filled on the device: a copy of a number of the host would wait for the kernels of the forward pass.
            if isinstance(divisor, int | float):
                return self.weight / torch.full_like(global_count, divisor)
            return self.weight / torch.as_tensor(divisor, device=global_count.device).to(global_count).reshape(())
        if self.is_sum:
            return torch.full_like(global_count, self.weight)
        return self.weight / (global_count + self.epsilon).clamp(min=1.0)


class HeadLoss:
    """Loss that a head computes when labels are given: a weighted sum of means.

    Args:
        terms: the means.
        function: equivalent function of transformers' `loss_utils`, for forwards that call one.
        decoder_inputs: labels -> decoder inputs of an encoder-decoder that is given only labels.
        routers: the load-balancing loss to add.

    Attributes:
        reads_keywords: whether the head's forward passes `LOSS_KEYWORDS` on to its loss function.
        further_entries: optional batch entries that the head's forward reads for its loss and this class does not.
        reads_whole_logits: whether logits may not be sharded, as where the model's forward computes the loss.
        needs_all_labels: whether the head computes a loss only if the batch has the labels of all terms; if not, it
            adds the means whose labels are given.
    """

    reads_whole_logits = False
    needs_all_labels = True
    further_entries: tuple[str, ...] = ()

    def __init__(
        self,
        *terms: LossTerm,
        function: str | None = None,
        decoder_inputs: Callable[[Tensor], Tensor] | None = None,
        routers: RouterLoss | None = None,
    ) -> None:
        self.terms, self.function, self.decoder_inputs, self.routers = terms, function, decoder_inputs, routers
        self.reads_keywords = False

    @property
    def label_keys(self) -> tuple[str, ...]:
        """Return the batch keys of the labels that the model's forward does not need."""
        return tuple(term.labels for term in self.terms if not term.is_input)

    def applies_to(self, batch: Batch) -> bool:
        """Return whether the batch has the labels without which transformers returns no loss."""
        given = [_is_given(term, batch) for term in self.terms]
        return all(given) if self.needs_all_labels else any(given)

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the model's inputs: the batch without labels, plus the decoder inputs derived from them."""
        inputs = {key: value for key, value in batch.items() if key not in self.label_keys}
        given = any(inputs.get(key) is not None for key in ("decoder_input_ids", "decoder_inputs_embeds"))
        if self.decoder_inputs is not None and not given and batch.get("labels") is not None:
            inputs["decoder_input_ids"] = self.decoder_inputs(batch["labels"])
        return inputs

    def unread(self, batch: Batch) -> str | None:
        """Return a batch entry that the model's loss reads and this class does not; None if there is none."""
        further = next((name for name in self.further_entries if batch.get(name) is not None), None)
        if further is not None:
            return further
        asked = [name for name in LOSS_KEYWORDS if self.reads_keywords and batch.get(name) is not None]
        return next((name for name in asked if any(name not in term.keywords for term in self.terms)), None)

    def counts(self, batch: Batch) -> Tensor:
        """Return [terms], float64: the number of values in this batch that each mean is over, 0 without its labels."""
        batch = self._seen(batch)
        found = {term: term.count(term.labels_of(batch), batch).double() for term in self._given(batch)}
        none = torch.zeros_like(next(iter(found.values())))
        return torch.stack([found.get(term, none) for term in self.terms])

    def token_labels(self, batch: Batch) -> list[Tensor]:
        """Return the labels of each term that the batch has, as its sum reads them, -100 where ignored."""
        batch = self._seen(batch)
        return [term.labels_of(batch) for term in self._given(batch)]

    def divisor(self, batch: Batch) -> Any:
        """Return the user's divisor of the sum over the global batch; None if not given or not read by the model."""
        return batch.get(DIVISOR) if self.reads_keywords else None

    @property
    def per_token(self) -> bool:
        """Return whether the losses of parts of a sequence's tokens add up to the loss of the sequence."""
        return all(term.per_token for term in self.terms)

    def weighted_sum(
        self, outputs: Any, batch: Batch, global_counts: Tensor, part: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return this batch's share of the global loss: sum of weight * total / global count (0-d).

        Args:
            part: labels [batch, seq] -> labels of the tokens that `outputs` cover; None if they cover all tokens.
        """
        batch, counts = self._seen(batch), dict(zip(self.terms, global_counts, strict=True))
        share: Any = 0
        for term in self._given(batch):
            labels = term.labels_of(batch)
            total = term.total(outputs, labels if part is None else part(labels))
            share = share + total * term.factor(batch, counts[term]).to(total.dtype)
        return share

    def _given(self, batch: Batch) -> list[LossTerm]:
        """Return the terms of the loss of this batch."""
        return [term for term in self.terms if self.needs_all_labels or _is_given(term, batch)]

    def _seen(self, batch: Batch) -> Batch:
        """Return the batch as the model's loss sees it: `LOSS_KEYWORDS` only if the forward passes them on."""
        if self.reads_keywords:
            return batch
        return {name: value for name, value in batch.items() if name not in LOSS_KEYWORDS}


def _is_given(term: LossTerm, batch: Batch) -> bool:
    return batch.get(term.labels) is not None


# Names in transformers' losses that ask whether there are other ranks; both losses have a way without them.
_ASKS = ("_is_torch_distributed_initialized", "is_accelerate_available")


class LossOfOneProcess:
    """A loss function of transformers that does not look for other ranks.

    Args:
        function: the function, which is called with other globals.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        update_wrapper(self, function)  # the loss is known by the name of its function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns in a job of one process."""
        return _copied(self.function)(*args, **kwargs)


def count_own_boxes(model: nn.Module) -> None:
    """Replace the loss function of `model` if it sums numbers over all ranks of the job."""
    function = getattr(model, "loss_function", None)
    if isinstance(function, FunctionType) and any(True for _ in _criteria(function)):
        model.loss_function = LossOfOneProcess(function)


@cache
def _copied(function: FunctionType) -> FunctionType:
    return with_globals(function, {name: _derived(each) for name, each in _criteria(function)})


def _criteria(function: FunctionType) -> Iterator[tuple[str, type[nn.Module]]]:
    """Yield the modules, and their names, that the function creates and whose forward asks for other ranks."""
    if not function.__module__.startswith("transformers.loss."):
        return
    for name in names_read_by(function):
        found = inspect.unwrap(function).__globals__.get(name)
        if isinstance(found, type) and issubclass(found, nn.Module) and set(_ASKS) & names_read_by(found.forward):
            yield name, found


def _derived(criterion: type[nn.Module]) -> type[nn.Module]:
    forward = with_globals(criterion.forward, dict.fromkeys(_ASKS, lambda: False))
    return type(criterion.__name__, (criterion,), {"forward": forward})
