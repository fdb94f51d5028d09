"""UserGroups: the parameter groups of the user's optimizer, which hold what this rank updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.bucket_layout import HoldsPieces
from plugins.hybrid_parallel.zero.whole_parameters import OwnedParameter, WholeParameters


class UserGroups:
    """Re-points parameter groups, emptied in place, at pieces of parameters and at whole ones that this rank owns.

    Args:
        groups: the parameter groups of the user's optimizer.
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

    def add(self, buckets: Iterable[HoldsPieces], owned: Iterable[OwnedParameter]) -> None:
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
        """Refuse parameters that were added to a group after `boost`: they would have no gradients here.

        Raises:
            ConfigurationError: if there is one.
        """
        if any(param not in self._held for group in self._groups for param in group["params"]):
            raise ConfigurationError(
                "optimizer.param_groups holds a parameter that was added after boost(); add it to the optimizer "
                "before, frozen by requires_grad=False until it is to be trained"
            )
