"""LoRA adapters (arXiv 2106.09685) of the peft package on a sharded model.

A layer with adapters is known by its parts, `base_layer`, `lora_A` and `lora_B`; peft itself is not imported. Adapters
are set aside while the model is sharded, so that a policy sees the layers of its family. Then each is cut like its
layer: B over the outputs of a column-parallel layer, A over the inputs of a row-parallel one. The other matrix
is small and stays whole, and what travels between the two has only as many features as the adapter's rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from shardformer.layers import ColumnParallelLinear, HeadRowsLinear, ParallelDropout, ParallelModule, RowParallelLinear
from shardformer.layers.linear import is_linear, is_transposed
from shardformer.policies.base import Policy
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import ShardSpec, annotate, grad_group_of, shard_parameter, spec_of
from shardformer.stage import StandIn, has_module, replace_module


def model_inside(model: nn.Module) -> nn.Module:
    """The model of transformers inside of peft's wrappers; the model itself where there are none."""
    is_wrapped = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_wrapped else model


@contextmanager
def adapters_aside(model: nn.Module, config: ShardConfig, policy: Policy) -> Iterator[None]:
    """Leave `model` without adapters while `policy` is applied; those of the layers that stay here come back, cut.

    Raises:
        ValueError: adapters that cannot be cut, or options that do not go with them; nothing was changed then.
    """
    layers = {path: module for path, module in model.named_modules() if _has_adapters(module)}
    _check(layers, config, policy)
    for path, layer in layers.items():
        replace_module(model, path, layer.base_layer)
    try:
        yield
    finally:
        for path, layer in layers.items():
            if has_module(model, path) and not isinstance(model.get_submodule(path), StandIn):
                layer.base_layer = model.get_submodule(path)
                _cut_adapters(layer, config)
                replace_module(model, path, layer)


def _has_adapters(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A") and hasattr(module, "lora_B")


def _check(layers: Mapping[str, nn.Module], config: ShardConfig, policy: Policy) -> None:
    problems = []
    for path, layer in layers.items():
        base = layer.base_layer
        if not is_linear(base):
            problems.append(
                f"the adapter of {path} adds to {type(base).__name__}, which is not a linear layer; "
                "leave it out of target_modules"
            )
        elif getattr(layer, "lora_variant", None) or getattr(layer, "lora_magnitude_vector", None):
            problems.append(f"the adapter of {path} reads its whole layer (DoRA); use plain LoRA, use_dora=False")
    if layers and config.sequence is not None and config.enable_sequence_overlap:
        problems.append(
            "enable_sequence_overlap=True does not support adapters, which read tokens before they have arrived; "
            "use enable_sequence_overlap=False"
        )
    if layers and policy.repeats_layers and config.stage_manager.num_stages > 1:
        problems.append("adapters of layers that several pipeline stages run are not summed over them; use pp_size=1")
    if problems:
        raise ValueError("; ".join(problems))


def _cut_adapters(layer: nn.Module, config: ShardConfig) -> None:
    """Cut all adapters of a layer like its base layer, which is sharded."""
    base = layer.base_layer
    for name in layer.lora_A:
        if isinstance(base, ColumnParallelLinear | HeadRowsLinear):
            # Behind a gather of the sequence gradients are partial sums; without one, B sums that of its input.
            _keep_whole(layer.lora_A[name], config, base.group if base.input_is_gathered else None)
            layer.lora_B[name] = _cut_like(base, layer.lora_B[name], dim=0)
        elif isinstance(base, RowParallelLinear):
            layer.lora_A[name] = _cut_like(base, layer.lora_A[name], dim=1)
            _keep_whole(layer.lora_B[name], config, base.group if base.sequence is not None else None)
            if not base.splits_input:
                _draw_apart(layer.lora_dropout, name, base.group)
        elif isinstance(base, ParallelModule):
            raise TypeError(f"{type(base).__name__} cannot be given adapters; leave it out of target_modules")
        else:
            group = grad_group_of(base.weight)  # of a layer that is whole, but sees tokens of this rank only
            _keep_whole(layer.lora_A[name], config, group)
            _keep_whole(layer.lora_B[name], config, group)
            if group is not None:
                _draw_apart(layer.lora_dropout, name, group)


def _cut_like(base: ParallelModule, native: nn.Linear, dim: int) -> ParallelModule:
    """A layer that works as `base` does, with the weight of `native`, of which `dim` is cut like that of `base`."""
    spec, grad_group = spec_of(base.weight), grad_group_of(base.weight)

    def cut(parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        shape = tuple(parameter.shape)
        whole = ShardSpec(shape, rank=spec.rank, world_size=spec.world_size)
        if spec.dim is None:
            return annotate(parameter, whole, grad_group)
        return shard_parameter(
            parameter, ShardSpec(shape, dim, spec.parts, spec.rank, spec.world_size, spec.copies), grad_group
        )

    layer = copy.copy(base)
    layer._parameters = {"weight": cut(native.weight), "bias": cut(native.bias)}
    layer.transposed, layer.adds_bias, layer._shared_input = is_transposed(native), True, None
    return layer.train(native.training)


def _keep_whole(layer: nn.Module, config: ShardConfig, grad_group: ProcessGroup | None) -> None:
    size = config.tensor_parallel_size
    rank = dist.get_rank(config.group) if size > 1 else 0
    for parameter in layer.parameters():
        annotate(parameter, ShardSpec(tuple(parameter.shape), rank=rank, world_size=size), grad_group)


def _draw_apart(dropouts: nn.ModuleDict, name: str, group: ProcessGroup) -> None:
    """Each rank drops features, or tokens, of its own."""
    if isinstance(dropouts[name], nn.Dropout):
        dropouts[name] = ParallelDropout.from_native_module(dropouts[name], group).train(dropouts[name].training)
