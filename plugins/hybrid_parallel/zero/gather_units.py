"""Which parameters are gathered together under ZeRO stage 3: those of a layer; others with the module that has them.

Of quantised weights the packed values and the scales of blocks are sharded, as bytes that each rank has a range of.
Small parameters stay whole: a collective would cost more than their memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from plugins.hybrid_parallel.zero.sharded_parameters import ShardedParameters
from shardformer.quantised import QuantisedWeight, packed_layers

# Parameters with fewer values, and vectors, stay whole.
_LEAST = 512


def is_sharded(param: nn.Parameter) -> bool:
    """Return whether ranks keep only a shard of a parameter under stage 3."""
    is_plain = type(param.data) is Tensor and param.is_floating_point()
    return is_plain and param.dim() >= 2 and param.numel() >= _LEAST


@dataclass(eq=False)
class GatherUnit:
    """Parameters that are gathered together.

    Attributes:
        number: position in the model, the same on all replicas.
        members: their memory.
        next, next_back: the units that a forward and a backward pass used after this one the last time.
    """

    number: int
    members: list[ShardedParameters] = field(default_factory=list)
    next: GatherUnit | None = None
    next_back: GatherUnit | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> GatherUnit:
        """Return a unit without members: copies of a model have whole parameters."""
        return GatherUnit(self.number)

    def start(self) -> None:
        """Start to gather the values."""
        for member in self.members:
            member.start()

    def read_ahead(self) -> None:
        """Start to bring this rank's shards near, if they are offloaded."""
        for member in self.members:
            member.read_ahead()

    def gather(self) -> None:
        """Gather the values."""
        self.start()
        for member in self.members:
            member.gather()

    def release(self) -> None:
        """Give the memory of the values back."""
        for member in self.members:
            member.release()


class GatherUnits:
    """The units of a model's parameters.

    Attributes:
        of_parameter: parameter, or packed values of one, -> its unit.
        of_module: module -> the units that its forward pass needs.
    """

    def __init__(self) -> None:
        self.of_parameter: dict[Tensor, GatherUnit] = {}
        self.of_module: dict[nn.Module, dict[GatherUnit, None]] = {}
        self._of_owner: dict[nn.Module, GatherUnit] = {}
        self._packed: dict[Tensor, tuple[nn.Module, QuantisedWeight]] = {}

    def add(self, model: nn.Module) -> None:
        """Add the parameters of a model, or of one of its stages: one unit for each element of its lists of layers.

        The model itself gets no hooks, which could change its loss: its own parameters are gathered when they are read.
        """
        quantised = dict(packed_layers(model))
        for module, owner in owners_of(model):
            tensors: list[Tensor] = [each for each in module._parameters.values() if each is not None]
            tensors = [param for param in tensors if is_sharded(param)]
            if module in quantised:
                packed = [each for each in quantised[module].packed(module) if each.numel() >= _LEAST]
                self._packed |= dict.fromkeys(packed, (module, quantised[module]))
                tensors += packed
            for tensor in tensors:
                if tensor not in self.of_parameter:
                    unit = self._of_owner.setdefault(owner, GatherUnit(len(self._of_owner)))
                    self.of_parameter[tensor] = unit
                if owner is not model:
                    self.of_module.setdefault(owner, {})[self.of_parameter[tensor]] = None

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Let quantised layers follow their packed values to other memory."""
        for tensor in tensors:
            if tensor in self._packed:
                module, kind = self._packed[tensor]
                kind.follow(module)


def owners_of(module: nn.Module, layer: nn.Module | None = None) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each module and the module whose forward pass uses its parameters: its layer, or itself."""
    yield module, layer or module
    for child in module.children():
        yield from owners_of(child, child if layer is None and isinstance(module, nn.ModuleList) else layer)
