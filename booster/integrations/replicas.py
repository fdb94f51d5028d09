"""Values of all data-parallel replicas: what `gather` and `reduce` of other libraries mean under any layout.

The ranks of one replica (tensor, pipeline and context parallel) have the same batch and the same outputs, so that only
one of them counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from booster.errors import ConfigurationError
from booster.plugin import Plugin


class Replicas:
    """The data-parallel replicas of a plugin's layout.

    Args:
        plugin: a plugin with `mesh`, a `DeviceMesh` with the axis "dp".

    Raises:
        ConfigurationError: if the plugin has no such mesh.
    """

    def __init__(self, plugin: Plugin) -> None:
        if not isinstance(plugin, Plugin):
            raise ConfigurationError(
                f"plugin={plugin!r} is no parallel training strategy; give one, as in plugin=HybridParallelPlugin()"
            )
        if not hasattr(plugin, "mesh"):
            raise ConfigurationError(
                f"{type(plugin).__name__} has no mesh with the axis 'dp'; use HybridParallelPlugin"
            )
        self.mesh = plugin.mesh["dp"]

    @property
    def size(self) -> int:
        """Number of replicas."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """Which replica this rank belongs to."""
        return self.mesh.get_local_rank()

    def gather(self, data: Any) -> Any:
        """Return nested tensors of all replicas, joined along dim 0, to which each may contribute another number.

        A 0-d tensor contributes one row. With one replica, tensors are returned as they are.
        """
        if self.size == 1:
            return data
        return map_tensors(self._gather_tensor, data)

    def gather_objects(self, data: list[Any]) -> list[Any]:
        """Return the lists of all replicas, one after the other.

        Raises:
            ConfigurationError: if they hold what JSON cannot represent.
        """
        if self.size == 1:
            return data
        try:
            text = json.dumps(data).encode()
        except TypeError as error:
            raise ConfigurationError(f"{error}; gather tensors, or lists of numbers and texts") from None
        lengths = self._gather_tensor(torch.tensor(len(text))).tolist()
        texts = self._gather_tensor(torch.tensor(list(text), dtype=torch.uint8)).split(lengths)
        return [each for part in texts for each in json.loads(bytes(part.tolist()))]

    def reduce(self, data: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return nested tensors added up over replicas ("sum"), averaged ("mean"), or as they are ("none")."""
        factor = scale / self.size if reduction == "mean" else scale

        def reduced(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            if reduction != "none" and self.size > 1:
                dist.all_reduce(tensor, group=self.mesh.get_group())
            return tensor * factor if factor != 1.0 else tensor

        return map_tensors(reduced, data)

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        group = self.mesh.get_group()
        tensor = (tensor[None] if tensor.dim() == 0 else tensor).detach().contiguous()
        rows = tensor.new_tensor([tensor.shape[0]], dtype=torch.int64)
        all_rows = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(all_rows, rows, group=group)
        counts = [int(each) for each in all_rows]
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def map_tensors(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Apply a function to all tensors in nested containers; other values stay."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, dict):
        return type(data)({key: map_tensors(function, value) for key, value in data.items()})
    if isinstance(data, tuple | list):
        values = [map_tensors(function, value) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    return data
