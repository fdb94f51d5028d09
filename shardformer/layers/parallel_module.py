"""ParallelModule: a layer that holds one rank's share of a native layer's weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup


class ParallelModule(nn.Module, ABC):
    """Base class of the layers that replace native ones. Parameters are local tensors that carry a `ShardSpec`.

    Attributes:
        needs_axis: whether the replacement only makes sense where a tensor-parallel axis has several ranks.
        shards_layer: whether it cuts weights of a layer, which stay whole where ranks exchange heads.
        can_stay_whole: whether the native layer can stay, whole on every rank, in the place of the replacement.
    """

    needs_axis = True
    shards_layer = False
    can_stay_whole = False

    @staticmethod
    @abstractmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup, **kwargs: Any) -> ParallelModule:
        """Build the local share of `module` for this rank of `process_group`.

        Args:
            module: the native layer, whole, on this rank.
            process_group: the tensor-parallel group.
            kwargs: options of the layer class.

        Raises:
            TypeError: `module` is not of a kind that this class can share out.
        """

    @staticmethod
    def keep_whole(module: nn.Module, process_group: ProcessGroup, **kwargs: Any) -> None:
        """Let `module` stay where it is, and its neighbours give and get what they would of the replacement.

        Nothing is to be done where inputs and outputs of the replacement are whole on every rank.

        Args:
            module, process_group, kwargs: as for `from_native_module`.

        Raises:
            TypeError: it cannot be told how many features the module reads or returns.
        """
