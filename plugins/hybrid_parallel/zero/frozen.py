"""Frozen parameters: they use no optimizer memory until they are unfrozen, and stages must agree on tied ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.gathers import ParameterGathers
from plugins.hybrid_parallel.zero.grouping import TiedParameter


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
