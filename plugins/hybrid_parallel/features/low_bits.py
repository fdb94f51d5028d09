"""Features of few bits: frozen weights that are quantised, and matrix products in FP8."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.features.feature import Feature, Parts
from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.layers.embedding import VocabParallelLMHead
from shardformer.layers.parallel_module import replicated_linear
from shardformer.matmul.float8 import FP8_RECIPES, Float8
from shardformer.matmul.native import Native
from shardformer.matmul.quantised import is_quantised, keep_format, kind_of_layer, quantised_layers, quantised_name
from shardformer.peft import adapter_configs, model_inside
from shardformer.utils.derived_modules import replace_modules
from shardformer.utils.module_paths import remembered

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel


_log = logging.getLogger(__name__)
# Recipe -> the least compute capability, the option that asks for it, and another value.
_NEEDED = {
    "tensorwise": ((8, 9), "precision='fp8'", "precision='bf16'"),
    "rowwise": ((9, 0), "fp8_recipe='rowwise'", "fp8_recipe='tensorwise'"),
    "mxfp8": ((10, 0), "fp8_recipe='mxfp8'", "fp8_recipe='tensorwise'"),
}


def multiply_in_fp8(model: nn.Module, recipe: str = "tensorwise") -> None:
    """Let the linear layers inside the model's lists of layers multiply in FP8, by a recipe of `matmul/float8.py`.

    Embeddings, heads and other modules outside of these lists keep their precision, as do norms, attention, routers
    and stacked experts. So do, on a GPU, layers that are too small to gain, unless all are.
    """
    in_lists = [module for path, module in model.named_modules() if any(part.isdigit() for part in path.split("."))]
    found = {module: layer for module in in_lists if (layer := _fp8_layer(module)) is not None}
    large = {module: layer for module, layer in found.items() if module.weight.is_cpu or _gains(layer)}
    found = large or found
    kernel = FP8_RECIPES[recipe]()
    for layer in found.values():
        layer.kernel = kernel
    replace_modules(model, found)
    if not found:
        _log.warning("%s has no linear layers in a list of layers: nothing multiplies in 8 bit", type(model).__name__)


def _gains(layer: nn.Module) -> bool:
    """Return whether 8 bit save more time in products than rounding takes; layers that share an input are one.

    Of each token, [in] and its gradient [out] are rounded, 6 bytes of reads and writes a value. The three products, of
    6 * in * out operations in bf16, take half the time in 8 bit. A GPU does about 300 operations for each byte that it
    moves (H100: 989e12 and 3.35e12 a second, B200: 2,250e12 and 8e12), so both take the same time where
    in * out / (in + out) is 600.
    """
    shared = getattr(layer, "_shared_input", None)
    weights = [each.weight for each in ([layer] if shared is None else shared.layers)]
    columns = weights[0].shape[0 if getattr(layer, "transposed", False) else -1]
    size = sum(weight.numel() for weight in weights)
    return size >= 600 * (columns + size // max(columns, 1))


@contextmanager
def weights_rounded_once(model: nn.Module) -> Iterator[None]:
    """Let layers that multiply in FP8 round their weights once in this context, in which weights must not change."""
    with ExitStack() as stack:
        for kernel in remembered(model, _fp8_kernels):
            stack.enter_context(kernel.reusing_weights())
        yield


def _fp8_kernels(model: nn.Module) -> set[Float8]:
    return {module.kernel for module in model.modules() if isinstance(getattr(module, "kernel", None), Float8)}


def check_fp8(device: torch.device, recipe: str) -> None:
    """Check that a device has the FP8 products of a recipe; raises ConfigurationError if it has none."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    least, option, instead = _NEEDED[recipe]
    if capability < least:
        needed, found = (".".join(map(str, each)) for each in (least, capability))
        raise ConfigurationError(
            f"{option} needs a GPU of compute capability {needed} or more, and this one has {found}; use {instead}"
        )


def _fp8_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer that multiplies in FP8 instead of `module`, or `module` itself; None if it is not linear."""
    if isinstance(module, VocabParallelLMHead):
        return None
    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return module if type(module.kernel) is Native else None
    return replicated_linear(module)


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
        raise_on_all_ranks(lambda: check_fp8(mesh.device, self.config.mixed_precision.fp8_recipe))

    def sharded(self, parts: Parts) -> None:
        """Have linear layers multiply in FP8."""
        multiply_in_fp8(parts.module, self.config.mixed_precision.fp8_recipe)

    def boosted(self, model: HybridParallelModel) -> None:
        """Round weights once in each pass."""
        model.around_passes.append(lambda this: weights_rounded_once(model.unwrap()))
