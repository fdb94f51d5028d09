"""Load-balancing loss of routers, which a mixture of experts adds on request.

It is a product of means over all layers and tokens of a batch (Switch Transformer, arXiv 2101.03961, section 2.2). The
losses of parts of a batch therefore do not add up; the sums that these means divide do (`RouterSums`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.utils.source import reads, uses

ASKED = "output_router_logits"
_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class RouterSums:
    """What the auxiliary loss depends on, of some layers and tokens; those of parts add up.

    Attributes:
        chosen: [experts], how many times each expert was chosen; without gradient.
        probabilities: [experts], sum of the probabilities of each expert.
        rows: number of (layer, token) pairs, 0-d.
    """

    chosen: Tensor
    probabilities: Tensor
    rows: Tensor

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
        """Return the sums of some layers.

        Args:
            scores: logits of each layer's router, [batch * seq, experts].
            mask: 1 for tokens that count, [batch, seq]; None if all do.
        """
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


def routers_are_asked(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether the loss of a pass over `batch` includes a part that reads the scores of all routers."""
    forward = type(model).forward
    if not uses(forward, ASKED) and not uses(forward, "aux_loss"):
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
