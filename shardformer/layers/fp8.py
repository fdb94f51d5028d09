"""Selection of the layers that multiply in FP8."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.layers.embedding import VocabParallelLMHead
from shardformer.layers.replicated_linear import replicated_linear
from shardformer.matmul.float8 import FP8_RECIPES, Float8
from shardformer.matmul.native import Native
from shardformer.utils.derived_modules import replace_modules
from shardformer.utils.module_paths import remembered

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
    and stacked experts.
    """
    in_lists = [module for path, module in model.named_modules() if any(part.isdigit() for part in path.split("."))]
    found = {module: layer for module in in_lists if (layer := _fp8_layer(module)) is not None}
    kernel = FP8_RECIPES[recipe]()
    for layer in found.values():
        layer.kernel = kernel
    replace_modules(model, found)
    if not found:
        _log.warning("%s has no linear layers in a list of layers: nothing multiplies in 8 bit", type(model).__name__)


@contextmanager
def weights_rounded_once(model: nn.Module) -> Iterator[None]:
    """Let layers that multiply in FP8 round their weights once in this context, in which weights must not change."""
    with ExitStack() as stack:
        for kernel in remembered(model, _fp8_kernels):
            stack.enter_context(kernel.reusing_weights())
        yield


def _fp8_kernels(model: nn.Module) -> set[Float8]:
    return {module.kernel for module in model.modules() if isinstance(getattr(module, "kernel", None), Float8)}


def check_fp8(device: torch.device, recipe: str = "tensorwise") -> None:
    """Check that a device has the FP8 products of a recipe.

    Raises:
        ValueError: it has none.
    """
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    least, option, instead = _NEEDED[recipe]
    if capability < least:
        needed, found = (".".join(map(str, each)) for each in (least, capability))
        raise ValueError(
            f"{option} needs a GPU of compute capability {needed} or more, and this one has {found}; use {instead}"
        )


def _fp8_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer that multiplies in FP8 instead of `module`, or `module` itself; None if it is not linear."""
    if isinstance(module, VocabParallelLMHead):
        return None
    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return module if type(module.kernel) is Native else None
    return replicated_linear(module)
