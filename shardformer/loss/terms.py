"""Loss of each kind of head, expressed as sums and counts.

transformers computes a mean inside `forward`. The mean over one micro-batch on one rank does not determine the global
mean when counts differ (ignored labels, a short last batch). Here, therefore, a loss is a sum and a count. Counts
depend on the labels only, are known before the forward pass, and are added up over micro-batches and data-parallel
ranks. The sums read sharded vocabulary-parallel logits directly. Definitions follow transformers' `loss/loss_utils.py`
and, for BERT's older heads, their `forward`.

Some losses of transformers sum the numbers of boxes or masks over all ranks of the job, of which only those with the
last pipeline stage compute a loss: the others would never join. They are made to count those of their own batch.

The load-balancing loss of routers is a product of means over all layers and tokens of a batch (Switch Transformer,
arXiv 2101.03961, section 2.2). The losses of parts do not add up; the sums that its means divide do (`RouterSums`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial, update_wrapper
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.utils.source import names_read_by, reads, uses, with_globals

ASKED = "output_router_logits"
_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class RouterSums:
    """What the auxiliary loss depends on, of some layers and tokens; those of parts add up."""

    chosen: Tensor  # [experts], how many times each expert was chosen; without gradient
    probabilities: Tensor  # [experts], sum of the probabilities of each expert
    rows: Tensor  # number of (layer, token) pairs, 0-d

    @property
    def loss(self) -> Tensor:
        """The auxiliary loss before its factor (0-d), if these are the sums of all layers and tokens."""
        return self.derivatives.mul(self.probabilities).sum()

    @property
    def derivatives(self) -> Tensor:
        """Derivative of the loss with respect to each sum of probabilities, [experts]."""
        return self.chosen * len(self.chosen) / self.rows.clamp(min=1.0) ** 2

    def packed(self) -> Tensor:
        """Return all values in one tensor, to be summed over ranks; without gradient."""
        return torch.cat([self.chosen, self.probabilities.detach(), self.rows[None]])

    @staticmethod
    def unpacked(values: Tensor) -> RouterSums:
        """Return the sums that `packed` gave."""
        count = len(values) // 2
        return RouterSums(values[:count], values[count:-1], values[-1])


class RouterLoss:
    """Auxiliary router loss of one model.

    Args:
        model: model whose forward returns `aux_loss` and `router_logits`.
        factor: weight of the auxiliary loss in the total loss.
    """

    def __init__(self, model: nn.Module, factor: float) -> None:
        self.model, self.factor = model, factor

    def of_all(self, outputs: Any, batch: Mapping[str, Any], gather: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Compute the auxiliary loss (0-d), before its factor, over the samples of this pass and of other ranks.

        Args:
            gather: [rows, ...] of this rank -> rows of all ranks; None if there are no other ranks.

        Raises:
            ValueError: the family computes the loss in its own way, and there are other ranks.
        """
        if gather is None:
            return outputs.aux_loss
        mask, function = batch.get("attention_mask"), self._function
        if function is None:
            raise ValueError(
                f"output_router_logits=True: {type(self.model).__name__} computes its auxiliary loss in a way of its "
                "own, of which those of replicas cannot be put together; use dp_size=1 or output_router_logits=False"
            )
        scores = tuple(map(gather, outputs.router_logits))
        mask = None if mask is None else gather(mask.reshape(-1))[None]
        return function(scores, *self._sizes, mask)

    @cached_property
    def adds_up(self) -> bool:
        """Whether `RouterSums` give the loss of this family; its own function is tried on a few random scores."""
        if self._function is None or not self._recorders():
            return False
        count, _ = self._sizes
        generator = torch.Generator().manual_seed(0)
        scores = tuple(torch.randn(6, count, generator=generator) for _ in range(2))
        masks = None, (torch.arange(6).reshape(2, 3) % 4 != 3).long()
        return all(
            torch.allclose(self.sums(scores, mask).loss, torch.as_tensor(self._function(scores, *self._sizes, mask)))
            for mask in masks
        )

    def sums(self, scores: Iterable[Tensor], mask: Tensor | None) -> RouterSums:
        """Return layers' sums; `scores`: each router's logits, [batch * seq, experts]; `mask`: [batch, seq] or None."""
        count, num_chosen = self._sizes
        parts = []
        for logits in scores:
            probabilities = logits.softmax(-1)
            weights = torch.ones(len(logits), device=logits.device) if mask is None else mask.reshape(-1).float()
            best = probabilities.detach().topk(num_chosen).indices
            chosen = weights.new_zeros(count).index_add_(0, best.flatten(), weights.repeat_interleave(num_chosen))
            parts.append((chosen, (probabilities * weights[:, None]).sum(0).float(), weights.sum()))
        return RouterSums(*(sum(values) for values in zip(*parts, strict=True)))

    def no_sums(self, device: torch.device) -> RouterSums:
        """Return the sums of no token."""
        zeros = torch.zeros(self._sizes[0], device=device)
        return RouterSums(zeros, zeros, zeros[0])

    def routers(self, modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, int]]:
        """Yield the routers among `modules`, each with the position of the scores in its output."""
        recorders = self._recorders()
        for module in modules:
            yield from ((module, each.index) for each in recorders if isinstance(module, each.target_class))

    def _recorders(self) -> list[Any]:
        """Return how transformers finds the scores (its `OutputRecorder`); nothing if not by class."""
        bases = (type(each) for each in self.model.modules())
        tables = (table for base in bases if isinstance(table := getattr(base, "_can_record_outputs", None), Mapping))
        found = next((table["router_logits"] for table in tables if "router_logits" in table), [])
        found = found if isinstance(found, list) else [found]
        return found if all(getattr(each, "target_class", None) is not None for each in found) else []

    @property
    def _function(self) -> Callable[..., Tensor] | None:
        """The family's function of scores; None if it is not the usual one."""
        family = sys.modules[inspect.unwrap(type(self.model).forward).__module__]
        function = getattr(family, "load_balancing_loss_func", None)
        is_usual = function is not None and list(inspect.signature(function).parameters) == _ARGUMENTS
        return function if is_usual and None not in self._sizes else None

    @property
    def _sizes(self) -> tuple[int | None, int | None]:
        """Number of experts, and how many of them each token goes to; None where a family has another name for it."""
        return self._size("num_experts"), self._size("num_experts_per_tok")

    def _size(self, name: str) -> int | None:
        own = getattr(self.model, name, None)
        return getattr(self.model.config.get_text_config(), name, None) if own is None else own


class RouterScores:
    """Collects the scores of routers while they run.

    Args:
        routers: routers, each with the position of the scores in its output.
    """

    def __init__(self, routers: Sequence[tuple[nn.Module, int]]) -> None:
        self._scores: list[Tensor] | None = None
        for module, position in routers:
            module.register_forward_hook(partial(self._take, position))

    @contextmanager
    def collecting(self) -> Iterator[list[Tensor]]:
        """Collect scores [tokens, experts], in the order in which the routers run, but not when they run again."""
        self._scores = scores = []
        try:
            yield scores
        finally:
            self._scores = None

    def _take(self, position: int, module: nn.Module, args: tuple, output: Any) -> None:
        if self._scores is not None:
            self._scores.append(output[position] if isinstance(output, tuple) else output)


def router_loss_of(model: nn.Module) -> RouterLoss | None:
    """Return the auxiliary loss that the model's forward may add; None if it adds none."""
    if not uses(type(model).forward, "aux_loss"):
        return None
    holders = [model, *([model.config.get_text_config()] if hasattr(model, "config") else [])]
    factors = (getattr(holder, name, None) for holder in holders for name in _FACTORS)
    factor = next((factor for factor in factors if factor is not None), None)
    return None if factor is None else RouterLoss(model, factor)


@cache
def _names_scores(forward: Callable[..., Any]) -> bool:
    return uses(forward, ASKED) or uses(forward, "aux_loss")


def routers_are_asked(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether the loss of a pass over `batch` includes a part that reads the scores of all routers."""
    forward = type(model).forward
    if not _names_scores(forward):
        return False
    asked = batch.get(ASKED)
    if reads(forward, f"kwargs.get('{ASKED}', False)"):  # some of 5.17's forwards look into no configuration
        return bool(asked)
    if asked is None and hasattr(model, "config"):
        of_text, own = (getattr(each, ASKED, None) for each in (model.config.get_text_config(), model.config))
        if reads(forward, f"self.config.text_config.{ASKED}"):  # then the one of the whole model says nothing
            return bool(of_text)
        asked = own or of_text
    return bool(asked)


Batch = Mapping[str, Any]
IGNORE_INDEX = -100
# Keywords of transformers' loss functions in addition to labels, for forwards that pass keywords on to them.
DIVISOR, IGNORED, SHIFTED = LOSS_KEYWORDS = ("num_items_in_batch", "ignore_index", "shift_labels")


def zero_of(output: Tensor) -> Tensor:
    """Return a zero (0-d) that depends on an output. Its sum times 0 is NaN where 16 bits or masked scores overflow."""
    return output.flatten()[:0].sum()


@dataclass(frozen=True)
class LossTerm:
    """One mean in a head's loss."""

    labels: str  # batch key of the labels
    count: Callable[[Tensor, Batch], Tensor]  # (labels, batch) -> number of values that the mean is over (0-d)
    total: Callable[..., Tensor]  # (outputs, labels) -> sum of the values (0-d, differentiable)
    weight: float = 1.0  # factor of this mean in the loss
    is_input: bool = False  # whether the model's forward also reads the labels
    epsilon: float = 0.0  # added to the global count
    is_sum: bool = False  # whether the head sums the values instead of averaging them
    # (labels, batch) -> labels in the form that `count` and `total` take; None if unchanged
    prepare: Callable[[Tensor, Batch], Tensor] | None = None
    per_token: bool = False  # whether prepared labels are [batch, seq], each used only with the output of its own token
    keywords: tuple[str, ...] = ()  # the `LOSS_KEYWORDS` that this term takes from the batch
    # labels -> whether `num_items_in_batch` divides their sum; None if always
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
        count = (global_count + self.epsilon if self.epsilon else global_count).clamp(min=1.0)
        return count.reciprocal() if self.weight == 1.0 else self.weight / count


class HeadLoss:
    """Loss that a head computes when labels are given: a weighted sum of means.

    Args:
        function: equivalent function of transformers' `loss_utils`, for forwards that call one.
        decoder_inputs: labels -> decoder inputs of an encoder-decoder that is given only labels.
        routers: the load-balancing loss to add.

    Attributes:
        reads_keywords: whether the head's forward passes `LOSS_KEYWORDS` on to its loss function.
        further_entries: optional batch entries that the head's forward reads for its loss and this class does not.
        reads_whole_logits: whether logits may not be sharded, as where the model's forward computes the loss.
        has_parts: whether the model's outputs also have parts of the loss, which are numbers of a whole batch.
        needs_all_labels: whether the head computes a loss only if the batch has the labels of all terms; if not, it
            adds the means whose labels are given.
    """

    reads_whole_logits = has_parts = False
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
        labels = self.label_keys
        inputs = {key: value for key, value in batch.items() if key not in labels}
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
        if len(self.terms) == 1:
            return found[self.terms[0]].reshape(1)
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
        """Return this batch's sum of weight * total / global count (0-d); `part`: labels of the outputs' tokens."""
        batch, counts = self._seen(batch), dict(zip(self.terms, global_counts, strict=True))
        shares = []
        for term in self._given(batch):
            labels = term.labels_of(batch)
            total = term.total(outputs, labels if part is None else part(labels))
            shares.append(total * term.factor(batch, counts[term]).to(total.dtype))
        return sum(shares[1:], start=shares[0])

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
    """A loss function of transformers that does not look for other ranks."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        update_wrapper(self, function)  # the loss is known by the name of its function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns in a job of one process."""
        return _copied(self.function)(*args, **kwargs)


class KeptLosses(list[dict[str, Tensor]]):
    """Losses of a criterion in the last forward, one dict for each call; copies and pickles of it are empty."""

    def __reduce__(self) -> tuple:
        return KeptLosses, ()


def count_own_targets(model: nn.Module) -> None:
    """Have `model` count the boxes or masks of its own batch, where its loss sums those of all ranks of the job.

    The losses of masks are kept for `perception.classified_masks`.
    """
    function, criterion = (getattr(model, name, None) for name in ("loss_function", "criterion"))
    if isinstance(function, FunctionType) and any(True for _ in _criteria(function)):
        model.loss_function = LossOfOneProcess(function)
    if hasattr(criterion, "get_num_masks"):
        criterion.get_num_masks, criterion.kept_losses = _own_masks, KeptLosses()
        model.register_forward_pre_hook(_forget_losses)
        criterion.register_forward_hook(_keep_losses)


def _own_masks(class_labels: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.tensor(divisor_of_masks(class_labels), device=device)


def divisor_of_masks(labels: Sequence[Tensor]) -> float:
    """Return what MaskFormer divides by, for the classes of the masks of each image."""
    return float(max(sum(map(len, labels)), 1))


def _forget_losses(model: nn.Module, _: Any) -> None:
    model.criterion.kept_losses.clear()


def _keep_losses(criterion: nn.Module, _: Any, losses: dict[str, Tensor]) -> None:
    criterion.kept_losses.append(losses)  # which the model then weighs in place


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
