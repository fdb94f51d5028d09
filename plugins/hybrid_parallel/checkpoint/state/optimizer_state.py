"""The optimizer's part of a training state, under Hugging Face names: any layout opens any other's.

A shard holds pieces of parameters. Each rank writes the states of its own pieces as rectangles of the whole parameter
(`global_tensor.py`), and reads those of its own; steps and other numbers are in the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor
from plugins.hybrid_parallel.checkpoint.state.manifest import Manifest
from plugins.hybrid_parallel.checkpoint.state.model_state import MASTER
from plugins.hybrid_parallel.checkpoint.state.model_state import PREFIX as MODEL
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import BucketSlice
from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer
from shardformer.shard_spec import ShardSpec, spec_of

PREFIX = "optimizer/"


def optimizer_tensors(optimizer: HybridParallelOptimizer) -> dict[str, GlobalTensor]:
    """What this rank writes of the states that are tensors, and of the fp32 master weights."""
    tensors: dict[str, GlobalTensor] = {}
    with torch.no_grad():
        optimizer.take_changed_weights()
    for bucket, piece, param in _pieces(optimizer):
        spec = spec_of(param)
        for key, value in _states_of(optimizer, bucket, piece).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            name = f"{PREFIX}{optimizer.names[param]}/{key}"
            if value.shape == piece.parameter.shape:
                tensors[name] = GlobalTensor.piece(spec, value, piece.start, piece.stop)
            else:  # Adafactor's rows and columns
                tensors[name] = GlobalTensor.whole(value)
    return tensors


def optimizer_numbers(optimizer: HybridParallelOptimizer) -> dict[str, Any]:
    """This rank's states that are numbers, and the shapes of its parameters, as JSON.

    Returns:
        `numbers`: parameter -> key -> [kind, number]; `shapes`: parameter -> full shape.
    """
    numbers: dict[str, dict[str, Any]] = {}
    shapes = {}
    for bucket, piece, param in _pieces(optimizer):
        name = optimizer.names[param]
        shapes[name] = list(spec_of(param).full_shape)
        for key, value in _states_of(optimizer, bucket, piece).items():
            if not isinstance(value, Tensor):
                numbers.setdefault(name, {})[key] = ["number", value]
            elif value.dim() == 0:
                numbers.setdefault(name, {})[key] = [str(value.dtype).removeprefix("torch."), value.item()]
    return {"numbers": numbers, "shapes": shapes}


def optimizer_header(optimizer: HybridParallelOptimizer) -> dict[str, Any]:
    """What all ranks know alike: class, parameter groups and loss scale."""
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return {
        "class": type(optimizer.unwrap()).__name__,
        "param_groups": groups,
        "loss_scale": optimizer.loss_scale.state_dict(),
    }


def check_fits(optimizer: HybridParallelOptimizer, saved: Mapping[str, Any] | None) -> None:
    """Refuse another optimizer's state, before anything is changed.

    Raises:
        ConfigurationError: the checkpoint has no optimizer, one of another class, or with other groups.
    """
    if saved is None:
        raise ConfigurationError("the checkpoint was saved without an optimizer; load it without one")
    own = type(optimizer.unwrap()).__name__
    if saved["class"] != own:
        raise ConfigurationError(
            f"the checkpoint holds the state of {saved['class']}, not of {own}; make a {saved['class']}"
        )
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise ConfigurationError(
            f"the checkpoint holds {len(saved['param_groups'])} parameter groups, the optimizer has "
            f"{len(optimizer.param_groups)}; make it with the same groups"
        )


class OptimizerLoad:
    """New states for an optimizer: asked for from the checkpoint first, put in place when they have been read.

    Args:
        optimizer: the boosted optimizer.
        manifest: of the checkpoint.

    Attributes:
        tensors: what is to be read.

    Raises:
        ConfigurationError: the state of a parameter is that of another shape.
    """

    def __init__(self, optimizer: HybridParallelOptimizer, manifest: Manifest) -> None:
        self.optimizer, self.saved = optimizer, manifest.state["optimizer"]
        self.tensors: dict[str, GlobalTensor] = {}
        self._manifest = manifest
        self._keys = _keys_of(manifest)
        self._states: list[tuple[nn.Parameter, dict[str, Any]]] = []
        optimizer.take_unfrozen(self._names_with_states())  # what is frozen now may be trained again
        for bucket in optimizer.buckets:
            for piece in bucket.pieces:
                self._ask_for(bucket, piece)

    def apply(self) -> None:
        """Put the states that were read in place, with groups and loss scale."""
        for group, saved in zip(self.optimizer.param_groups, self.saved["param_groups"], strict=True):
            for key, value in saved.items():
                group[key] = _like(value, group.get(key))
        self.optimizer.loss_scale.load_state_dict(self.saved["loss_scale"])
        for target, state in self._states:
            if state:
                self.optimizer.state[target] = state
            else:
                self.optimizer.state.pop(target, None)

    def _names_with_states(self) -> set[str]:
        """The parameters here of which the checkpoint has a state."""
        saved = {name for name, keys in self._keys.items() if set(keys) != {MASTER}} | set(self.saved["numbers"])
        aliases = self.optimizer.aliases
        return {name for name in self.optimizer.names.values() if saved & {name, *aliases.get(name, ())}}

    def _ask_for(self, bucket: Bucket, piece: BucketSlice) -> None:
        param, target = bucket.params[piece.index], piece.parameter
        first = self.optimizer.names[param]
        names = [first, *self.optimizer.aliases.get(first, ())]
        spec = spec_of(param)
        name = self._find(names, spec.full_shape)
        state: dict[str, Any] = {}
        for key in self._keys.get(name, ()):
            saved = self._manifest.tensors[f"{PREFIX}{name}/{key}"]
            if key == MASTER:
                continue
            is_like = saved.shape == spec.full_shape
            shape = target.shape if is_like else torch.Size(saved.shape)
            state[key] = self._room_for(target, key, shape, saved.torch_dtype, is_like and spec.is_padded)
            if is_like:
                wanted = GlobalTensor.piece(spec, state[key], piece.start, piece.stop)
            else:
                wanted = GlobalTensor.whole(state[key])
            self.tensors[f"{PREFIX}{name}/{key}"] = wanted
        for key, (kind, value) in self.saved["numbers"].get(name, {}).items():
            state[key] = value if kind == "number" else torch.tensor(value, dtype=getattr(torch, kind))
        if bucket.has_masters:
            self._ask_for_master(names, piece, spec)
        self._states.append((target, state))

    def _room_for(self, target: nn.Parameter, key: str, shape: torch.Size, dtype: torch.dtype, padded: bool) -> Tensor:
        """The present state's own memory where it fits; the padding of a vocabulary is in no file, and zero."""
        present = self.optimizer.state.get(target, {}).get(key)
        if padded:
            return torch.zeros(shape, dtype=dtype, device=target.device)
        if isinstance(present, Tensor) and (present.shape, present.dtype) == (shape, dtype):
            return present
        return torch.empty(shape, dtype=dtype, device=target.device)

    def _ask_for_master(self, names: Sequence[str], piece: BucketSlice, spec: ShardSpec) -> None:
        """The fp32 value; of a checkpoint without masters the parameter itself is as exact."""
        candidates = [f"{PREFIX}{name}/{MASTER}" for name in names] + [f"{MODEL}{name}" for name in names]
        found = next((name for name in candidates if name in self._manifest.tensors), None)
        if found is not None:
            self.tensors[found] = GlobalTensor.piece(spec, piece.parameter.data, piece.start, piece.stop)

    def _find(self, names: Sequence[str], shape: tuple[int, ...]) -> str | None:
        """The first of a parameter's names that has a state; None for one that was never updated."""
        shapes = self.saved["shapes"]
        name = next((alias for alias in names if alias in shapes), None)
        if name is not None and tuple(shapes[name]) != shape:
            raise ConfigurationError(
                f"the saved state of {name} is that of shape {tuple(shapes[name])} but the model has {shape}; "
                "load a checkpoint of the same configuration"
            )
        return name


def _pieces(optimizer: HybridParallelOptimizer) -> Any:
    """(bucket, piece, parameter) of what this rank is the one to save: it counts in the norm for the same reason."""
    for bucket in optimizer.buckets:
        if bucket.counted:
            for piece in bucket.pieces:
                yield bucket, piece, bucket.params[piece.index]


def _states_of(optimizer: HybridParallelOptimizer, bucket: Bucket, piece: BucketSlice) -> dict[str, Any]:
    states = dict(optimizer.state.get(piece.parameter, {}))
    if bucket.has_masters:
        states[MASTER] = piece.parameter.detach()
    return {key: value for key, value in states.items() if value is not None}


def _keys_of(manifest: Manifest) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for entry in manifest.tensors:
        if entry.startswith(PREFIX):
            name, _, key = entry.removeprefix(PREFIX).rpartition("/")
            keys.setdefault(name, []).append(key)
    return keys


def _plain(value: Any) -> Any:
    """A learning rate may be a tensor."""
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def _like(value: Any, present: Any) -> Any:
    """What JSON gave back, in the type that the group has."""
    if isinstance(present, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(present, Tensor):
        return present.copy_(torch.tensor(value))
    return value
