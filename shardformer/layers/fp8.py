"""Selection of the layers that multiply in FP8."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.layers.lm_head import VocabParallelLMHead
from shardformer.layers.replicated_linear import replicated_linear
from shardformer.matmul.backends import Float8Matmul
from shardformer.utils.derived_modules import replace_modules
from shardformer.utils.structure import remembered

_log = logging.getLogger(__name__)


def multiply_in_fp8(model: nn.Module) -> None:
    """Let the linear layers inside the model's lists of layers multiply in FP8.

    Embeddings, heads and other modules outside of these lists keep their precision, as do norms, attention, routers
    and stacked experts.
    """
    in_lists = [module for path, module in model.named_modules() if _is_in_a_list(path)]
    found = {module: layer for module in in_lists if (layer := _fp8_layer(module)) is not None}
    backend = Float8Matmul()
    for layer in found.values():
        layer.matmul_backend = backend
    replace_modules(model, found)
    if not found:
        _log.warning("%s has no linear layers in a list of layers: nothing multiplies in 8 bit", type(model).__name__)


@contextmanager
def weights_rounded_once(model: nn.Module) -> Iterator[None]:
    """Let layers that multiply in FP8 round their weights once in this context, in which weights must not change."""
    with ExitStack() as stack:
        for backend in remembered(model, _fp8_backends):
            stack.enter_context(backend.reusing_weights())
        yield


def _fp8_backends(model: nn.Module) -> set[Float8Matmul]:
    found = {getattr(module, "matmul_backend", None) for module in model.modules()}
    return {backend for backend in found if isinstance(backend, Float8Matmul)}


def check_fp8(device: torch.device) -> None:
    """Check that a device has FP8 products.

    Raises:
        ValueError: it has none.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            f"precision='fp8' needs a GPU of compute capability 8.9 or more, and this one has {major}.{minor}; "
            "use precision='bf16'"
        )


def _is_in_a_list(path: str) -> bool:
    return any(part.isdigit() for part in path.split("."))


def _fp8_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer that multiplies in FP8 instead of `module`, or `module` itself; None if it is not linear."""
    if isinstance(module, VocabParallelLMHead):
        return None
    return module if isinstance(module, ColumnParallelLinear | RowParallelLinear) else replicated_linear(module)
