"""Models whose linear layers bitsandbytes has quantised, as a user builds them without the hub."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def quantise(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Quantise the linear layers of a transformers model that has values.

    Args:
        model: stays as it is where `through_files` is set, and is changed otherwise.
        options: of `BitsAndBytesConfig`, or "torchao" with the name of a configuration of torchao. "through_files"
            saves the model and loads it by `from_pretrained`; transformers otherwise replaces the layers of the model
            by `replace_with_bnb_linear`.
    """
    if "torchao" in options:
        return _by_torchao(model, options["torchao"])
    from transformers import BitsAndBytesConfig

    given = {**options, "bnb_4bit_compute_dtype": torch.float32} if options.get("load_in_4bit") else dict(options)
    through_files = given.pop("through_files", False)
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    config = BitsAndBytesConfig(**given)
    if through_files:
        with tempfile.TemporaryDirectory() as directory:
            model.config.save_pretrained(directory)  # the weights would be written by the first of several ranks only
            save_file(model.state_dict(), Path(directory) / "model.safetensors", {"format": "pt"})
            return type(model).from_pretrained(directory, quantization_config=config).train()
    return _replaced(model, config)


def values_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state dict; those of a tensor subclass (torchao) dequantised."""
    return {
        name: value.dequantize() if is_traceable_wrapper_subclass(value) else value for name, value in state.items()
    }


def _by_torchao(model: nn.Module, kind: str) -> nn.Module:
    from torchao import quantization

    def is_inside(module: nn.Module, path: str) -> bool:
        return isinstance(module, nn.Linear) and path != "lm_head"

    quantization.quantize_(model, getattr(quantization, kind)(), filter_fn=is_inside)
    return model.train()


def _replaced(model: nn.Module, config: Any) -> nn.Module:
    from transformers.integrations import replace_with_bnb_linear

    values = {name: value.detach() for name, value in model.state_dict().items()}
    skipped = config.llm_int8_skip_modules
    replace_with_bnb_linear(model, ["lm_head"] if skipped is None else skipped, config)
    kind = "is_loaded_in_4bit" if config.load_in_4bit else "is_loaded_in_8bit"
    setattr(model, kind, True)  # peft looks at it
    for path, module in model.named_modules():
        if type(module).__module__.startswith("bitsandbytes."):
            weight, value = module.weight, values[f"{path}.weight"]
            value = value.t() if module.source_cls is not nn.Linear else value  # GPT-2's Conv1D
            options = {key: each for key, each in vars(weight).items() if key not in ("CB", "SCB", "data")}
            module.weight = type(weight)(value.contiguous(), requires_grad=False, **options).to("cpu")
            if module.bias is not None:
                module.bias = nn.Parameter(values[f"{path}.bias"], requires_grad=False)
    return model.train()
