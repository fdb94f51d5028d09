"""Changes to single parameters, and to inputs and outputs of modules, for the styles of tensor-parallel plans."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.attention import log_once
from shardformer.distributed import collectives
from shardformer.distributed.blocks import Blocks, blocks_of, num_parts, split_parameter
from shardformer.layers import ParallelDropout
from shardformer.layers.linear import column_spec, copies_group, in_features, out_features, row_spec
from shardformer.shard_spec import Part, ShardSpec, annotate, shard_parameter
from shardformer.utils.derived_modules import derive
from shardformer.utils.module_paths import alias_parameters

_ROUNDED_BYTES = 2  # of a 16-bit value
_BIASES = ("alibi", "attention_mask", "position_bias", "rel_pos", "rel_2d_pos")


def shard_own_parameter(
    owner: nn.Module, *, name: str, from_end: int, num_parts: int, group: ProcessGroup, num_heads: int | None = None
) -> None:
    """Shard a parameter that `owner` uses directly, such as the stacked weights of experts [experts, out, in].

    Args:
        owner: the module that has the parameter.
        from_end: the sharded dim, counted from the last (1); vectors are sharded along their only dim.
        num_parts: number of fused parts along that dim (gate and up), each sharded independently.
        num_heads: heads along that dim, which are never split; those fewer than ranks are copied.
    """
    parameter = getattr(owner, name)
    dim = max(parameter.dim() - from_end, 0)
    size = parameter.shape[dim]
    along = column_spec(size, group, num_heads, part_size=size // (num_parts if parameter.dim() > 1 else 1))
    spec = replace(along, full_shape=tuple(parameter.shape), dim=dim)
    setattr(owner, name, shard_parameter(parameter, spec, copies_group(group, spec.copies)))
    if (blocks := blocks_of(group)) is not None:
        _read_in_blocks(owner, name, dim, blocks)


def _read_in_blocks(owner: nn.Module, name: str, dim: int, blocks: Blocks) -> None:
    """Let the forward of `owner` see its blocks of a parameter that is sharded along `dim`."""
    slices = blocks.slices(getattr(owner, name).shard_spec)

    def divided(module: nn.Module, _: tuple[Any, ...]) -> dict[str, Tensor]:
        return {name: split_parameter(module._parameters[name], dim, slices, blocks)}

    alias_parameters(owner, divided)


def shard_weights_of_heads(owner: nn.Module, *, name: str, group: ProcessGroup) -> None:
    """Shard the parameters [heads, head_dim] of child `name`; if there are fewer heads than ranks, they are copied."""
    module = getattr(owner, name)
    for each, parameter in list(module.named_parameters(recurse=False)):
        heads = column_spec(parameter.shape[0], group, num_heads=parameter.shape[0])
        spec = replace(heads, full_shape=tuple(parameter.shape))
        setattr(module, each, shard_parameter(parameter, spec, copies_group(group, heads.copies)))


def read_norms_of_heads(owner: nn.Module, *, name: str, group: ProcessGroup) -> None:
    """Let a rank's heads read their own norms in child `name`, whose forward gives its first head the first of a list.

    Each rank has the norms of all heads, and their gradients are summed over ranks: those of other heads are zero.
    """
    child = getattr(owner, name)
    [(path, norms)] = _module_lists(child)
    [(start, stop, _)] = column_spec(len(norms), group, num_heads=len(norms)).pieces()
    kinds = [kind for kind, _ in norms[0].named_parameters()]

    def own(_: nn.Module, __: tuple[Any, ...]) -> dict[str, Tensor]:
        found = {}
        for kind in kinds:
            values = torch.stack([norm._parameters[kind] for norm in norms])[start:stop]  # [local heads, head_dim]
            found |= {f"{path}.{place}.{kind}": value for place, value in enumerate(values.unbind())}
        return found

    alias_parameters(child, own)


def has_norms_of_heads(module: nn.Module) -> bool:
    """Return whether `module` is a list of norms, one for each head."""
    return bool(_module_lists(module))


def _module_lists(module: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    return [(name, child) for name, child in module.named_children() if isinstance(child, nn.ModuleList)]


def shard_channels(owner: nn.Module, *, name: str, parts: tuple[Part, ...], group: ProcessGroup) -> None:
    """Shard a convolution whose channels are apart from each other, [channels, 1, kernel]."""
    conv = getattr(owner, name)
    for each, parameter in list(conv.named_parameters()):
        spec = ShardSpec(tuple(parameter.shape), 0, parts, dist.get_rank(group), dist.get_world_size(group))
        setattr(conv, each, shard_parameter(parameter, spec))
    conv.groups = conv.in_channels = conv.out_channels = conv.weight.shape[0]


def cast_by_use(owner: nn.Module, name: str) -> None:
    """Let `to(dtype)` of the linear layer change nothing, and the layer compute in the dtype of its input.

    torch's cast would take the parameters from their optimizer. It also reads gradients, which are hidden between the
    micro-batches of a step.
    """
    linear = getattr(owner, name)
    if not isinstance(linear, _CastByUse):
        setattr(owner, name, derive(linear, _CastByUse))


class _CastByUse(nn.Module):
    def to(self, *_: Any, **__: Any) -> nn.Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def share_expert_inputs(experts: nn.Module, group: ProcessGroup) -> None:
    """Make inputs and output of experts tensor-parallel, where every rank holds a part of each expert."""

    _share_inputs(experts, group, first=0)
    reduce_output(experts, group)
    _avoid_unaligned_kernel(experts, num_parts(group))


def share_input_of_normed_experts(experts: nn.Module, group: ProcessGroup) -> None:
    """Make the input of experts tensor-parallel whose `post_expert_norm` reads whole outputs."""
    experts.register_forward_pre_hook(lambda _, args: (collectives.copy_to_region(args[0], group), *args[1:]))
    experts.post_expert_norm.register_forward_pre_hook(
        lambda _, args: collectives.reduce_from_region(args[0].clone(), group)
    )
    _avoid_unaligned_kernel(experts, num_parts(group))


def _avoid_unaligned_kernel(experts: nn.Module, parts: int) -> None:
    """Run experts one by one if local rows, in 16 bit, are no multiples of the grouped matmul's 16 bytes."""
    config = getattr(experts, "config", None)
    stacked = [parameter for parameter in experts.parameters() if parameter.dim() == 3]
    sizes = [size // parts * _ROUNDED_BYTES for parameter in stacked for size in parameter.shape[1:]]
    if config is None or config._experts_implementation == "eager" or all(size % 16 == 0 for size in sizes):
        return
    log_once(
        f"the local part of {type(experts).__name__}",
        "is not aligned to 16 bytes: its experts run one by one; an intermediate size that "
        f"{parts} parts divide into multiples of 16 bytes is faster",
    )
    experts.config = copy.deepcopy(config)
    experts.config._experts_implementation = "eager"


def reduce_shared_experts(module: nn.Module, group: ProcessGroup) -> None:
    """Sum a sharded module's output, and inputs' gradients, unless layers below sum the first's."""
    _share_inputs(module, group, first=0 if any(True for _ in module.parameters(recurse=False)) else 1)
    reduce_output(module, group)


def _share_inputs(module: nn.Module, group: ProcessGroup, first: int) -> None:
    """Sum the gradients of the inputs from index `first` on: ranks read the same values and find partial gradients."""

    def share(x: Any) -> Any:
        return collectives.copy_to_region(x, group) if _is_differentiable(x) else x

    def read(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        shared = tuple(share(x) for x in args[first:])
        return (*args[:first], *shared), {name: share(x) for name, x in kwargs.items()}

    module.register_forward_pre_hook(read, with_kwargs=True)


def reduce_output(module: nn.Module, group: ProcessGroup) -> None:
    """All-reduce the output of `module`, which is a partial sum on each rank."""
    # Clone: the reduction works in place, and the module may have returned a view.
    module.register_forward_hook(lambda _, __, output: collectives.reduce_from_region(output.clone(), group))


def run_on_gathered_features(module: nn.Module, group: ProcessGroup) -> None:
    """Gather the features that a linear layer reads, [..., features], and keep this rank's part of those it returns."""
    read, returned = row_spec(in_features(module), group), column_spec(out_features(module), group)
    module.register_forward_pre_hook(lambda _, args: (collectives.gather_features(args[0], read, group), *args[1:]))
    module.register_forward_hook(lambda _, __, output: collectives.split_features(output, returned, group))


def scale_input(module: nn.Module, group: ProcessGroup) -> None:
    """Divide the input by the number of ranks, because identical outputs are summed over ranks later."""
    size = dist.get_world_size(group)
    module.register_forward_pre_hook(lambda _, args: (args[0] / size, *args[1:]))


def sum_gradient_of_parameter(owner: nn.Module, *, name: str, group: ProcessGroup) -> None:
    """Declare a parameter of `owner` replicated, and used for a rank's own heads only: its gradients are summed."""
    parameter = getattr(owner, name)
    spec = ShardSpec(tuple(parameter.shape), rank=dist.get_rank(group), world_size=dist.get_world_size(group))
    annotate(parameter, spec, group)


def divide_bias_of_partial_sums(owner: nn.Module, *, name: str, group: ProcessGroup) -> None:
    """Let each part add its share of a whole parameter of `owner`, which is added to sums that are partial."""

    def share(module: nn.Module, _: tuple[Any, ...]) -> dict[str, Tensor]:
        return {name: collectives.copy_to_region(module._parameters[name] / num_parts(group), group)}

    alias_parameters(owner, share)


def sum_gradient_of_rotary_part(module: nn.Module, size: int, group: ProcessGroup) -> None:
    """Sum the gradient of the rotary key over ranks in the compressed key/value projection of latent attention.

    In multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) the last features of this projection
    are the rotary key. Every head reads it, so each rank's gradient is partial. The other features go into a
    column-parallel layer, which sums their gradient itself.

    Args:
        size: number of features of the rotary key.
    """

    def split(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        compressed, rotary_key = output.split([output.shape[-1] - size, size], dim=-1)
        return torch.cat([compressed, collectives.copy_to_region(rotary_key, group)], dim=-1)

    split.sees_adapters = True  # an adapter's part of the output has such features too
    module.register_forward_hook(split)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def share_feature_statistics(mlp: nn.Module, group: ProcessGroup) -> None:
    """Take the cut-off of a sparse activation (Gemma 3n) from the features of all ranks.

    It is the quantile of the normal distribution with the mean and the standard deviation of the features, which
    Gemma3nTextMLP takes over the last dim of its input, [batch, seq, features].
    """
    features = out_features(mlp.gate_proj)
    pieces = [Part(features).piece(index, num_parts(group)) for index in range(num_parts(group))]
    shares = [(stop - start) / features for start, stop, _ in pieces]
    quantile = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(mlp.activation_sparsity, device="cpu"))

    def gaussian_topk(inputs: Tensor) -> Tensor:
        mean, std = mean_and_deviation(inputs, shares, group)
        return nn.functional.relu(inputs - collectives.copy_to_region(mean + std * quantile.type(inputs.dtype), group))

    mlp._gaussian_topk = gaussian_topk


def mean_and_deviation(x: Tensor, shares: Sequence[float], group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation over the last dim of all ranks, each [..., 1], from those of each.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).

    Args:
        x: [..., features of this rank].
        shares: the part of the features that each rank, or each block, has.
    """
    own = torch.cat(torch.std_mean(x, dim=-1, keepdim=True, correction=0), dim=-1)
    gathered = collectives.gather_from_region(own, x.dim() - 1, group)
    deviations, means = gathered.unflatten(-1, (len(shares), 2)).unbind(-1)  # [..., ranks]
    weights = means.new_tensor(shares)
    mean = (means * weights).sum(-1, keepdim=True)
    # The norm, not the root of a sum: its gradient is finite where all features are equal, as that of `torch.std`.
    spread = torch.cat([deviations, means - mean], dim=-1) * weights.sqrt().repeat(2)
    return mean, torch.linalg.vector_norm(spread, dim=-1, keepdim=True)


def use_local_biases(attention: nn.Module, heads: int, group: ProcessGroup) -> None:
    """Make `attention` use only this rank's heads of inputs given for all heads: ALiBi, and masks with added biases.

    Args:
        heads: number of heads of the full model. They are a dim of [heads or batch * heads, 1, seq] or
            [batch, heads, seq or 1, seq].
    """
    local_heads = heads // dist.get_world_size(group)
    first = dist.get_rank(group) * local_heads

    def local(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 3 and value.shape[0] % heads == 0:
            return value.unflatten(0, (-1, heads))[:, first : first + local_heads].flatten(0, 1)
        if value.dim() == 4 and value.shape[1] == heads:
            return value[:, first : first + local_heads]
        return value

    def take(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {name: local(value) if name in _BIASES else value for name, value in kwargs.items()}

    attention.register_forward_pre_hook(take, with_kwargs=True)


def drop_behind_activation(layer: nn.Module, rank: int) -> None:
    """Move the functional dropout after a layer's activation into the activation, as a `ParallelDropout`.

    The dropout is between two sharded linear layers, so each rank must draw its own mask for its own features.
    """
    probability, layer.activation_dropout = layer.activation_dropout, 0.0
    if probability:
        layer.activation_fn = nn.Sequential(layer.activation_fn, ParallelDropout(probability, rank))
