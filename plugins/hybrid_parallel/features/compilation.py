"""The option `compile_layers`: `torch.compile` of each layer of a sharded model (regional compilation)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.features.feature import Feature
from shardformer.attention.registry import trace_lookups
from shardformer.layers.fused_ops import has_compiler
from shardformer.utils.untraced import prepare_tracing

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel

_BACKEND = "inductor"
# All layers of a kind share one compilation, and one limit, which towers and decoders of several kinds exceed.
_RECOMPILE_LIMIT = 64


class Compilation(Feature):
    """Compiles the layers of this rank's stages."""

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse a model without layers, and a machine without a compiler for the device."""
        check_compilation(model, mesh.device)

    def boosted(self, model: HybridParallelModel) -> None:
        """Compile the layers."""
        compile_layers(model.unwrap())


def check_compilation(model: nn.Module, device: torch.device) -> None:
    """Refuse a model whose layers cannot be compiled."""
    if not any(_layers(model)):
        raise ConfigurationError(
            f"compile_layers=True finds no layers of transformers in {type(model).__name__}; use compile_layers=False"
        )
    if not has_compiler(device.type):
        needed = "Triton" if device.type == "cuda" else "a C++ compiler such as g++"
        raise ConfigurationError(
            f"compile_layers=True needs {needed}, which is not installed; install it or use compile_layers=False"
        )


def compile_layers(model: nn.Module) -> None:
    """Compile each layer in place for training; names of parameters stay, and what does not train runs eagerly.

    Random numbers are those of eager operators. A second shape of the inputs makes sizes symbolic in the graphs, so
    that further shapes need no compilation.
    """
    from torch._dynamo import config

    prepare_tracing()
    trace_lookups()
    config.recompile_limit = max(config.recompile_limit, _RECOMPILE_LIMIT)
    options = {"fallback_random": True} if _BACKEND == "inductor" else None
    for layer in _layers(model):
        compiled = torch.compile(layer.forward, backend=_BACKEND, options=options)
        layer._compiled_call_impl = _only_in_training(layer, compiled)


def _only_in_training(layer: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of `layer`: compiled in training, eager where caches of generation change from call to call.

    The hooks of a layer run outside of its graphs: they gather its parameters, or send activations off.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return layer._call_impl(*args, **kwargs)
        attributes = vars(layer)
        before = attributes.get("forward")
        attributes["forward"] = compiled  # for this call alone: copies of the layer would run it with these weights
        try:
            return layer._call_impl(*args, **kwargs)
        finally:
            attributes.pop("forward") if before is None else attributes.update(forward=before)

    return call


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that transformers recomputes, that is, its layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _layers(child)
