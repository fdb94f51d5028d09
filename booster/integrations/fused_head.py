"""TRL's fused head on a boosted model: per-token log-probabilities instead of logits.

TRL replaces `forward` of its models, so that `model(..., labels=labels, fused_lm_head=True)` multiplies hidden states
by the weight of the head. Under a layout no rank has all of that weight; the boosted model gives the same numbers.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

_FORWARD = "_fused_forward"  # name of TRL's replacement, a method in the instance's attributes


@dataclass(frozen=True)
class FusedHead:
    """What TRL's fused head was made with."""

    temperature: float  # of the logits
    outputs: tuple[str, ...]  # fields to compute

    @staticmethod
    def taken_from(model: nn.Module) -> FusedHead | None:
        """Restore the forward that TRL has replaced; return what it computed, or None if it was not replaced."""
        inside = model.get_base_model() if hasattr(model, "get_base_model") else model
        replaced = vars(inside).get("forward")
        if getattr(getattr(replaced, "__func__", None), "__code__", None) is None:
            return None
        if replaced.__func__.__code__.co_name != _FORWARD:
            return None
        given = inspect.getclosurevars(replaced.__func__).nonlocals
        vars(inside).pop("forward")  # the forward of its class shows again
        return FusedHead(given["temperature"], tuple(given["outputs"]))

    def attach(self, model: nn.Module) -> None:
        """Let a boosted model answer `fused_lm_head=True`."""
        names = ("labels", "shift_labels", "num_items_in_batch")
        calls: list[tuple[dict[str, Any] | None, ExitStack]] = []

        def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            is_fused, scoring = kwargs.pop("fused_lm_head", False), ExitStack()
            asked = {name: kwargs.pop(name, None) for name in names} if is_fused else None
            if asked is not None:
                given = asked["shift_labels"]
                given = F.pad(asked["labels"], (0, 1), value=-100)[:, 1:] if given is None else given
                kwargs |= {"shift_labels": given, "use_cache": False}
                scoring.enter_context(model.scoring_tokens(self.temperature, self.outputs))
            calls.append((asked, scoring))
            return args, kwargs

        def after(module: nn.Module, args: tuple, outputs: Any) -> Any:
            asked, scoring = calls.pop()
            scoring.close()
            return outputs if asked is None or outputs is None else self._output(outputs, **asked)

        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after, always_call=True)

    def _output(self, scores: Any, labels: Tensor, shift_labels: Tensor | None, num_items_in_batch: Any) -> Any:
        """Return TRL's output of per-token fields, [batch, seq - 1], or [batch, seq] with `shift_labels`."""
        from trl.trainer.utils import FusedCausalLMOutput

        fields, targets = {name: scores[name] for name in self.outputs}, shift_labels
        if targets is None:
            fields, targets = {name: value[:, :-1] for name, value in fields.items()}, labels[:, 1:]
        # peft's virtual tokens stand in front of those that have labels.
        length = fields["log_probs"].shape[1]
        mask = F.pad(targets, (length - targets.shape[1], 0), value=-100).to(fields["log_probs"].device) != -100
        items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = -fields["log_probs"].sum() / items
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=scores.get("aux_loss"), **fields)


class AdapterReference:
    """The reference model of a trainer whose model has adapters: the boosted model with other adapters.

    Args:
        model: the boosted model around a peft model.
        adapter: the one to run with, which TRL has made; None for none.
    """

    def __init__(self, model: nn.Module, adapter: str | None) -> None:
        self.model, self.adapter = model, adapter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with the adapter of the reference."""
        from trl.trainer.utils import use_adapter

        with use_adapter(self.model.unwrap(), self.adapter):
            return self.model(*args, **kwargs)
