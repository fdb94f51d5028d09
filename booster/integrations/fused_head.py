"""TRL's fused head on a boosted model: per-token log-probabilities instead of logits.

TRL replaces `forward` of its models, so that `model(..., labels=labels, fused_lm_head=True)` multiplies hidden states
by the weight of the head. Under a layout no rank has all of that weight, so that the same numbers are computed here
from the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FORWARD = "_fused_forward"  # name of TRL's replacement, a method in the instance's attributes


@dataclass(frozen=True)
class FusedHead:
    """What TRL's fused head was made with.

    Attributes:
        temperature: of the logits.
        outputs: fields to compute.
    """

    temperature: float
    outputs: tuple[str, ...]

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
        calls: list[Mapping[str, Any] | None] = []

        def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            names = ("labels", "shift_labels", "num_items_in_batch") if kwargs.get("fused_lm_head") else ()
            calls.append({name: kwargs.get(name) for name in names} or None)
            kwargs = {name: value for name, value in kwargs.items() if name not in (*names, "fused_lm_head")}
            return args, kwargs | ({"use_cache": False} if names else {})

        def after(module: nn.Module, args: tuple, outputs: Any) -> Any:
            asked = calls.pop()
            return outputs if asked is None else self._score(outputs, **asked)

        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after)

    def _score(self, outputs: Any, labels: Tensor, shift_labels: Tensor | None, num_items_in_batch: Any) -> Any:
        """Return TRL's output of per-token fields, [batch, seq - 1], or [batch, seq] with `shift_labels`."""
        from trl.trainer.utils import FusedCausalLMOutput

        logits, targets = outputs.logits, shift_labels  # [batch, seq, vocabulary]
        if targets is None:
            # peft's virtual tokens stand in front of those that have labels.
            targets = F.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=-100)[:, 1:]
            logits = logits[:, :-1]
        mask = (targets := targets.to(logits.device)) != -100
        fields = _fields(logits.float() / self.temperature, targets.clamp(min=0), self.outputs)
        fields = {name: value.masked_fill(~mask, 0) for name, value in fields.items()}
        items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        aux_loss = outputs.get("aux_loss") if isinstance(outputs, Mapping) else None
        loss = -fields["log_probs"].sum() / items
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **fields)


def _fields(logits: Tensor, targets: Tensor, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the fields asked for, each shaped like `targets`; logits are [..., vocabulary]."""
    log_probs = logits.log_softmax(-1)
    fields = {"log_probs": log_probs.gather(-1, targets[..., None]).squeeze(-1)}
    if "entropy" in wanted:
        fields["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
    with torch.no_grad():
        if "log_sum_sq_probs" in wanted:
            fields["log_sum_sq_probs"] = (2 * log_probs).logsumexp(-1)
        if "mean_logits" in wanted:
            fields["mean_logits"] = logits.mean(-1)
        if "is_top1" in wanted:
            fields["is_top1"] = logits.argmax(-1) == targets
    return fields


class AdapterReference:
    """The reference model of a trainer whose model has adapters: the boosted model with other adapters.

    That is TRL's choice: the adapter "ref", which TRL has copied from an adapter that was given, or none.

    Args:
        model: the boosted model around a peft model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with the adapters of the reference."""
        from trl.trainer.utils import use_adapter

        inside = self.model.unwrap()
        with use_adapter(inside, "ref" if "ref" in inside.peft_config else None):
            return self.model(*args, **kwargs)
