"""What the memory of a rank holds: its peak, and the largest tensors that Python knows."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_LARGEST = 30  # entries of the report
_KIB = 1024


def memory_of_this_rank(names: Mapping[int, str]) -> dict[str, Any]:
    """Return a report that JSON can hold.

    Args:
        names: address of a parameter -> its name.

    Returns:
        `peak_resident_bytes` of the process so far; on a GPU `peak_allocated_bytes` and `peak_reserved_bytes`;
        `tensor_bytes` of all tensors, and the largest `tensors`: those of one shape, dtype and device together, with
        the name of the first if it is a parameter. A storage that several tensors share counts once.
    """
    report: dict[str, Any] = {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB}
    if torch.cuda.is_available():
        report["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        report["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    groups: dict[tuple, dict[str, Any]] = {}
    for tensor, num_bytes in _storages():
        shape, dtype, device = list(tensor.shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device)
        new = {"shape": shape, "dtype": dtype, "device": device, "count": 0, "bytes": 0, "parameter": None}
        group = groups.setdefault((*shape, dtype, device), new)
        group["count"] += 1
        group["bytes"] += num_bytes
        group["parameter"] = group["parameter"] or names.get(tensor.data_ptr())
    largest = sorted(groups.values(), key=lambda group: -group["bytes"])
    return report | {"tensor_bytes": sum(group["bytes"] for group in largest), "tensors": largest[:_LARGEST]}


def _storages() -> Iterator[tuple[Tensor, int]]:
    """Yield the largest tensor of each storage that Python knows, and the storage's bytes."""
    found: dict[tuple[str, int], Tensor] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), Tensor) or each.layout is not torch.strided or each.device.type == "meta":
            continue
        try:
            place = str(each.device), each.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # a tensor subclass without a storage
            continue
        if place[1] and (place not in found or each.nbytes > found[place].nbytes):
            found[place] = each
    for tensor in found.values():
        yield tensor, tensor.untyped_storage().nbytes()
