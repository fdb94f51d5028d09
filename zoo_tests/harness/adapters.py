"""Models with adapters of the peft package, as a user builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

ADAPTER = "default"


def with_adapters(model: nn.Module, targets: tuple[str, ...], options: tuple[tuple[str, Any], ...] = ()) -> nn.Module:
    """`get_peft_model` of `model`; what starts at zero is drawn, so that every gradient of the first step counts.

    Args:
        targets: ends of the paths of modules that get an adapter.
        options: of the configuration, over those of a LoRA of rank 3; "kind" for another kind.
    """
    import peft

    given = {"kind": "LORA", **dict(options)}
    kind = given.pop("kind")
    if kind == "LORA":
        given = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, **given}
    if targets:
        given["target_modules"] = list(targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(21)
        config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)](**{key: _plain(v) for key, v in given.items()})
        wrapped = peft.get_peft_model(model, config)
        if kind not in ("LORA", "LN_TUNING", "TRAINABLE_TOKENS"):
            for param in wrapped.parameters():
                if param.requires_grad:
                    param.data += 0.1 * torch.randn_like(param)
    return wrapped.train()


def load_adapters(model: nn.Module, directory: Path) -> nn.Module:
    """What a user does with the files and the model without adapters."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, directory)


def _plain(value: Any) -> Any:
    """Options are hashable, peft's are lists and dictionaries."""
    if isinstance(value, frozenset):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
