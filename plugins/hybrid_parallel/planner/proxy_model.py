"""Build a pruned model, sharded for one rank of a layout, and track which of its parts runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.boosted.whole_model import WholeModel
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import build_mesh
from plugins.hybrid_parallel.planner.op_recorder import Part
from plugins.hybrid_parallel.planner.pruned_model import LayerList, layer_lists, prune_layers
from plugins.hybrid_parallel.setup.model import shard_model, wrap_model
from plugins.hybrid_parallel.setup.optimizer import build_optimizer
from shardformer.peft import model_inside
from shardformer.policies.registry import policy_for
from shardformer.utils.parameter_names import names_of_parameters


class PartListener(Protocol):
    """Listener that is notified which part of a model runs."""

    def enter(self, part: Part) -> None:
        """Handle the start of `part`."""

    def give(self, hidden: Tensor) -> None:
        """Handle the hidden state that the running part returns."""


def build_proxy_model(
    build: Callable[[], nn.Module],
    config: HybridParallelConfig,
    device: torch.device | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> tuple[nn.Module, list[LayerList], HybridParallelModel]:
    """Build the model with one layer of each kind, shard it for this rank, and wrap it.

    Args:
        build: builds the whole model; called on the meta device.
        config: the layout.
        device: device on which the model gets random values; None to leave it on the meta device.
        optimizer: builds an optimizer, which is wrapped too; None for no optimizer.

    Returns:
        The sharded module, its lists of layers by their paths inside of peft's wrapper, and the wrapped model.

    Raises:
        ConfigurationError: the model cannot be sharded like this.
    """
    mesh = build_mesh(1, 1, 1, config.parallel.tp_size, device=device)
    with quiet(), torch.device("meta"):
        model = build()
    try:
        inside = model_inside(model)
        policy = policy_for(inside)
        policy.set_model(inside)
        lists = layer_lists(inside, policy.base_path, policy.stages)
        prune_layers(inside, lists)
    except ValueError as error:
        if config.parallel.tp_size > 1:
            raise ConfigurationError(str(error)) from error
        lists = []  # without a policy, any model runs on a single rank
    optim = optimizer(model.parameters()) if optimizer is not None else None
    names, groups = names_of_parameters(model), [list(model.parameters())]
    origin = WholeModel.of(model)
    shared = shard_model(model, config, mesh)
    if device is not None:
        give_memory(model, device)
        give_values(model)
    model.train()
    built = wrap_model(model, config, mesh, 0, origin, shared)
    if optim is not None:
        build_optimizer(optim, groups, names, built, config, mesh)
    return model, lists, built.model


def give_memory(module: nn.Module, device: torch.device | str = "cpu") -> None:
    """Replace meta tensors by uninitialized tensors on `device`, in place; attributes of parameters are kept."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (old tensor, kept alive so that its id stays unique; new one)
    for each in module.modules():
        for held in (each._parameters, each._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in moved:
                    new = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    new.__dict__.update(tensor.__dict__)
                    moved[id(tensor)] = tensor, new
                held[name] = moved[id(tensor)][1]


@torch.no_grad()
def give_values(module: nn.Module) -> None:
    """Set parameters to small random values and buffers to ones, so that no pass gets slow or undefined values."""
    for param in module.parameters():
        param.normal_(std=0.02)
    for buffer in module.buffers():
        buffer.fill_(1)


def training_loss(wrapped: HybridParallelModel, batch: dict[str, Tensor]) -> Tensor:
    """Compute the loss of a step as `execute_pipeline` does."""
    loss = wrapped.step_loss([batch], None, batch)
    inputs = wrapped.inputs_of(batch, loss)
    with loss.reading(wrapped.unwrap()):
        return loss.share(wrapped.unwrap()(**inputs), 0)


def watch_layers(module: nn.Module, lists: Sequence[LayerList], listener: PartListener) -> list[Any]:
    """Register hooks that tell `listener` which part runs, in forward and backward passes; return their handles."""
    hooks, module = [], model_inside(module)
    for number, each in enumerate(lists):
        layers = [list(module.get_submodule(path)) for path in each.paths]
        for kind, parts in enumerate(zip(*layers, strict=True)):
            for part in parts:
                hooks.append(part.register_forward_pre_hook(_entering(listener, number, kind), with_kwargs=True))
            hooks.append(parts[-1].register_forward_hook(_leaving(listener, number, kind)))
    return hooks


def _entering(listener: PartListener, number: int, kind: int) -> Callable:
    def enter(_: nn.Module, args: tuple, kwargs: dict) -> None:
        if kind == 0:
            hidden = args[0] if args else next(iter(kwargs.values()))
            if isinstance(hidden, Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda grad: listener.enter(("gap", number)))
        listener.enter(("layer", number, kind))

    return enter


def _leaving(listener: PartListener, number: int, kind: int) -> Callable:
    def leave(_: nn.Module, __: tuple, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor):
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: listener.enter(("layer", number, kind)))
            listener.give(hidden)
        listener.enter(("gap", number + 1))

    return leave


@contextmanager
def quiet() -> Iterator[None]:
    """Silence log messages: transformers logs per configuration, torch per operator that fails on fake tensors."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
