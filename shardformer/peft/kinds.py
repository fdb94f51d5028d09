"""Detection of peft's parts in a model, by peft's own classes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

_CLASSES = {
    "model": ("peft.peft_model", "PeftModel"),
    "mixed model": ("peft.mixed_model", "PeftMixedModel"),
    "tuner": ("peft.tuners.tuners_utils", "BaseTuner"),
    "layer": ("peft.tuners.tuners_utils", "BaseTunerLayer"),
    "lora linear": ("peft.tuners.lora.layer", "Linear"),
    "lora embedding": ("peft.tuners.lora.layer", "Embedding"),
    "lora parameter": ("peft.tuners.lora.layer", "ParamWrapper"),
    "dora": ("peft.tuners.lora.variants", "DoraLinearVariant"),
    "lora 4-bit linear": ("peft.tuners.lora.bnb", "Linear4bit"),
    "lora 8-bit linear": ("peft.tuners.lora.bnb", "Linear8bitLt"),
    "lora torchao linear": ("peft.tuners.lora.torchao", "TorchaoLoraLinear"),
    "ia3 linear": ("peft.tuners.ia3.layer", "Linear"),
    "ia3 4-bit linear": ("peft.tuners.ia3.bnb", "Linear4bit"),
    "ia3 8-bit linear": ("peft.tuners.ia3.bnb", "Linear8bitLt"),
    "prompt encoder": ("peft.tuners.tuners_utils", "BasePromptEncoder"),
    "wrapper": ("peft.utils.other", "AuxiliaryTrainingWrapper"),
    "copied module": ("peft.utils.other", "ModulesToSaveWrapper"),
    "trainable tokens": ("peft.utils.other", "TrainableTokensWrapper"),
}

LORA_LINEAR = ("lora linear", "lora 4-bit linear", "lora 8-bit linear", "lora torchao linear")
IA3_LINEAR = ("ia3 linear", "ia3 4-bit linear", "ia3 8-bit linear")


def peft_class(kind: str) -> type | None:
    """Return a class of peft; None if peft's module is not imported."""
    module, name = _CLASSES[kind]
    return getattr(sys.modules.get(module), name, None)


def is_a(value: Any, kind: str) -> bool:
    """Return whether `value` is an instance of that class of peft, or of a subclass."""
    cls = peft_class(kind)
    return cls is not None and isinstance(value, cls)


def is_exactly(value: Any, *kinds: str) -> bool:
    """Return whether the type of `value` is exactly one of these of peft; a subclass may compute differently."""
    return type(value) in [peft_class(kind) for kind in kinds]


def model_inside(model: nn.Module) -> nn.Module:
    """Return the transformers model inside peft's wrappers; the model itself if there are none."""
    return model.get_base_model() if is_a(model, "model") else model


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """Return name -> configuration of the adapters, including those added by transformers' `model.add_adapter`."""
    return dict(getattr(model, "peft_config", {})) if peft_class("model") is not None else {}


def kind_of(config: Any) -> str:
    """Return peft's name of a kind of adapter: such as 'LORA' or 'IA3'."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def wrapped_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module of peft) for everything in `model` that wraps a module of the model, outermost first."""
    for path, module in model.named_modules():
        is_layer = is_a(module, "layer") and isinstance(getattr(module, "base_layer", None), nn.Module)
        if (is_layer and not path.endswith(".token_adapter")) or is_a(module, "wrapper"):
            yield path, module


def is_adapter_part(module: nn.Module) -> bool:
    """Return whether a module has an adapter's parameters: a layer, a wrapper or an encoder of virtual tokens."""
    return any(is_a(module, kind) for kind in ("layer", "wrapper", "prompt encoder"))


def inner_module(wrapped: nn.Module) -> nn.Module:
    """Return the module of the model that a module of peft wraps."""
    return wrapped.original_module if is_a(wrapped, "wrapper") else wrapped.base_layer


def put_inside(wrapped: nn.Module, module: nn.Module) -> None:
    """Set the module that a module of peft wraps."""
    if is_a(wrapped, "trainable tokens"):
        wrapped.token_adapter.base_layer = module
    elif is_a(wrapped, "wrapper"):
        wrapped.original_module = module
    else:
        wrapped.base_layer = module


def name_of(wrapped: nn.Module) -> str:
    """Return a readable name of a class of peft: such as 'lora.Linear' or 'lokr.Linear'."""
    cls = type(wrapped)
    parts = cls.__module__.split(".")
    return f"{parts[2]}.{cls.__name__}" if parts[:2] == ["peft", "tuners"] else cls.__name__
