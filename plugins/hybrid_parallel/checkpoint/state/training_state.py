"""The complete training state of a rank, random states included: taking a snapshot of it, and restoring it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from booster.checkpoint import take_state
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor
from plugins.hybrid_parallel.checkpoint.state.manifest import Manifest, SavedFile, merge_tensors
from plugins.hybrid_parallel.checkpoint.state.model_state import clear_padding, model_tensors, tensors_to_fill
from plugins.hybrid_parallel.checkpoint.state.optimizer_state import (
    OptimizerLoad,
    check_fits,
    merge_numbers,
    optimizer_header,
    optimizer_numbers,
    optimizer_tensors,
)
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import AXES, HybridMesh
from shardformer.utils.typed_json import from_json, to_json

PREFIX = "random/"
_STREAM = "stream_"
_PYTHON_VERSION = 3  # version number in the tuple of random.getstate


def random_tensors(model: HybridParallelModel | None, mesh: HybridMesh) -> dict[str, GlobalTensor]:
    """Return the current random states of this rank, and once those of its replica."""
    states = {"torch_cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["torch_cuda"] = torch.cuda.get_rng_state()
    if model is not None and model.stream is not None:
        states |= {f"{_STREAM}{key}": value for key, value in model.stream.state_dict().items()}
    _, words, gauss = random.getstate()
    states["python"] = torch.tensor(words, dtype=torch.int64)
    states["python_gauss"] = torch.tensor([] if gauss is None else [gauss], dtype=torch.float64)
    if "numpy" in sys.modules:
        _, words, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        states["numpy"] = torch.tensor([*words.tolist(), position, has_gauss], dtype=torch.int64)
        states["numpy_gauss"] = torch.tensor(gauss, dtype=torch.float64)
    found = {f"{_own_prefix()}{key}": value for key, value in states.items()}
    if is_first_of(mesh):  # what a replica draws by itself, such as tokens, goes on under another layout
        of_replica = {key: value for key, value in states.items() if not key.startswith(_STREAM)}
        found |= {f"{_replica_prefix(mesh)}{key}": value for key, value in of_replica.items()}
    return {name: GlobalTensor.whole(value.clone()) for name, value in found.items()}


def is_first_of(mesh: HybridMesh) -> bool:
    """Return whether this is the first rank of its replica."""
    return not any(mesh.rank(axis) for axis in AXES if axis != "dp")


class RandomLoad:
    """Random states of this rank that are being loaded: buffers to fill, then to apply.

    Args:
        model: the boosted model.
        saved: name -> saved tensor, for all tensors of the checkpoint.
        replica_of: the mesh, to load the states of a replica under another layout; None for those of the rank.
    """

    def __init__(self, model: HybridParallelModel | None, saved: Any, replica_of: HybridMesh | None = None) -> None:
        self.model = model
        prefix = _own_prefix() if replica_of is None else _replica_prefix(replica_of)
        self._states = {
            name.removeprefix(prefix): torch.empty(tensor.shape, dtype=tensor.torch_dtype)
            for name, tensor in saved.items()
            if name.startswith(prefix)
        }
        self.tensors = {f"{prefix}{key}": GlobalTensor.whole(value) for key, value in self._states.items()}

    def apply(self) -> None:
        """Set the generators to the loaded states; a generator without a saved state is not changed."""
        states = self._states
        if "torch_cpu" in states:
            torch.set_rng_state(states["torch_cpu"])
        if "torch_cuda" in states and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(states["torch_cuda"])
        stream = {key.removeprefix(_STREAM): value for key, value in states.items() if key.startswith(_STREAM)}
        if self.model is not None and self.model.stream is not None and stream:
            self.model.stream.load_state_dict(stream)
        if "python" in states:
            gauss = states["python_gauss"].tolist()
            random.setstate((_PYTHON_VERSION, tuple(states["python"].tolist()), gauss[0] if gauss else None))
        if "numpy" in states:
            import numpy as np

            *words, position, has_gauss = states["numpy"].tolist()
            words = np.array(words, dtype=np.uint32)
            np.random.set_state(("MT19937", words, position, has_gauss, states["numpy_gauss"].item()))


def _own_prefix() -> str:
    return f"{PREFIX}{dist.get_rank()}/"


def _replica_prefix(mesh: HybridMesh) -> str:
    return f"{PREFIX}replica_{mesh.rank('dp')}/"


_PLAIN = ("lr_scheduler", "dataloader")  # kinds whose state is in the manifest


@dataclass
class StateSnapshot:
    """A training state at one point in time."""

    tensors: dict[str, GlobalTensor]  # tensors that this rank writes
    numbers: dict[str, Any]  # optimizer numbers of this rank
    state: dict[str, Any]  # state that is identical on all ranks, as typed JSON; a copy


def manifest_of(
    state: dict[str, Any],
    parts: Sequence[Sequence[Any]],
    sequence: int = 0,
    files: dict[str, SavedFile] | None = None,
) -> Manifest:
    """Return the manifest of a state, wherever its tensors are.

    Args:
        state: what is identical on all ranks.
        parts: of each rank, the description of its tensors and its optimizer numbers.
        sequence, files: see `Manifest`.
    """
    if state["optimizer"] is not None:
        state = {**state, "optimizer": {**state["optimizer"], **merge_numbers([numbers for _, numbers in parts])}}
    return Manifest(sequence, files or {}, merge_tensors([tensors for tensors, _ in parts]), state)


def take_snapshot(
    mesh: HybridMesh, objects: dict[str, Any], extra: dict[str, Any], elsewhere: Collection[str]
) -> StateSnapshot:
    """Take a snapshot of the current state; its tensors are views of the live training tensors.

    Args:
        objects: objects to save, by kind.
        extra: additional values of the user.
        elsewhere: model buffers that another stage writes.
    """
    model, optimizer = objects.get("model"), objects.get("optimizer")
    if optimizer is not None:
        optimizer.refuse_accumulated()
    tensors = random_tensors(model, mesh)
    if model is not None:
        tensors |= model_tensors(model, mesh, elsewhere)
    if optimizer is not None:
        tensors |= optimizer_tensors(optimizer)
    try:
        state = {
            "layout": {axis: mesh.size(axis) for axis in AXES},
            "step": None if optimizer is None else optimizer.num_steps,
            "optimizer": None if optimizer is None else optimizer_header(optimizer),
            **{kind: _state_of(objects.get(kind), kind) for kind in _PLAIN},
            "extra": {name: to_json(value, name) for name, value in extra.items()},
        }
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    return StateSnapshot(tensors, {} if optimizer is None else optimizer_numbers(optimizer), state)


def _state_of(given: Any, kind: str) -> Any:
    return None if given is None else to_json(given.state_dict(), f"{kind}.state_dict()")


def restore(
    mesh: HybridMesh,
    objects: dict[str, Any],
    fill: Callable[[Mapping[str, GlobalTensor]], None],
    manifest: Manifest,
    group: dist.ProcessGroup,
    with_random: bool = True,
) -> None:
    """Replace the current state by that of a checkpoint.

    The random states of a rank are restored if the layout is the same, and those of its replica if there are as many.
    Nothing is changed until everything is known to fit. An I/O error while tensors are read leaves a mix of both
    states.

    Args:
        objects: objects to restore, by kind.
        fill: reads saved tensors into memory of this rank; all ranks call it equally often.
        manifest: of the saved state.
        group: group of all ranks; an error on one is raised on all.
        with_random: whether to restore random states at all.

    Raises:
        ConfigurationError: the checkpoint was saved from different objects.
    """
    model, optimizer = map(objects.get, ("model", "optimizer"))
    saved, same_layout = manifest.state["layout"], manifest.state["layout"] == {axis: mesh.size(axis) for axis in AXES}

    def prepare() -> list[Any]:
        if optimizer is not None:
            check_fits(optimizer, manifest.state["optimizer"])
        loads: list[Any] = [] if optimizer is None else [OptimizerLoad(optimizer, manifest)]
        known = with_random and (same_layout or saved.get("dp") == mesh.size("dp"))
        return loads + ([RandomLoad(model, manifest.tensors, None if same_layout else mesh)] if known else [])

    def read() -> None:
        if model is not None:
            clear_padding(model)
            fill(wanted)
            for each in model.optimizers:
                each.refresh_masters()
        for load in loads:
            fill(load.tensors)
            load.apply()

    def take_plain() -> None:
        for kind in _PLAIN:
            if objects.get(kind) is not None and manifest.state[kind] is not None:
                take_state(objects[kind], from_json(manifest.state[kind]), kind)

    loads = raise_on_all_ranks(prepare, group)
    wanted = {} if model is None else tensors_to_fill(model, manifest, group)
    raise_on_all_ranks(take_plain, group)  # the last step that may fail before tensors are changed
    raise_on_all_ranks(read, group)
    if optimizer is not None:
        optimizer.publish_masters()
        optimizer.num_steps = manifest.state["step"] or 0
    if model is not None and manifest.state["step"]:
        model.checked_full_batch = True  # the next batch may be the short last one of an epoch
    if with_random and not same_layout and model is not None and model.stream is not None:
        model.stream.restart(manifest.state["step"] or 0)
