"""From a user's optimizer to buckets: grouping of its parameters, and what is refused before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy

from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import BucketOptions, Source
from plugins.hybrid_parallel.zero.stage3 import ParameterGathers
from shardformer.peft import adapter_configs
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
        groups: the local parameters of the optimizer's parameter groups.
        options: axis over which parameters are sharded -> the options of their buckets.
        tied: the parameters that other stages hold too.
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
        groups: the frozen parameters of each parameter group.
        build_buckets: builds buckets from parameters by group.
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


def check_tied(tied: Mapping[nn.Parameter, TiedParameter], model: nn.Module) -> None:
    """Check that all stages agree on whether a tied parameter is frozen: its name differs from stage to stage.

    Raises:
        ConfigurationError: if a parameter is frozen on only some of its stages; raised on all of them.
    """
    for param, tie in sorted(tied.items(), key=lambda item: item[1].order):
        flags = torch.tensor([int(param.requires_grad), int(not param.requires_grad)])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=tie.group)
        if flags.tolist() == [1, 1]:
            name = next(name for name, other in model.named_parameters() if other is param)
            raise ConfigurationError(
                f"{name} is one weight on several pipeline stages, and only some of them have frozen it; set "
                "requires_grad by every name that the tied weight has"
            )


def check_gradients(model: nn.Module) -> None:
    """Refuse gradients from before `boost`: they belong to batches that every rank has seen, or to unknown ones."""
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise ConfigurationError(
                f"{name} has a gradient from before boost(); call model.zero_grad() before boost(), or run the "
                "backward pass after it"
            )


def check_shared_parameters(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, Sequence[str]]) -> None:
    """Refuse a parameter that two optimizers update; `names`: id of each model parameter -> its names."""
    seen: set[int] = set()
    for optim in optimizers:
        held = {id(param) for group in optim.param_groups for param in group["params"]}
        if both := seen & held:
            name = min(names[each][0] for each in both)
            raise ConfigurationError(f"two optimizers hold {name}; give each parameter to one of them")
        seen |= held


def check_memory(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Refuse tensors that lie in the memory of a parameter that an optimizer updates, and are not this parameter.

    Plain updates reach both. `boost` gives each memory of its own, and two parameters in one memory have gradients and
    optimizer states of their own, so that tying them would not be the same either.
    """
    held = {id(param) for optim in optimizers for group in optim.param_groups for param in group["params"]}
    in_storage: dict[UntypedStorage, list[tuple[str, Tensor]]] = {}  # by address, all meta tensors would be in one
    for name, tensor in _tensors_of(model):
        in_storage.setdefault(tensor.untyped_storage(), []).append((name, tensor))
    for tensors in in_storage.values():
        tensors.sort(key=lambda item: _span(item[1])[0])
        for index, (name, tensor) in enumerate(tensors):
            for other_name, other in tensors[index + 1 :]:
                if _span(other)[0] >= _span(tensor)[1]:
                    break
                if not held.isdisjoint((id(tensor), id(other))) and _overlap(tensor, other):
                    raise ConfigurationError(
                        f"{name} and {other_name} are two tensors in one memory, and boost() gives each its own, so "
                        f"that updates of one would no longer reach the other; {_way_out(tensor, other, model)}"
                    )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters and buffers, and the tensors that are attributes of its modules, once each."""
    attributes = (
        (f"{path}.{name}".lstrip("."), value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        # The old weight norm and spectral norm compute the attribute from its parameter in each forward.
        if isinstance(value, Tensor) and f"{name}_orig" not in module._parameters
    )
    seen: set[int] = set()
    for name, tensor in chain(model.named_parameters(), model.named_buffers(), attributes):
        if id(tensor) not in seen and tensor.layout == torch.strided and not is_lazy(tensor) and tensor.numel():
            seen.add(id(tensor))
            yield name, tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage between which a tensor lies."""
    begin = tensor.storage_offset()
    end = begin + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, end * tensor.itemsize


def _place(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _overlap(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common; columns of one matrix have none."""
    if _place(tensor) == _place(other) or tensor.dtype != other.dtype:
        return True
    end = max(_span(tensor)[1], _span(other)[1]) // tensor.itemsize
    taken = torch.zeros(end, dtype=torch.bool, device="cpu")
    taken.as_strided(*_place(tensor)).fill_(True)
    return bool(taken.as_strided(*_place(other)).any())


def _way_out(tensor: Tensor, other: Tensor, model: nn.Module) -> str:
    if _place(tensor) == _place(other):
        return "assign one nn.Parameter to both names, or clone one of them"
    advice = "compute one from the other in the forward pass, or clone one of them"
    return f"use ensure_weight_tying=False, or {advice}" if adapter_configs(model) else advice


def warn_of_untrained(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Warn about named parameters that require gradients but are in no optimizer: norms do not include them."""
    held = {id(param) for optim in optimizers for group in optim.param_groups for param in group["params"]}
    untrained = [name for name, param in parameters if param.requires_grad and id(param) not in held]
    if untrained and optimizers and dist.get_rank() == 0:
        _logger.warning(
            "%s%s takes gradients and is in no optimizer: max_norm and clip_grad_norm_ do not count them, as torch's "
            "clip_grad_norm_(model.parameters()) would; set requires_grad=False, or give it to an optimizer",
            untrained[0],
            f" (one of {len(untrained)})" if len(untrained) > 1 else "",
        )


def check_optimizer(optim: torch.optim.Optimizer, names: Mapping[int, Sequence[str]]) -> None:
    """Refuse an optimizer that holds parameters of another model; `names`: id of each model parameter -> its names."""
    for group in optim.param_groups:
        if any(id(param) not in names for param in group["params"]):
            raise ConfigurationError(
                f"{type(optim).__name__} holds a parameter that is not in the model given to boost(); "
                "make the optimizer from this model's parameters()"
            )
