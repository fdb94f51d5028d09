"""ParallelModule: base class of layers that hold one rank's shard of a native layer's weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup


class ParallelModule(nn.Module, ABC):
    """Base class of the layers that replace native ones. Parameters are local tensors that carry a `ShardSpec`.

    Attributes:
        needs_axis: whether the replacement only makes sense on a tensor-parallel axis of several ranks.
        shards_layer: whether it shards weights of a layer that stay whole when ranks exchange heads instead.
        can_stay_whole: whether the native layer, whole on every rank, can be kept instead of the replacement.
    """

    needs_axis = True
    shards_layer = False
    can_stay_whole = False

    @staticmethod
    @abstractmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup, **kwargs: Any) -> ParallelModule:
        """Build this rank's shard of `module`.

        Args:
            module: the native layer, whole, on this rank.
            process_group: the tensor-parallel group.
            kwargs: options of the layer class.

        Raises:
            TypeError: this class cannot shard modules of this kind.
        """

    @staticmethod
    def keep_whole(module: nn.Module, process_group: ProcessGroup, **kwargs: Any) -> None:
        """Keep `module` whole, but give its neighbors the same inputs and outputs as the replacement would.

        The default does nothing, which is right if inputs and outputs of the replacement are whole on every rank.

        Args:
            module: the native layer, whole, on this rank.
            process_group: the tensor-parallel group.
            kwargs: options of the layer class.

        Raises:
            TypeError: the number of features that the module reads or returns cannot be determined.
        """
