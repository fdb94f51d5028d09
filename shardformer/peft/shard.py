"""Sharding of the adapters of a layer, according to the sharding of the layer.

For a column-parallel layer, parameters on the output side are sharded (LoRA's B, DoRA's magnitudes, the factors of
IA³); for a row-parallel layer, those on the input side (LoRA's A). The other matrix is small and stays whole, and the
communication between the two has only as many features as the adapter's rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.layers import (
    ColumnParallelLinear,
    MultiQueryLinear,
    ParallelDropout,
    ParallelModule,
    RowParallelLinear,
)
from shardformer.matmul.native import NATIVE, is_transposed
from shardformer.matmul.quantised import QuantisedWeight
from shardformer.peft import kinds
from shardformer.policies.base import Policy
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import ShardSpec, annotate, grad_group_of, shard_parameter, spec_of
from shardformer.stages.stage import StagePlaceholder
from shardformer.utils.module_paths import has_module, replace_module


def cut_adapter(layer: nn.Module, path: str, config: ShardConfig) -> None:
    """Shard all adapters of a peft layer like its sharded base layer; ValueError if they cannot follow."""
    if kinds.is_a(layer, "trainable tokens"):
        look_up_trained_rows(layer.token_adapter)
        layer.token_adapter.merge = partial(kinds.refuse_merge, "trainable_token_indices", _CUT_VOCABULARY)
        return
    if kinds.is_exactly(layer, *kinds.LORA_LINEAR):
        if layer.lora_magnitude_vector:
            kinds.check_shape_of_cut(layer.base_layer, path, "DoRA; use use_dora=False")
        _cut_lora(layer, config)
        _cut_magnitudes(layer, config)
        _move_hooks(layer)
    elif kinds.is_exactly(layer, *kinds.IA3_LINEAR):
        kinds.check_shape_of_cut(layer.base_layer, path, "IA³; leave it out of target_modules")
        _cut_factors(layer, config)
    elif kinds.is_exactly(layer, "lora embedding"):
        _keep_embedding_adapters(layer, config)
    if not getattr(layer.base_layer, "merges_exactly", True):
        layer.merge = partial(kinds.refuse_merge, kinds.name_of(layer), _OTHER_BLOCKS)


def keep_whole(parameters: Iterable[nn.Parameter], config: ShardConfig, grad_group: ProcessGroup | None = None) -> None:
    """Annotate parameters that have no `ShardSpec` yet as whole on every tensor-parallel rank."""
    for parameter in parameters:
        if getattr(parameter, "shard_spec", None) is None:
            annotate(parameter, config.replicated_spec(parameter), grad_group)


def _cut_lora(layer: nn.Module, config: ShardConfig) -> None:
    base = layer.base_layer
    for name in layer.lora_A:
        first, second = layer.lora_A[name], layer.lora_B[name]
        if isinstance(base, ColumnParallelLinear | MultiQueryLinear):
            keep_whole(first.parameters(), config, _group_of_inputs(base))
            layer.lora_B[name] = _cut_like(base, second, dim=0)
        elif isinstance(base, RowParallelLinear):
            layer.lora_A[name] = _cut_like(base, first, dim=1)
            keep_whole(second.parameters(), config, _group_of_outputs(base))
            if not base.splits_input:
                _draw_apart(layer.lora_dropout, name, base.group)
        elif isinstance(base, ParallelModule):
            raise ValueError(f"{type(base).__name__} cannot be given adapters; leave it out of target_modules")
        else:
            group = grad_group_of(base.weight)  # of a whole layer that sees only this rank's tokens
            keep_whole([*first.parameters(), *second.parameters()], config, group)
            if group is not None:
                _draw_apart(layer.lora_dropout, name, group)


def _move_hooks(layer: nn.Module) -> None:
    """Move the hooks on the output of the base layer that must see the sum of base layer and adapters."""
    hooks = layer.base_layer._forward_hooks
    for key, hook in list(hooks.items()):
        if getattr(hook, "sees_adapters", False):
            del hooks[key]
            layer.register_forward_hook(hook)


def _cut_magnitudes(layer: nn.Module, config: ShardConfig) -> None:
    """Shard DoRA's row norms of the weight (arXiv 2402.09353) with its rows, or sum squares over ranks."""
    base = layer.base_layer
    for dora in (layer.lora_magnitude_vector or {}).values():
        if isinstance(base, ColumnParallelLinear):
            dora.weight = _piece(base, dora.weight, dim=0)
            dora.get_lora_weight = _local_product
        elif isinstance(base, RowParallelLinear):
            keep_whole(dora.parameters(), config, _group_of_outputs(base))
            dora.get_lora_weight = _local_product
            dora.get_weight_norm = partial(_norm_over_ranks, group=base.group, transposed=base.transposed)
        else:
            keep_whole(dora.parameters(), config, grad_group_of(base.weight))


def _local_product(lora_A: nn.Module, lora_B: nn.Module, adapter_name: str | None = None) -> Tensor:
    """Compute B A of the local matrices; peft would multiply by the identity, which runs collectives."""
    return lora_B.weight @ lora_A.weight


@torch.no_grad()
def _norm_over_ranks(
    weight: Tensor,
    lora_weight: Tensor,
    scaling: float,
    adapter_name: str | None = None,
    *,
    group: ProcessGroup,
    transposed: bool,
) -> Tensor:
    """Compute [out], the row norms of W + scaling B A; this rank holds a shard of the input features."""
    own = (weight.t() if transposed else weight) + scaling * lora_weight
    squares = own.square().sum(dim=1)
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def _cut_factors(layer: nn.Module, config: ShardConfig) -> None:
    """Shard IA³'s factors of the inputs of feed-forward layers, [1, in], or the outputs of others, [out, 1]."""
    base, of_inputs = layer.base_layer, layer.is_feedforward
    for name, factors in layer.ia3_l.items():
        if isinstance(base, RowParallelLinear) and of_inputs:
            layer.ia3_l[name] = _piece(base, factors, dim=1)
        elif isinstance(base, ColumnParallelLinear) and not of_inputs:
            layer.ia3_l[name] = _piece(base, factors, dim=0)
        elif isinstance(base, ColumnParallelLinear):
            keep_whole([factors], config, _group_of_inputs(base))
        elif isinstance(base, RowParallelLinear):
            keep_whole([factors], config, _group_of_outputs(base))
        else:
            keep_whole([factors], config, grad_group_of(base.weight))
    shared = getattr(base, "_shared_input", None)
    for reader in shared.layers if shared is not None and of_inputs else ():
        reader._shared_input = None  # each now reads its own input


def _keep_embedding_adapters(layer: nn.Module, config: ShardConfig) -> None:
    group = grad_group_of(layer.base_layer.weight)
    keep_whole([*layer.lora_embedding_A.parameters(), *layer.lora_embedding_B.parameters()], config, group)
    if isinstance(layer.base_layer, ParallelModule) or spec_of(layer.base_layer.weight).dim is not None:
        layer.merge = partial(kinds.refuse_merge, kinds.name_of(layer), _CUT_VOCABULARY)


_CUT_VOCABULARY = "an embedding whose vocabulary tp_size cuts"
_OTHER_BLOCKS = "a weight that tp_size cuts, because the whole weight is quantised in other blocks than its shards"


def _group_of_inputs(base: ParallelModule) -> ProcessGroup | None:
    """Return the group for gradient sums on the input side: after a sequence gather, gradients are partial sums."""
    return base.group if base.input_is_gathered else None


def _group_of_outputs(base: RowParallelLinear) -> ProcessGroup | None:
    """Return the group for gradient sums on the output side: with sharded tokens, gradients are partial sums."""
    return None if base.sequence is None else base.sequence.grad_group


def _cut_like(base: ParallelModule, native: nn.Linear, dim: int) -> ParallelModule:
    """Return a layer that works like `base`, with the weight of `native`; its `dim` is sharded like that of `base`."""
    layer = copy.copy(base)
    if isinstance(base.kernel, QuantisedWeight):
        layer.kernel = NATIVE
    bias = None if native.bias is None else _piece(base, native.bias, dim)
    vars(layer).pop("bias", None)  # a base layer without a bias has a None here, which would hide the parameter
    layer._parameters = {"weight": _piece(base, native.weight, dim), "bias": bias}
    layer.transposed, layer.adds_bias, layer._shared_input = is_transposed(native), True, None
    return layer.train(native.training)


def _piece(base: ParallelModule, parameter: nn.Parameter, dim: int) -> nn.Parameter:
    """Return this rank's piece of a parameter whose `dim` is sharded like the weight of `base`."""
    # A packed weight has other sizes than its features.
    spec, shape = getattr(base, "features", None) or spec_of(base.weight), tuple(parameter.shape)
    if spec.dim is None:
        whole = ShardSpec(shape, rank=spec.rank, world_size=spec.world_size)
        return annotate(parameter, whole, grad_group_of(base.weight))
    cut = ShardSpec(shape, dim, spec.parts, spec.rank, spec.world_size, spec.copies)
    return shard_parameter(parameter, cut, grad_group_of(base.weight))


def _draw_apart(dropouts: nn.ModuleDict, name: str, group: ProcessGroup) -> None:
    """Let each rank draw its own dropout mask, because ranks hold different features or tokens."""
    if isinstance(dropouts[name], nn.Dropout):
        dropouts[name] = ParallelDropout.from_native_module(dropouts[name], group).train(dropouts[name].training)


# ----- rows of an embedding that peft trains by themselves (trainable_token_indices) -----
# peft puts the trained rows into a copy of the weight and looks tokens up there. A rank that has a part of the weight
# looks them up over all ranks first, and then puts the trained rows into the output.


def look_up_trained_rows(adapter: nn.Module) -> None:
    """Let a `TrainableTokensLayer`, whose base layer is a sharded embedding, replace rows of the output."""
    adapter.forward_adapters = partial(_with_trained_rows, adapter)
    adapter.get_merged_weights = partial(_local_rows, adapter)


def _with_trained_rows(adapter: nn.Module, ids: Tensor, active: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
    """Look up [batch, seq] -> [batch, seq, hidden]."""
    out = adapter.base_layer(ids, *args, **kwargs)
    if adapter.disable_adapters or not active:
        return out
    adapter._check_overlapping_tokens(active)
    for name in active:
        tokens = adapter.token_indices[name]
        is_token = ids.unsqueeze(-1) == torch.tensor(tokens, device=ids.device)  # [batch, seq, trained rows]
        # The padding row gets no gradient, as natively.
        padding = adapter.base_layer.padding_idx
        row = tokens.index(padding) if padding in tokens else None
        rows = F.embedding(is_token.int().argmax(-1), adapter.trainable_tokens_delta[name].to(out.dtype), row)
        out = torch.where(is_token.any(-1, keepdim=True), rows, out)
    return out


def _local_rows(adapter: nn.Module, active: Sequence[str]) -> Tensor:
    """Return this rank's rows, of which models read only the dtype and the device."""
    return adapter.base_layer.weight


@contextmanager
def adapters_detached(model: nn.Module, config: ShardConfig, policy: Policy) -> Iterator[None]:
    """Detach adapters in the context, then reattach this stage's, sharded; ValueError before any change."""
    layers = dict(kinds.wrapped_layers(model))
    kinds.check_layers(model, layers, config, policy)
    outermost = {
        path: layer for path, layer in layers.items() if not any(path.startswith(f"{other}.") for other in layers)
    }
    for path, layer in outermost.items():
        replace_module(model, path, kinds.inner_module(layer))
    copies = ModuleCopies(config)
    try:
        yield
    finally:
        for path, layer in outermost.items():
            if has_module(model, path) and not isinstance(model.get_submodule(path), StagePlaceholder):
                kinds.put_inside(layer, model.get_submodule(path))
                if kinds.is_a(layer, "copied module"):
                    copies.cut(layer)
                elif config.tensor_parallel_size > 1:
                    cut_adapter(layer, path, config)
                keep_whole(layer.parameters(), config)
                replace_module(model, path, layer)


# ----- copies of modules that peft trains in full (modules_to_save) -----


class ModuleCopies:
    """Shards copies of modules.

    Args:
        config: configuration that sharded the modules; they refer to its process groups.
    """

    def __init__(self, config: ShardConfig) -> None:
        groups = [config.group, config.context_parallel_process_group, config.expert_parallel_process_group]
        # Objects that a copy shares with its original instead of deep-copying them: process groups and configuration.
        self._shared = {id(each): each for each in (*groups, config, config.sequence)}

    def cut(self, wrapper: nn.Module) -> None:
        """Replace the whole copies by copies of the sharded module that have their own values."""
        sharded = wrapper.original_module
        for name, whole in wrapper.modules_to_save.items():
            wrapper.modules_to_save[name] = self._like(sharded, whole)

    def _like(self, sharded: nn.Module, whole: nn.Module) -> nn.Module:
        values, pieces = dict(whole.named_parameters()), dict(sharded.named_parameters())
        shared = {id(each): each for piece in pieces.values() for each in (piece, grad_group_of(piece))}
        new = copy.deepcopy(sharded, self._shared | shared)
        for name, piece in pieces.items():
            spec, value = spec_of(piece), values[name]
            owner, _, attribute = name.rpartition(".")
            setattr(new.get_submodule(owner), attribute, shard_parameter(value, spec, grad_group_of(piece)))
        for name, buffer in whole.named_buffers():
            new.get_buffer(name).copy_(buffer)
        return new.train(whole.training)
