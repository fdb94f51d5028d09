"""What is trained (a Recipe), and how it is spread over ranks (a Case).

Plain training and sharded training both build everything from here, on any process, by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from zoo_tests.harness.adapters import with_adapters
from zoo_tests.harness.optimizers import Lamb
from zoo_tests.harness.quantised import quantise
from zoo_tests.zoo import FAMILIES, Batch, Family, Head
from zoo_tests.zoo.base import num_rows

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32}
LOSS_SCALE = 2.0**10  # of fp16 in these tests, fixed: small enough to never overflow

_OPTIONS_OF_LAYERS = {"layers_per_stage", "num_model_chunks", "pp_style"}

_OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.3),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=2e-3),
    "lamb": Lamb,  # reads whole parameters
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that the numbers depend on.

    Attributes:
        family, head: of the zoo.
        optimizer: "sgd", "momentum", "adamw" or "lamb".
        precision: "fp64" (the model is converted, nothing is cast), "fp32", "bf16" or "fp16".
        max_norm: of gradient clipping.
        steps: optimizer steps.
        rows: samples of the global batch.
        config: (name, value) pairs over the family's configuration.
        frozen: prefixes of names of parameters that are not trained.
        adapters: ends of the paths of modules that get an adapter of peft; then only adapters are trained.
        adapter_options: (name, value) pairs of their configuration; "kind" for another kind than LoRA.
        quantisation: (name, value) pairs of the `BitsAndBytesConfig` by which the model is quantised, if any.
        stages: number of pipeline stages for which the model has layers, unevenly shared; None for all layers of the
            family.
    """

    family: str
    head: str
    optimizer: str = "sgd"
    precision: str = "fp64"
    max_norm: float | None = None
    steps: int = 2
    rows: int = 9
    config: tuple[tuple[str, Any], ...] = ()
    frozen: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    adapter_options: tuple[tuple[str, Any], ...] = ()
    quantisation: tuple[tuple[str, Any], ...] = ()
    stages: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the model before any cast."""
        return DTYPES[self.precision]

    @property
    def zoo_family(self) -> Family:
        return FAMILIES[self.family]

    @property
    def zoo_head(self) -> Head:
        return self.zoo_family.heads[self.head]

    def model(self) -> nn.Module:
        """The whole model, always the same."""
        model = self.base_model()
        return with_adapters(model, self.adapters, self.adapter_options) if self.has_adapters else model

    @property
    def has_adapters(self) -> bool:
        return bool(self.adapters or self.adapter_options)

    def base_model(self) -> nn.Module:
        """The whole model without adapters."""
        depth = {} if self.stages is None else self.zoo_family.shallow(self.head, self.stages)
        model = self.zoo_family.build(self.head, self.dtype, **{**depth, **dict(self.config)})
        for name, param in model.named_parameters():
            if name.startswith(self.frozen):
                param.requires_grad_(False)
        return quantise(model, dict(self.quantisation)) if self.quantisation else model

    def batch(self, step: int) -> Batch:
        """The global batch of a step."""
        return self.zoo_family.batch(self.head, step, self.rows, self.dtype)

    def training(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """An optimizer with two parameter groups, and a learning rate that falls with every step."""
        matrices = [param for param in model.parameters() if param.dim() > 1]
        vectors = [param for param in model.parameters() if param.dim() <= 1]
        optimizer = _OPTIMIZERS[self.optimizer]([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
        optimizer.param_groups[1]["lr"] *= 0.5
        return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + 0.5 * step))


@dataclass(frozen=True)
class Layout:
    """How many ranks on each axis; micro-batches that differ in size."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    num_microbatches: int = 2
    cp_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.dp_size * self.cp_size

    @staticmethod
    def named(name: str) -> Layout:
        """One of `LAYOUTS`, or any other axes and sizes, as "tp2pp2cp2"."""
        sizes = {f"{axis}_size": int(size) for axis, size in re.findall(r"(\D+)(\d+)", name)}
        return LAYOUTS.get(name) or Layout(**sizes)


LAYOUTS = {
    "single": Layout(),
    "tp2": Layout(tp_size=2),
    "tp4": Layout(tp_size=4),
    "pp2": Layout(pp_size=2, num_microbatches=4),
    "pp4": Layout(pp_size=4, num_microbatches=5),
    "dp2": Layout(dp_size=2),
    "dp4": Layout(dp_size=4),
    "tp2pp2": Layout(tp_size=2, pp_size=2, num_microbatches=3),
    "tp2dp2": Layout(tp_size=2, dp_size=2, num_microbatches=1),
    "pp2dp2": Layout(pp_size=2, dp_size=2, num_microbatches=3),
    "cp2": Layout(cp_size=2),
    "cp3": Layout(cp_size=3, num_microbatches=1),
    "cp4": Layout(cp_size=4, num_microbatches=1),
    "cp2tp2": Layout(cp_size=2, tp_size=2),
    "cp2pp2": Layout(cp_size=2, pp_size=2, num_microbatches=4),
    "cp2dp2": Layout(cp_size=2, dp_size=2),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe on a layout.

    Attributes:
        recipe: what is trained.
        layout: see `Layout.named`.
        zero_stage: 0 or 1.
        sequence_parallel: split-gather.
        options: (name, value) pairs of further options of the plugin.
        ordinary_loop: `model(**batch).loss` and `booster.backward` in the place of `execute_pipeline`.
    """

    recipe: Recipe
    layout: str
    zero_stage: int = 1
    sequence_parallel: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    ordinary_loop: bool = False

    def __str__(self) -> str:
        parts = [self.recipe.family, self.recipe.head, self.layout, f"zero{self.zero_stage}"]
        parts += ["sp"] if self.sequence_parallel else []
        parts += ["ordinary"] if self.ordinary_loop else []
        parts += [] if self.recipe.optimizer == "sgd" else [self.recipe.optimizer]
        parts += [] if self.recipe.precision == "fp64" else [self.recipe.precision]
        parts += [] if self.recipe.max_norm is None else ["clip"]
        parts += [f"{name}={value}" for name, value in (*self.recipe.config, *self.options)]
        parts += [f"{name}={value}" for name, value in self.recipe.adapter_options + self.recipe.quantisation]
        return "-".join([*parts, *self.recipe.frozen, *self.recipe.adapters])

    @property
    def sizes(self) -> Layout:
        return Layout.named(self.layout)

    @property
    def plugin_options(self) -> dict[str, Any]:
        """Keyword arguments of `HybridParallelPlugin`."""
        sizes, recipe = self.sizes, self.recipe
        options: dict[str, Any] = {
            "tp_size": sizes.tp_size,
            "pp_size": sizes.pp_size,
            "dp_size": sizes.dp_size,
            "cp_size": sizes.cp_size,
            "num_microbatches": sizes.num_microbatches,
            "zero_stage": self.zero_stage,
            "max_norm": recipe.max_norm,
            "precision": "fp32" if recipe.precision == "fp64" else recipe.precision,
            "zero_bucket_size_in_mb": 0.1,  # several buckets for these small models
            "initial_scale": LOSS_SCALE,
            "seed": 7,
        }
        if self.sequence_parallel:
            options |= {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
        if "microbatch_size" in dict(self.options):
            del options["num_microbatches"]
        return options | dict(self.options)

    def shallow(self) -> Case:
        """The same case with as few layers as its stages need: more of them only repeat the first ones."""
        special = _OPTIONS_OF_LAYERS & dict(self.options).keys()
        return self if special else self.but(stages=self.sizes.pp_size)

    def but(self, **changes: Any) -> Case:
        """The same case with another value of some fields, its own or its recipe's."""
        own = {name: value for name, value in changes.items() if name in self.__dataclass_fields__}
        recipe = replace(self.recipe, **{name: value for name, value in changes.items() if name not in own})
        return replace(self, **{"recipe": recipe, **own})


def share_of(batch: Batch, rank: int, world_size: int) -> dict[str, Tensor]:
    """A data-parallel rank's contiguous share of a global batch."""
    rows = num_rows(batch)
    first, last = rows * rank // world_size, rows * (rank + 1) // world_size
    return {
        key: value[first:last] if isinstance(value, Tensor) and value.dim() else value for key, value in batch.items()
    }
