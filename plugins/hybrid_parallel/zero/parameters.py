"""From a user's optimizer to buckets: which parameters belong together, and what becomes of the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.bucket import Bucket, BucketOptions
from shardformer.shard_spec import grad_group_of, spec_of

# These update each element by itself, so that a parameter may be cut anywhere.
ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
)

Sized = TypeVar("Sized", bound="HasElements")


class HasElements(Protocol):
    """A parameter, or what is known of one."""

    def numel(self) -> int: ...


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several pipeline stages hold.

    Attributes:
        order: position among the tied parameters, the same on all ranks.
        group: the stages' ranks, over which its gradient is summed.
        counted: whether this rank's copy is the one that the global norm counts.
    """

    order: int
    group: ProcessGroup
    counted: bool


def is_elementwise(optim: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's class, or one that it derives from, updates each element by itself."""
    return any(cls.__name__ in ELEMENTWISE and cls.__module__.startswith("torch.optim") for cls in type(optim).__mro__)


def build_buckets(
    groups: Sequence[Sequence[nn.Parameter]],
    options: Mapping[str, BucketOptions],
    tied: Mapping[nn.Parameter, TiedParameter],
    masters: dict[nn.Parameter, Tensor],
) -> list[Bucket]:
    """Sort the parameters of each group into buckets, last parameter first.

    Args:
        groups: the local parameters of the optimizer's parameter groups.
        options: what all buckets share of which the parameters are cut over an axis, or would be; by its name.
        tied: the parameters that other stages hold too.
        masters: full-precision values of parameters that were cast down.
    """
    buckets = []
    for group_index, params in enumerate(groups):
        kinds: dict[tuple, list[nn.Parameter]] = {}
        # The backward pass reaches the last parameters first: their bucket is reduced while it goes on.
        for param in reversed([param for param in params if param.requires_grad]):
            tie = tied.get(param)
            order = -1 if tie is None else tie.order
            key = (order, param.dtype, grad_group_of(param), spec_of(param).is_owner, spec_of(param).axis)
            kinds.setdefault(key, []).append(param)
        # Tied buckets last and in one order: two stages wait for each other there, never in the middle.
        for (order, _, grad_group, is_owner, axis), members in sorted(kinds.items(), key=lambda item: item[0][0]):
            tie = tied[members[0]] if order >= 0 else None
            tied_group = tie.group if tie else None
            sum_groups = [group for group in (grad_group, tied_group) if group is not None]
            counted = is_owner and options[axis].counts and (tie is None or tie.counted)
            for chunk in chunks_of(members, options[axis].bucket_bytes):
                buckets.append(Bucket(chunk, options[axis], group_index, sum_groups, counted, masters, tied_group))
    return sorted(buckets, key=lambda bucket: any(param in tied for param in bucket.params))


def chunks_of(params: Sequence[Sized], limit: int) -> Iterator[list[Sized]]:
    """Neighbouring parameters up to `limit` bytes of fp32 gradients."""
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


def carry_state(
    optim: torch.optim.Optimizer, old: Mapping[nn.Parameter, nn.Parameter], buckets: Sequence[Bucket]
) -> None:
    """Move the state that the optimizer already has to the pieces of its parameters (Adagrad starts with some).

    Args:
        old: local parameter -> the parameter that the optimizer was made with.
        buckets: the buckets of the optimizer.
    """
    before = dict(optim.state)
    optim.state.clear()
    for bucket in buckets:
        for piece in bucket.pieces:
            param = bucket.params[piece.index]
            state = before.get(old[param])
            if not state:
                continue
            spec = spec_of(param)

            def cut(value: Any) -> Any:
                if not isinstance(value, Tensor) or tuple(value.shape) != spec.full_shape:  # noqa: B023
                    return value
                local = spec.shard(value).reshape(-1)[piece.start : piece.stop]  # noqa: B023
                return local.to(piece.parameter.device).view_as(piece.parameter)  # noqa: B023

            optim.state[piece.parameter] = {key: cut(value) for key, value in state.items()}


def check_optimizer(
    optim: torch.optim.Optimizer, names: Mapping[int, Sequence[str]], tp_size: int, ep_size: int = 1
) -> None:
    """Refuse an optimizer that cannot work on this layout.

    Args:
        names: id of each of the model's parameters -> its names.

    Raises:
        ConfigurationError: it holds parameters that are not the model's, or needs whole parameters under tp or ep.
    """
    for group in optim.param_groups:
        if any(id(param) not in names for param in group["params"]):
            raise ConfigurationError(
                f"{type(optim).__name__} holds a parameter that is not in the model given to boost(); "
                "make the optimizer from this model's parameters()"
            )
    if type(optim).__name__ == "LBFGS":
        raise ConfigurationError("LBFGS needs a closure that runs the model again; use an optimizer such as AdamW")
    for name, size in (("tp_size", tp_size), ("ep_size", ep_size)):
        if size > 1 and type(optim).__name__ in ("Adafactor", "Muon"):
            raise ConfigurationError(
                f"{type(optim).__name__} reads whole parameters, which {name}={size} cuts; use {name}=1 or AdamW"
            )
