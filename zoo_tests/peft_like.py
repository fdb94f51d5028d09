"""A replica of what the peft package makes of a model, as far as the library looks at it.

peft cannot be installed where these tests run. This has the module structure, the names of parameters, the frozen base
and the arithmetic of its LoRA layers (`PeftModel.base_model.model`, `base_layer`, `lora_A.<adapter>`, …), and nothing
else of it: a change of peft itself would not be noticed here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

ADAPTER = "default"


@dataclass
class LoraConfig:
    """What the library reads of peft's configuration: the kind, and all of it as a dictionary."""

    r: int
    target_modules: set[str]
    lora_alpha: float = 3
    peft_type: str = "LORA"
    bias: str = "none"
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    inference_mode: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class LoraLinear(nn.Module):
    """A linear layer and what an adapter adds to it."""

    def __init__(self, base_layer: nn.Module, rank: int, dropout: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        outputs, inputs = base_layer.weight.shape
        if type(base_layer).__name__ == "Conv1D":
            outputs, inputs = inputs, outputs
        self.scaling = {ADAPTER: 3 / rank}
        self.lora_dropout = nn.ModuleDict({ADAPTER: nn.Dropout(dropout) if dropout else nn.Identity()})
        self.lora_A = nn.ModuleDict({ADAPTER: nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({ADAPTER: nn.Linear(rank, outputs, bias=False)})
        self.lora_variant: dict[str, Any] = {}
        self.lora_magnitude_vector = nn.ModuleDict()

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        added = self.lora_B[ADAPTER](self.lora_A[ADAPTER](self.lora_dropout[ADAPTER](x)))
        return self.base_layer(x) + added * self.scaling[ADAPTER]


class _Wrapper(nn.Module):
    """Attributes that it has not are those of what is inside."""

    inside = ""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == self.inside:
                raise
            return getattr(getattr(self, self.inside), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.inside)(*args, **kwargs)


class LoraModel(_Wrapper):
    """Holds the model, whose layers it has replaced in place."""

    inside = "model"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class PeftModel(_Wrapper):
    """What `get_peft_model` returns."""

    inside = "base_model"

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        super().__init__()
        self.base_model = LoraModel(model)
        self.peft_config = {ADAPTER: config}

    def get_base_model(self) -> nn.Module:
        return self.base_model.model


def with_adapters(model: nn.Module, targets: tuple[str, ...], rank: int = 3, dropout: float = 0.0) -> PeftModel:
    """`model` with an adapter at every module of these names; only adapters are trained."""
    model.requires_grad_(False)
    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(21)
        for path, module in list(model.named_modules()):
            if path.endswith(targets) and isinstance(getattr(module, "weight", None), Tensor):
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, LoraLinear(module, rank, dropout).to(dtype))
                module.requires_grad_(False)
    return PeftModel(model, LoraConfig(rank, set(targets))).train()


def load_adapters(model: PeftModel, directory: Path) -> None:
    """What `PeftModel.from_pretrained` does with the file: every adapter has its weights there, under these names."""
    tensors = load_file(directory / "adapter_model.safetensors")
    own = {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert {name.replace(f".{ADAPTER}", "") for name in own} == tensors.keys()
    model.load_state_dict({name: tensors[name.replace(f".{ADAPTER}", "")] for name in own}, strict=False)
