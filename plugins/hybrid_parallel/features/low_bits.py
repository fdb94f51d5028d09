"""Features of few bits: frozen weights that are quantised, and matrix products in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.features.feature import Feature, Parts
from shardformer.layers.fp8 import check_fp8, multiply_in_fp8, weights_rounded_once
from shardformer.matmul.quantised import is_quantised, keep_format, kind_of_layer, quantised_layers, quantised_name
from shardformer.peft import adapter_configs, model_inside

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel


class QuantisedWeights(Feature):
    """Frozen weights that a quantiser has packed."""

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse quantised weights without adapters, and those of which it is not known how they are cut."""
        inside, tp_size = model_inside(model), self.config.parallel.tp_size
        packed, name = quantised_name(inside), type(inside).__name__
        what = f"{packed} is packed" if packed is not None else "its weights are packed"
        if packed is not None and not adapter_configs(model):
            raise ConfigurationError(
                f"a quantised {name} ({what}) has no weights that can be trained; wrap it by peft's get_peft_model, or "
                "load it without quantization_config"
            )
        if self.config.mixed_precision.precision == "fp8":
            raise ConfigurationError(
                f"precision='fp8' cannot multiply the quantised weights of this {name} ({what}); use precision='bf16'"
            )
        for path, module, kind in quantised_layers(inside):
            if (problem := kind.unusable(module)) is not None:
                raise ConfigurationError(f"{path} has {problem}")
        unknown = _first_unknown(inside)
        if tp_size > 1 and (unknown is not None or packed is None):
            raise ConfigurationError(
                f"tp_size={tp_size} cannot shard a quantised {name}: {unknown or 'its weights'} of a kind that is not "
                "known; use the linear layers of bitsandbytes, tp_size=1 (dp and pp work), or load it without "
                "quantization_config"
            )

    def sharded(self, parts: Parts) -> None:
        """Let layers that stay whole keep the format of their weights in evaluation."""
        keep_format(parts.module)


def _first_unknown(model: nn.Module) -> str | None:
    """Return which quantised parameter belongs to no layer that can be cut: "NAME is"; None if all do."""
    for path, module in model.named_modules():
        own = _quantised_of(module) if kind_of_layer(module) is None else None
        if own is not None:
            return f"{path}.{own} is"
    return None


def _quantised_of(module: nn.Module) -> str | None:
    return next((name for name, parameter in module.named_parameters(recurse=False) if is_quantised(parameter)), None)


class Float8Products(Feature):
    """Matrix products of layers in FP8."""

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse a GPU without the products of the recipe."""

        def check_device() -> None:
            try:
                check_fp8(mesh.device, self.config.mixed_precision.fp8_recipe)
            except ValueError as error:
                raise ConfigurationError(str(error)) from error

        raise_on_all_ranks(check_device)

    def sharded(self, parts: Parts) -> None:
        """Have linear layers multiply in FP8."""
        multiply_in_fp8(parts.module, self.config.mixed_precision.fp8_recipe)

    def boosted(self, model: HybridParallelModel) -> None:
        """Round weights once in each pass."""
        model.around_passes.append(lambda this: weights_rounded_once(model.unwrap()))
