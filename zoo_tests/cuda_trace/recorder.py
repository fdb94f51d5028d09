"""Records what a step asks of the device and of the network, operator by operator."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(f"{_ROOT / name}/" for name in ("shardformer", "booster", "plugins"))
_OTHERS = "site-packages/transformers/"
_FRAMES = 2  # of this repository, in the name of a place

# Operators whose result has a size that only the device knows, so that the host waits for it.
_SIZED_BY_VALUES = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::bincount",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::equal",
    "aten::is_nonzero",
}
# Operators that allocate or describe memory, and run nothing on the device.
_NO_KERNEL = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
_NO_KERNEL |= {
    "aten::set_",
    "aten::lift_fresh",
    "aten::detach",
    "aten::alias",
    "aten::resize_",
    "aten::_local_scalar_dense",
}
_NO_KERNEL |= {"aten::_unsafe_view", "aten::_reshape_alias", "aten::is_pinned", "aten::record_stream"}


@dataclass
class StepCounts:
    """What one rank did in one step.

    Attributes:
        kernels: operator -> times that it runs on the device.
        syncs: place in the code -> times that the host waited for the device there.
        copies: "cpu->cuda (shape) @ place" -> copies between host and device.
        collectives: name -> calls on tensors of the device.
        collective_bytes: bytes of their inputs.
        dtypes: dtypes of tensors in collectives.
        host_collectives: name -> calls on tensors of the host, by which ranks agree without the device.
        faults: broken rules: a non-contiguous tensor, or tensors of host and device, in one collective.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    collective_bytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    host_collectives: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The counts as a JSON object."""
        return dict(vars(self))


class StepRecorder(TorchDispatchMode):
    """Counts the operators of the code in its context, and answers `item()` with 1 where there are no values.

    Args:
        device_type: of the device; "meta" for code without autograd, which then needs no registered device; "cpu" to
            count on true values.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        super().__init__()
        self.counts, self.device_type = StepCounts(), device_type
        self._last_read: tuple[str, int] | None = None  # `tolist()` of fake tensors is one `item()` for each element

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = any(each.device.type == self.device_type for each in tensors)
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._collective(name.rpartition("::")[2].rstrip("_"), tensors)
        elif name == "aten::_local_scalar_dense" and (on_device or isinstance(args[0], FakeTensor)):
            if on_device:
                self._read(args[0])
            if not isinstance(args[0], FakeTensor) and not args[0].is_meta:
                return func(*args, **kwargs)
            return 1.0 if args[0].dtype.is_floating_point else args[0].dtype == torch.bool or 1
        elif name in ("aten::_to_copy", "aten::copy_") and self._copies(name, args, kwargs):
            if name == "aten::_to_copy" and args[0].is_meta:
                return torch.ones(args[0].shape, dtype=args[0].dtype)
        elif on_device or torch.device(kwargs.get("device") or "cpu").type == self.device_type:
            self._operator(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _read(self, value: Tensor) -> None:
        read = (_place(), value.untyped_storage()._cdata)
        if read != self._last_read:
            self.counts.syncs[f"item @ {read[0]}"] += 1
        self._last_read = read

    def _operator(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Count an operator on the device, and whether the host waits for it."""
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if name.startswith("aten::") and name not in _NO_KERNEL and not is_view:
            self._last_read = None
            self.counts.kernels[name.removeprefix("aten::")] += 1
        by_mask = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        repeats = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
        if name in _SIZED_BY_VALUES or by_mask or repeats:
            self.counts.syncs[f"{name.removeprefix('aten::')} @ {_place()}"] += 1

    def _copies(self, name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Count a copy between host and device; return whether this is one."""
        source = args[1] if name == "aten::copy_" else args[0]
        target = args[0].device if name == "aten::copy_" else kwargs.get("device") or source.device
        if not isinstance(source, Tensor) or torch.device(target).type == source.device.type:
            return False
        waits = not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2]))
        where = f"{source.device.type}->{torch.device(target).type} {tuple(source.shape)}"
        self.counts.copies[f"{where} @ {_place()}"] += 1
        if waits:  # from pageable memory too: the driver stages the bytes and drains the stream
            self.counts.syncs[f"copy {where} @ {_place()}"] += 1
        return True

    def _collective(self, name: str, tensors: list[Tensor]) -> None:
        devices = sorted({each.device.type for each in tensors})
        if devices == ["cpu"]:
            self.counts.host_collectives[name] += 1
            return
        self.counts.collectives[name] += 1
        for each in tensors:
            self.counts.dtypes[str(each.dtype).removeprefix("torch.")] += 1
        sent = [each.numel() * each.element_size() for each in tensors]
        self.counts.collective_bytes += max(sent, default=0)
        if len(devices) > 1:
            self.counts.faults.append(f"{name} on {' and '.join(devices)} @ {_place()}")
        self.counts.faults += [
            f"{name} on a non-contiguous {tuple(each.shape)} @ {_place()}"
            for each in tensors
            if not each.is_contiguous()
        ]


@contextmanager
def recorded_on_meta() -> Iterator[StepCounts]:
    """Count what code without autograd does on meta tensors as on a GPU; needs no compiler."""
    recorder = StepRecorder("meta")

    def counting(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Count tensors of the device that are made from numbers of the host: no operator tells of them."""

        def count(data: Any, *args: Any, **kwargs: Any) -> Tensor:
            made = make(data, *args, **kwargs)
            if made.is_meta and not isinstance(data, Tensor):
                recorder.counts.copies[f"numbers->meta @ {_place()}"] += 1
            return made

        return count

    with ExitStack() as stack:
        for name in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch.object(torch, name, counting(getattr(torch, name))))
        stack.enter_context(recorder)
        stack.enter_context(torch.no_grad())
        yield recorder.counts


def record_wait(what: str) -> None:
    """Count a wait of the host that is no operator, in the recorders in progress."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, StepRecorder):
            mode.counts.syncs[f"{what} @ {_place()}"] += 1


def _place() -> str:
    """The innermost lines of this repository, or of transformers, that are running."""
    found: list[str] = []
    for frame in reversed(traceback.extract_stack()[:-2]):
        if frame.filename.startswith(_OURS):
            found.append(f"{Path(frame.filename).relative_to(_ROOT)}:{frame.lineno}")
        elif not found and _OTHERS in frame.filename:
            found.append(f"transformers/{frame.filename.partition(_OTHERS)[2]}:{frame.lineno}")
        if len(found) == _FRAMES:
            break
    return " < ".join(found) or "torch"
