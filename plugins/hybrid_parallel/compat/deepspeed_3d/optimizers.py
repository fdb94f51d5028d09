"""Build a torch optimizer from the block `optimizer` of DeepSpeed's configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, StrictStr
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.compat.deepspeed_3d.pydantic_errors import AUTO, auto_value, described
from plugins.hybrid_parallel.config.option_group import unknown_key

# By lower-case name, as DeepSpeed compares them. As in DeepSpeed, "Adam" means AdamW unless `adam_w_mode` is false.
_CLASSES = {
    "adam": torch.optim.AdamW,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
}
_NAMES = "Adam, AdamW, SGD, Adagrad, Adamax, NAdam, RAdam or RMSprop"
_EXAMPLES = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "momentum": 0.9}
_KERNELS = (
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "maximize",
)  # options of torch's implementation, which are not accepted


class OptimizerBlock(BaseModel):
    """Block `optimizer`, such as `{"type": "AdamW", "params": {"lr": 1e-4}}`.

    Attributes:
        type: name of the optimizer, case-insensitive.
        params: arguments of the optimizer. Adam also takes `adam_w_mode` and `torch_adam`; the latter only selects
            between equivalent kernels, and is ignored.
    """

    model_config = ConfigDict(extra="forbid")

    type: StrictStr = described(..., f"is no name of an optimizer; use {_NAMES}", "AdamW")
    params: dict[str, Any] = described({}, "is no object; use {'lr': 1e-4}", {"lr": 1e-4})

    def problems(self) -> list[str]:
        """Return what is wrong with the block, one sentence for each problem."""
        if self.type.lower() not in _CLASSES:
            return [f"optimizer.type={self.type!r} is not available; use {_NAMES}"]
        known, found = self._known(), []
        for name, value in self.params.items():
            if name not in known:
                found.append(unknown_key(name, known, "optimizer.params."))
            elif value == AUTO:
                found.append(auto_value(f"optimizer.params.{name}", _EXAMPLES.get(name, "a number")))
        if found:
            return found
        try:
            self.build([nn.Parameter(torch.zeros(1))])
        except (ValueError, TypeError) as error:
            torch_class = f"torch.optim.{self._class.__name__}"
            return [f"optimizer.params={self.params} is refused by {torch_class} ({error}); use {{'lr': 1e-4}}"]
        return []

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer over `parameters`; for Adam, the weight decay defaults to 0, as in DeepSpeed."""
        params = {name: value for name, value in self.params.items() if name not in ("adam_w_mode", "torch_adam")}
        if self._is_adam:
            params.setdefault("weight_decay", 0.0)
        if "betas" in params:
            params["betas"] = tuple(params["betas"])
        return self._class(list(parameters), **params)

    @property
    def _is_adam(self) -> bool:
        return self.type.lower() in ("adam", "adamw")

    @property
    def _class(self) -> type[torch.optim.Optimizer]:
        if self.type.lower() == "adam" and not self.params.get("adam_w_mode", True):
            return torch.optim.Adam
        return _CLASSES[self.type.lower()]

    def _known(self) -> list[str]:
        own = [name for name in inspect.signature(self._class).parameters if name != "params" and name not in _KERNELS]
        if self._is_adam:
            own.append("torch_adam")
        return [*own, "adam_w_mode"] if self.type.lower() == "adam" else own


def check_lr(optimizer: torch.optim.Optimizer) -> None:
    """Check that no learning rate is 0, because a schedule is a factor on the optimizer's learning rates.

    Raises:
        ConfigurationError: a learning rate is 0.
    """
    if any(not group["lr"] for group in optimizer.param_groups):
        raise ConfigurationError(
            "the optimizer has lr=0, which a scheduler of ds_config cannot scale; use its largest lr"
        )
