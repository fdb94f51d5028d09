"""From a user's optimizer to buckets: grouping of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.distributed import ProcessGroup

from booster.logging import get_logger
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import BucketOptions, Source
from plugins.hybrid_parallel.zero.stage3 import ParameterGathers
from shardformer.shard_spec import grad_group_of, spec_of
from shardformer.utils.freed_memory import return_freed_memory

_logger = get_logger(__name__)
Sized = TypeVar("Sized")  # a parameter, or a description of one, with `numel`


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several pipeline stages hold."""

    order: int  # position among the tied parameters, the same on all ranks
    group: ProcessGroup  # the stages' ranks, over which its gradient is summed
    counted: bool  # whether the global norm counts this rank's copy


def build_buckets(
    groups: Sequence[Sequence[nn.Parameter]],
    options: Mapping[str, BucketOptions],
    tied: Mapping[nn.Parameter, TiedParameter],
    initial: dict[nn.Parameter, Source],
    gathers: ParameterGathers | None = None,
    bucket_type: type[Bucket] = Bucket,
) -> list[Bucket]:
    """Sort the parameters of each group into buckets, in the order in which a backward pass completes these.

    Args:
        options: axis over which parameters are sharded -> the options of their buckets.
        initial: sources of the full-precision values of parameters that were cast to a lower precision or have no
            values; used ones are removed.
        gathers: takes over the parameters that ranks shard (ZeRO stage 3); None if they shard none.
    """
    buckets = []
    units = {} if gathers is None else gathers.units.of_parameter
    for group_index, params in enumerate(groups):
        kinds: dict[tuple, list[nn.Parameter]] = {}
        # The backward pass reaches the last parameters first: their bucket is reduced while it continues.
        arrival = {param: place for place, param in enumerate(reversed(params))}
        for param in arrival:
            tie = tied.get(param)
            order = -1 if tie is None else tie.order
            unit = units.get(param)  # also if nothing is sharded: sums over buckets then have the same bits
            key = (order, param.dtype, grad_group_of(param), spec_of(param).is_owner, spec_of(param).axis, unit)
            kinds.setdefault(key, []).append(param)
        chunks = [
            (key, chunk) for key, members in kinds.items() for chunk in chunks_of(members, options[key[4]].bucket_bytes)
        ]
        # Tied buckets come last and in one order: stages wait for each other there, and never in the middle. A bucket
        # that is complete late, such as that of small parameters of all layers, would hold up those behind it.
        for key, chunk in sorted(chunks, key=lambda item: (item[0][0], max(arrival[param] for param in item[1]))):
            order, _, grad_group, is_owner, axis, unit = key
            tie = tied[chunk[0]] if order >= 0 else None
            tied_group = tie.group if tie else None
            copies = options[axis].copy_group
            sum_groups = [group for group in (copies, grad_group, tied_group) if group is not None]
            counted = is_owner and options[axis].counts and (tie is None or tie.counted)
            is_sharded = unit is not None and options[axis].shards_parameters
            about = (group_index, sum_groups, counted, initial, tied_group, is_sharded)
            bucket = bucket_type(chunk, options[axis], *about)
            buckets.append(bucket)
            if bucket.sharded is not None:
                gathers.own(bucket.params, bucket.sharded)
            return_freed_memory()  # of the parameters that are now in the bucket
    return sorted(buckets, key=lambda bucket: any(param in tied for param in bucket.params))


def chunks_of(params: Sequence[Sized], limit: int) -> Iterator[list[Sized]]:
    """Yield runs of neighbouring parameters with up to `limit` bytes of fp32 gradients."""
    chunk: list[Sized] = []
    size = 0
    for param in params:
        if chunk and size + param.numel() * 4 > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(param)
        size += param.numel() * 4
    if chunk:
        yield chunk


class FrozenParameters:
    """Parameters of an optimizer that required no gradients when the model was boosted.

    Args:
        states: existing optimizer states of some of the parameters; removed from here when they are placed.
        gathers: what has sharded the parameters (ZeRO stage 3); None if they are whole.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        build_buckets: Callable[[Sequence[Sequence[nn.Parameter]]], list[Bucket]],
        states: dict[nn.Parameter, dict[str, Any]],
        gathers: ParameterGathers | None = None,
    ) -> None:
        self.groups, self.states = [list(group) for group in groups], states
        self._build_buckets, self._gathers = build_buckets, gathers

    def unfreeze(self, also: Collection[nn.Parameter] = ()) -> list[Bucket]:
        """Build buckets for the parameters that require gradients by now, and for those in `also`."""
        chosen = [[param for param in group if param.requires_grad or param in also] for group in self.groups]
        if not any(chosen):
            return []
        thawed = {param for group in chosen for param in group}
        if self._gathers is not None:
            self._gathers.dissolve(thawed)
        self.groups = [[param for param in group if param not in thawed] for group in self.groups]
        return self._build_buckets(chosen)
