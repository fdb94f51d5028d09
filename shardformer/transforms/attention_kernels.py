"""Kernels and returned scores of a sharded model's attentions, and sequence-parallel regions around its layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.attention import route_own_attention, use_backend, use_sharded_attention
from shardformer.context_parallel.attention import use_context_attention
from shardformer.distributed import sequence_parallel
from shardformer.distributed.blocks import joined_blocks, rank_of_draws
from shardformer.distributed.collectives import gather_from_region
from shardformer.distributed.sequence_parallel import BlockedSequence, SequenceParallel, UlyssesAllToAll
from shardformer.policies.base import Policy
from shardformer.shard_config import ShardConfig
from shardformer.stages.placeholders import LayerInputs
from shardformer.utils.module_paths import by_layer
from shardformer.utils.untraced import call_through

_FIELDS = "attentions"  # attentions, cross_attentions, encoder_attentions, ...


def return_whole_scores(model: nn.Module, head_counts: Collection[int], group: ProcessGroup) -> None:
    """Let `model` return the scores of all heads if asked; `head_counts`: of the whole model's attentions."""
    counts = frozenset(head_counts)

    def gather(_: nn.Module, __: tuple, outputs: Any) -> Any:
        return whole_scores(outputs, counts, group)

    for module in _returning(model):
        module.register_forward_hook(gather)


def _returning(model: nn.Module) -> list[nn.Module]:
    """Return the modules that return scores: both halves of an encoder-decoder, since `generate` calls one alone."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return [model]
    halves = [getattr(model, f"get_{half}", lambda: None)() for half in ("encoder", "decoder")]
    is_known = all(isinstance(half, nn.Module) and half is not model for half in halves) and halves[0] is not halves[1]
    return halves if is_known else [model]


def whole_scores(outputs: Any, head_counts: Collection[int], group: ProcessGroup) -> Any:
    """Gather the scores of all heads in `outputs`, in place; ValueError if shards do not add up to them."""
    if not isinstance(outputs, Mapping):
        return outputs
    for name, value in outputs.items():
        if name.endswith(_FIELDS):
            outputs[name] = _ScoreGather(name, head_counts, group).of(value)
        elif isinstance(value, Mapping):  # outputs of a tower
            whole_scores(value, head_counts, group)
    return outputs


class _ScoreGather:
    """Gathers the scores of one field: tensors [batch, heads, queries, keys] in tuples."""

    def __init__(self, name: str, head_counts: Collection[int], group: ProcessGroup) -> None:
        self.name, self.head_counts, self.group = name, head_counts, group

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._whole(value)
        return type(value)(map(self.of, value)) if isinstance(value, tuple | list) else value

    def _whole(self, scores: Tensor) -> Tensor:
        scores = joined_blocks(scores, 1) if scores.dim() == 4 else scores
        heads = scores.shape[1] if scores.dim() == 4 else 0
        parts = torch.zeros(dist.get_world_size(self.group), dtype=torch.int64, device=scores.device)
        parts[dist.get_rank(self.group)] = heads
        dist.all_reduce(parts, group=self.group)
        parts = parts.tolist()
        if sum(parts) in self.head_counts:
            most = max(parts)
            padded = F.pad(scores, (0, 0, 0, 0, 0, most - heads))
            held = [rank * most + head for rank, count in enumerate(parts) for head in range(count)]
            whole = gather_from_region(padded, 1, self.group)
            return whole if len(held) == whole.shape[1] else whole[:, held]
        if set(parts) <= set(self.head_counts):  # all ranks run all heads
            return scores
        raise ValueError(
            f"{self.name} has {parts} heads on the ranks that share a layer, which do not make up "
            f"{sorted(self.head_counts)}; use output_attentions=False, or tp_size=1"
        )


def route_attention(
    model: nn.Module,
    policy: Policy,
    config: ShardConfig,
    held_layers: Callable[[], list[list[nn.Module]]],
    exchanged: SequenceParallel | None,
    device: torch.device,
) -> None:
    """Route the attentions of `model` through the kernel that the options ask for.

    Args:
        held_layers: returns the layers of this rank, by lists of consecutive ones.
        exchanged: the parts of sequences that attention in these layers exchanges for heads; None if it does not.
    """
    shares_inputs = config.context is not None and exchanged is None
    if exchanged is not None or (config.enable_flash_attention and config.context is None):
        route_own_attention(model, policy.own_attention)
    if config.enable_flash_attention:
        dtype = config.compute_dtype or next(model.parameters(), torch.empty(0)).dtype
        use_backend(model, config.enable_flash_attention, device, dtype, not config.inference_only)
    layers = [layer for held in held_layers() for layer in held] if shares_inputs or exchanged is not None else []
    if shares_inputs:
        use_context_attention(model, layers, config.context_parallel_mode, config.context)
    exchange = None if exchanged is None else UlyssesAllToAll(exchanged)
    if config.tensor_parallel_size > 1 and policy.cuts_attention:
        use_sharded_attention(model, rank_of_draws(config.group), exchange, layers)
        return_whole_scores(model, policy.head_counts().values(), config.group)
    elif config.enable_flash_attention or exchange is not None:
        use_sharded_attention(model, None, exchange, layers)


def divide_layers(
    model: nn.Module, lists: Iterable[list[nn.Module]], region: SequenceParallel, by_exchange: bool
) -> None:
    """Let layers see parts of sequences, which are whole before and after each list of layers.

    Args:
        by_exchange: whether attention exchanges parts for heads, so that layers read the positions of their parts.
    """
    for layers in filter(None, lists):
        if getattr(layers[0], "sees_whole_sequences", False):
            continue
        sequence_parallel.wrap_layers(layers, region)
        for layer in layers:
            sequence_parallel.slice_other_tokens(layer, region)
        for layer in layers if by_exchange else ():
            sequence_parallel.slice_positions(layer, region)
        sequence_parallel.count_whole_sequences(model, layers if by_exchange else (), region.positions_of_part)
        if isinstance(region, BlockedSequence):
            sequence_parallel.use_parameters_by_block(layers, region)
    if isinstance(region, BlockedSequence) and not region.is_cut:
        sequence_parallel.return_whole_states(model, region)


def leave_between_layers(
    runner: nn.Module,
    names: Collection[str],
    layers: Iterable[nn.Module],
    held: Iterable[list[nn.Module]],
    region: SequenceParallel,
) -> None:
    """Let sequences be whole where `runner`, the module around the layers, adds features of a layer to their states.

    Args:
        names: inputs of `runner` with features for some layers; it adds them in front of a layer or behind it.
        region: the parts of sequences that layers have.
    """
    inputs, gaps = LayerInputs(runner), _Gaps(region)
    numbers = {layer: number for number, layer in enumerate(layers)}

    def begin(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        gaps.begin({number for name in names for number in by_layer(inputs.get(name, args, kwargs))})

    runner.register_forward_pre_hook(begin, with_kwargs=True)
    for chain in held:
        for layer in chain:
            # Outside of hooks, which run again where layers are recomputed, then perhaps after another pass has begun.
            call_through(
                layer, gaps.around(numbers[layer], enters=layer is not chain[0], leaves=layer is not chain[-1])
            )


class _Gaps:
    """Places between the layers of a region where sequences are whole in the pass that runs."""

    def __init__(self, region: SequenceParallel) -> None:
        self.region, self.is_whole = region, False
        self.numbers: Collection[int] = ()

    def begin(self, numbers: Collection[int]) -> None:
        """Begin a pass with features for the layers of these numbers."""
        self.numbers, self.is_whole = numbers, False

    def around(self, number: int, enters: bool, leaves: bool) -> Callable[..., Any]:
        """Return the outer call of a layer; the region itself is entered at its first and left at its last layer."""

        def outer(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            if enters and self.is_whole:
                args, kwargs = sequence_parallel.first_input(args, kwargs, self.region.enter)
                self.is_whole = False
            output = call(*args, **kwargs)
            if leaves and not {number, number + 1}.isdisjoint(self.numbers):
                output = sequence_parallel.first_output(output, self.region.leave)
                self.is_whole = True
            return output

        return outer
