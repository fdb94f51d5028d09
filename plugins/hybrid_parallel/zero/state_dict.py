"""State dicts and parameter groups of a boosted optimizer, which hold a rank's pieces or whole states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.whole_parameters import OwnedParameter, WholeParameters
from shardformer.shard_spec import spec_of


def take_states(
    optim: torch.optim.Optimizer, old: Mapping[nn.Parameter, nn.Parameter]
) -> dict[nn.Parameter, dict[str, Any]]:
    """Remove the states from an optimizer that has stepped, or starts with some (Adagrad), and return them.

    Args:
        old: local parameter -> the parameter that the optimizer was created with.

    Returns:
        The states by local parameter.
    """
    states = {local: state for local, param in old.items() if (state := optim.state.get(param))}
    optim.state.clear()
    return states


def place_states(
    optim: torch.optim.Optimizer, states: dict[nn.Parameter, dict[str, Any]], buckets: Sequence[Bucket | OwnedParameter]
) -> None:
    """Give pieces their parameter's state; `states`: whole, by local parameter, popped; `buckets`: of the pieces."""
    for bucket in buckets:
        group = optim.param_groups[bucket.group_index]
        for piece in bucket.pieces:
            state, spec = states.get(bucket.params[piece.index]), spec_of(bucket.params[piece.index])
            if not state:
                continue

            def cut(key: str, value: Any) -> Any:
                if not isinstance(value, Tensor):
                    return value
                if tuple(value.shape) != spec.full_shape:  # noqa: B023
                    return on_state_device(key, value, group, piece.parameter)  # noqa: B023
                local = spec.shard(value).reshape(-1)[piece.start : piece.stop]  # noqa: B023
                return local.to(piece.parameter.device).view_as(piece.parameter)  # noqa: B023

            optim.state[piece.parameter] = {key: cut(key, value) for key, value in state.items()}
        for param in bucket.params:
            states.pop(param, None)


def on_state_device(key: str, value: Tensor, group: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """Return a state on the device where the optimizer expects it, by the rule of `Optimizer.load_state_dict`.

    States are on the parameter's device, except the number of steps: the kernels of fused and capturable optimizers
    read it on the device, all others read it on the host.
    """
    if key != "step":
        return value.to(parameter.device)
    if group.get("fused") or group.get("capturable"):
        return value.to(parameter.device, torch.float32)
    return value


_PIECES = "pieces"  # marks a state dict of pieces, and describes them


def state_dict_of_pieces(optim: torch.optim.Optimizer, buckets: Sequence[Bucket | OwnedParameter]) -> dict[str, Any]:
    """Return the state dict of an optimizer over pieces, with a description of the pieces."""
    return {**optim.state_dict(), _PIECES: _describe(buckets)}


def load_state_dict(
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    buckets: Sequence[Bucket | OwnedParameter],
    order: Sequence[Sequence[nn.Parameter | None]],
    wholes: WholeParameters,
) -> dict[nn.Parameter, dict[str, Any]]:
    """Load a state dict of the same pieces, or of the optimizer before `boost`.

    Args:
        order: the local parameters as the optimizer held them before, by group; None for parameters of other stages.

    Returns:
        The states of parameters that have no bucket.

    Raises:
        ConfigurationError: if the state dict is for another rank's pieces or for other groups.
    """
    if _PIECES in state_dict:
        if state_dict[_PIECES] != _describe(buckets):
            raise ConfigurationError(
                "optimizer.load_state_dict() got the state of another rank or layout; save and load by "
                "booster.save_optimizer(optimizer, directory) and booster.load_optimizer"
            )
        optim.load_state_dict({key: value for key, value in state_dict.items() if key != _PIECES})
        return {}
    saved = state_dict["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group) for group in order]:
        raise ConfigurationError(
            f"optimizer.load_state_dict() got groups of {[len(group['params']) for group in saved]} parameters, the "
            f"optimizer has {[len(group) for group in order]}; make it with the same groups"
        )
    states = {
        param: dict(state_dict["state"][index])
        for group, params in zip(saved, order, strict=True)
        for index, param in zip(group["params"], params, strict=True)
        if param is not None and index in state_dict["state"]
    }
    for group, theirs in zip(optim.param_groups, saved, strict=True):
        group.update({key: value for key, value in theirs.items() if key != "params"})
    optim.state.clear()
    wholes.take_states(states)
    place_states(optim, states, buckets)
    return states


def _describe(buckets: Sequence[Bucket | OwnedParameter]) -> list[list[int]]:
    return [
        [bucket.group_index, piece.index, piece.start, piece.stop, *bucket.params[piece.index].shape]
        for bucket in buckets
        for piece in bucket.pieces
    ]


class UserGroups:
    """Re-points parameter groups, emptied in place, at pieces of parameters and at whole ones that this rank owns.

    Args:
        order: the local parameters as the groups held them before; None for parameters of other stages.
        wholes: the parameters whose pieces are not for the optimizer.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        order: Sequence[Sequence[nn.Parameter | None]],
        wholes: WholeParameters,
    ) -> None:
        self._groups, self._wholes = groups, wholes
        self._places = {param: place for group in order for place, param in enumerate(group) if param is not None}
        self._held: dict[nn.Parameter, int] = {}
        for group in groups:
            group["params"].clear()  # in place: an optimizer may keep the list (LBFGS)

    def add(self, buckets: Iterable[Bucket | OwnedParameter], owned: Iterable[OwnedParameter]) -> None:
        """Add what this rank updates, in the order of the user's parameters."""
        for each in owned:
            self._add(each.group_index, {each.params[0]: self._places[each.local]})
        for bucket in buckets:
            pieces = [(piece.parameter, bucket.params[piece.index]) for piece in bucket.pieces]
            self._add(
                bucket.group_index, {piece: self._places[param] for piece, param in pieces if param not in self._wholes}
            )
        for group in self._groups:
            group["params"].sort(key=self._held.__getitem__)

    def _add(self, index: int, places: dict[nn.Parameter, int]) -> None:
        self._held |= places
        self._groups[index]["params"] += places

    def refuse_strangers(self) -> None:
        """Refuse parameters that were added to a group after `boost`: they would have no gradients here."""
        if not all(all(map(self._held.__contains__, group["params"])) for group in self._groups):
            raise ConfigurationError(
                "optimizer.param_groups holds a parameter that was added after boost(); add it to the optimizer "
                "before, frozen by requires_grad=False until it is to be trained"
            )
