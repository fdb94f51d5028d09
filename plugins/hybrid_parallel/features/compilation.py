"""The option `compile_layers`: `torch.compile` of each layer of a sharded model (regional compilation).

On GPUs inductor records each graph as a CUDA graph (`cuda_graphs`), and splits collectives of sequence parallelism and
the products that read or make their tokens into parts that overlap (`enable_sequence_overlap`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.groups import KernelOptions
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.features.feature import Feature
from shardformer.attention.registry import trace_lookups
from shardformer.layers.fused_ops import has_compiler
from shardformer.utils.untraced import define_operators, prepare_tracing

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel
    from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer

_BACKEND = "inductor"
# All layers of a kind share one compilation, and one limit, which towers and decoders of several kinds exceed.
_RECOMPILE_LIMIT = 64
_Backend = str | Callable[..., Any]
_Patches = tuple[tuple[str, Any], ...]  # names and values in `torch._inductor.config`
_AS_EAGER: _Patches = (("fallback_random", True),)


class Compilation(Feature):
    """Compiles the layers of this rank's stages."""

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse a model without layers, and a machine without a compiler for the device."""
        check_compilation(model, mesh.device, self.config.kernels)

    def boosted(self, model: HybridParallelModel) -> None:
        """Compile the layers."""
        kernels = self.config.kernels
        if kernels.enable_sequence_overlap:
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            enable_symm_mem_for_group(model.mesh.group("tp").group_name)
        communicates = self.config.parallel.tp_size > 1
        compile_layers(model.unwrap(), communicates=communicates, patches=inductor_patches(kernels))
        self._next_generation()

    def after_step(self, optimizer: HybridParallelOptimizer, model: HybridParallelModel) -> None:
        """Let CUDA graphs of the next step write over what those of this one have returned."""
        self._next_generation()

    def _next_generation(self) -> None:
        """Begin a step of CUDA graphs: without this torch would guess, by its calls of backward passes."""
        if self.config.kernels.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()


def inductor_patches(kernels: KernelOptions) -> _Patches:
    """Return what options change in `torch._inductor.config` for the graphs of layers."""
    patches = _AS_EAGER
    if kernels.cuda_graphs:  # a graph of symbolic sizes runs as without the option: each size would be recorded
        patches += (("triton.cudagraphs", True), ("triton.cudagraph_skip_dynamic_graphs", True))
    return patches + ((("_micro_pipeline_tp", True),) if kernels.enable_sequence_overlap else ())


def check_compilation(model: nn.Module, device: torch.device, kernels: KernelOptions) -> None:
    """Refuse a model whose layers cannot be compiled, and options that need a GPU."""
    if not any(_layers(model)):
        raise ConfigurationError(
            f"compile_layers=True finds no layers of transformers in {type(model).__name__}; use compile_layers=False"
        )
    if not has_compiler(device.type):
        needed = "Triton" if device.type == "cuda" else "a C++ compiler such as g++"
        raise ConfigurationError(
            f"compile_layers=True needs {needed}, which is not installed; install it or use compile_layers=False"
        )
    if kernels.cuda_graphs and device.type != "cuda":
        raise ConfigurationError(f"cuda_graphs=True needs a GPU, and not {device.type}; use cuda_graphs=False")
    if kernels.enable_sequence_overlap and device.type != "cuda":
        raise ConfigurationError(
            "compile_layers=True cannot trace tokens that are still being gathered, and joins their products with the "
            f"gather on GPUs, not on {device.type}; use enable_sequence_overlap=False, or compile_layers=False"
        )


def compile_layers(model: nn.Module, *, communicates: bool = False, patches: _Patches = _AS_EAGER) -> None:
    """Compile each layer in place for training; names of parameters stay, and what does not train runs eagerly.

    Random numbers are those of eager operators. A second shape of the inputs makes sizes symbolic in the graphs, so
    that further shapes need no compilation.

    Args:
        communicates: whether layers are tensor-parallel. These are recomputed around their graphs, not inside: there,
            a compiler allows no state, which layers share inputs by, and which random numbers of a rank come from.
        patches: values of `torch._inductor.config` for the graphs.
    """
    from torch._dynamo import config

    prepare_tracing()
    define_operators()
    trace_lookups()
    config.recompile_limit = max(config.recompile_limit, _RECOMPILE_LIMIT)
    compiled = cache(partial(_compiled, backend=_BACKEND, patches=patches))
    for layer in _layers(model):
        if communicates and layer.gradient_checkpointing and "__call__" not in vars(_kind()):
            recompute = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = partial(_recompute_compiled, compiled, recompute)
        else:
            layer._compiled_call_impl = _only_in_training(layer, compiled(layer.forward))


def _compiled(function: Callable[..., Any], backend: _Backend, patches: _Patches = _AS_EAGER) -> Callable[..., Any]:
    return torch.compile(function, backend=_compiler(backend, patches))


@cache  # graphs are shared by what has the very same compiler
def _compiler(backend: _Backend, patches: _Patches) -> Callable[..., Any]:
    return partial(_compile_graph, backend, patches)


def _compile_graph(
    backend: _Backend, patches: _Patches, graph: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Compile a graph, or return it as it was traced if a compiler may move a draw across the border of a region."""
    if not keeps_draws_apart(graph):
        return graph.forward
    options = {"config_patches": dict(patches)} if backend == "inductor" else {}
    return torch._dynamo.lookup_backend(backend)(graph, inputs, **options)


def keeps_draws_apart(graph: fx.GraphModule) -> bool:
    """Return whether data alone orders the draws of each random region of a rank and all others.

    Compilers keep no other order. In a layer whose attention and feed-forward read the same input, they may draw a mask
    that ranks share while the random state is that of one rank.
    """
    borders = [node for node in graph.graph.nodes if "booster.leave_region" in str(node.target)]
    if not borders:
        return True
    draws = _Draws(graph).nodes()
    for leave in borders:
        enter = leave.args[1].args[0]  # of its states
        before, behind = _reached(enter, "all_input_nodes"), _reached(enter, "users")
        inside = behind & _reached(leave, "all_input_nodes")
        if draws - {enter, leave} - inside - before - _reached(leave, "users"):
            return False
    return True


class _Draws(fx.Interpreter):
    """Finds the nodes of a traced graph that draw random numbers, on fake tensors."""

    def nodes(self) -> set[fx.Node]:
        """Return these nodes."""
        values = [node.meta["example_value"] for node in self.graph.nodes if node.op == "placeholder"]
        self.found: set[fx.Node] = set()
        modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
        with next(modes, nullcontext()), torch.no_grad():
            self.run(*values)
        return self.found

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and look whether one of its operators is tagged as random."""
        with _RandomOperators() as operators:
            result = super().run_node(n)
        self.found |= {n} if operators.seen else set()
        return result


class _RandomOperators(TorchDispatchMode):
    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **kwargs or {})


def _reached(start: fx.Node, neighbours: str) -> set[fx.Node]:
    """Return the nodes that a walk over tensors reaches; sizes order nothing."""
    found: set[fx.Node] = set()
    waiting = [start]
    while waiting:
        for node in getattr(waiting.pop(), neighbours):
            if node not in found and isinstance(node.meta.get("example_value"), torch.Tensor | tuple | list):
                found.add(node)
                waiting.append(node)
    return found


def _recompute_compiled(
    compiled: Callable[..., Any], checkpoint: Callable[..., Any], forward: partial, *args: Any
) -> Any:
    """Recompute the compiled forward of a layer, where transformers would recompute the one that it wraps."""
    return checkpoint(partial(compiled(forward.func), *forward.args, **forward.keywords), *args)


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
    for child in module.children():
        if isinstance(child, _kind()):
            yield child
        else:
            yield from _layers(child)


def _kind() -> type[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return GradientCheckpointingLayer
