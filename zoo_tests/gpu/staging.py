"""Process groups whose ranks share one GPU: CUDA tensors travel through host memory, over gloo.

NCCL refuses two ranks on one GPU, and torch's gloo sends and receives no CUDA tensors. So these kernels copy the
tensors of an operation to the host, run it there on the group's own gloo, and copy the results back at `wait`. The
product sees a group of `cpu:gloo,cuda:nccl`, as on GPUs of its own; NCCL itself is not tested.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves, tree_map_only

from plugins.hybrid_parallel.distributed import mesh
from zoo_tests.harness.c10d_operations import PLACES

_AS_BYTES = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)  # what gloo has no type for
_TAG = 1000  # transfers of CUDA tensors, apart from those of CPU tensors in the same group

_returned: deque[_Work] = deque(maxlen=64)  # Python's half of a work must live until its caller holds it


class _Work(dist.Work):
    """An operation on copies.

    Args:
        inner: the operation of gloo.
        results: (tensor of the GPU, its copy) that appear at `wait`.
    """

    def __init__(self, inner: Any, results: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._inner, self._results = inner, list(results)
        _returned.append(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._inner.wait()
        results, self._results = self._results, []
        with torch.no_grad():
            for tensor, copy in results:
                _as_sent(tensor.detach()).copy_(copy)
        return True

    def is_completed(self) -> bool:
        return self._inner.is_completed() and self.wait()

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()


@contextmanager
def shared_gpu() -> Iterator[None]:
    """Let the ranks of this world share a GPU; all of them must enter."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that torch's own kernels are replaced
        for name in PLACES:
            library.impl(name, _collective(name), "CUDA")
        library.impl("send", _send, "CUDA")
        library.impl("recv_", _receive, "CUDA")
    try:
        with (
            mock.patch.object(c10d, "batch_isend_irecv", _one_by_one),
            mock.patch.object(dist, "batch_isend_irecv", _one_by_one),
            mock.patch.object(mesh, "check_own_device"),  # which refuses what this is for
        ):
            yield
    finally:
        library._destroy()


def _collective(name: str) -> Callable:
    op = getattr(torch.ops.c10d, name).default
    names = [argument.name for argument in op._schema.arguments]
    at, root = names.index("process_group"), names.index("root_rank") if "root_rank" in names else None
    written, read = PLACES[name]

    def run(*args: Any) -> Any:
        is_root = root is not None and args[root] == ProcessGroup.unbox(args[at]).rank()
        outputs = [] if written is None else tree_leaves(args[written])
        copies = {id(tensor): _copy_of(tensor) for tensor in (*outputs, *tree_leaves(args[read]))}
        if (name == "broadcast_" and is_root) or (name == "reduce_" and not is_root):
            outputs = []  # its own tensor stays as it is
        own = tree_map_only(Tensor, lambda tensor: copies[id(tensor)], args[:at])
        result = op(*own, *args[at:])
        inner = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
        work = _Work(inner, [(tensor, copies[id(tensor)]) for tensor in outputs])
        return (args[0], work.boxed()) if len(op._schema.returns) == 2 else work.boxed()

    return run


def _send(tensors: list[Tensor], group: Any, peer: int, tag: int) -> Any:
    result = torch.ops.c10d.send([_copy_of(tensors[0])], group, peer, tag + _TAG)
    return _Work(dist.Work.unbox(result), []).boxed()


def _receive(tensors: list[Tensor], group: Any, peer: int, tag: int) -> Any:
    copy = _copy_of(tensors[0])
    result = torch.ops.c10d.recv_([copy], group, peer, tag + _TAG)
    return _Work(dist.Work.unbox(result), [(tensors[0], copy)]).boxed()


def _one_by_one(operations: list[Any]) -> list[Any]:
    """`batch_isend_irecv` for gloo, whose operations wait for no other."""
    return [each.op(each.tensor, each.peer, each.group, each.tag) for each in operations]


def _copy_of(tensor: Tensor) -> Tensor:
    """A copy on the host; later kernels on the GPU may change the tensor."""
    return _as_sent(tensor.detach()).cpu().contiguous()


def _as_sent(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor
