"""The optimizer part of a training state, under Hugging Face names, so that any layout can load it.

A ZeRO shard holds pieces of parameters. Each rank writes and reads the states of its own pieces as rectangles of whole
parameters (`global_tensor.py`). Steps and other numbers are stored in the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.checks import check_plain, ties_of
from plugins.hybrid_parallel.checkpoint.global_tensor import MASTER, GlobalTensor
from plugins.hybrid_parallel.checkpoint.global_tensor import PREFIX as MODEL
from plugins.hybrid_parallel.checkpoint.tensor_file import Manifest
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import BucketSlice
from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer
from plugins.hybrid_parallel.zero.user_optimizer import on_state_device
from plugins.hybrid_parallel.zero.whole_parameters import OwnedParameter
from shardformer.shard_spec import ShardSpec, spec_of
from shardformer.utils.typed_json import from_json, to_json

PREFIX = "optimizer/"
_AVERAGE = "average:"  # begins the keys of averages of a parameter among its states


def optimizer_tensors(optimizer: HybridParallelOptimizer) -> dict[str, GlobalTensor]:
    """Return the optimizer states that this rank writes as tensors, and the fp32 master weights."""
    tensors: dict[str, GlobalTensor] = {}
    with torch.no_grad():
        optimizer.take_changed_weights()
    for bucket, piece, param in _pieces(optimizer):
        spec = spec_of(param)
        for key, value in _states_of(optimizer, bucket, piece).items():
            if not isinstance(value, Tensor) or (value.dim() == 0 and _is_state(key)):
                continue
            name = f"{PREFIX}{optimizer.names[param]}/{key}"
            if value.shape == piece.parameter.shape:
                tensors[name] = GlobalTensor.piece(spec, value, piece.start, piece.stop)
            else:  # Adafactor's row and column statistics
                tensors[name] = GlobalTensor.whole(value)
    return tensors


def optimizer_numbers(optimizer: HybridParallelOptimizer) -> dict[str, Any]:
    """Return this rank's numeric states and the shapes of its parameters, as JSON.

    Returns:
        `numbers`: parameter -> key -> [kind, number]; `shapes`: parameter -> full shape.
    """
    numbers: dict[str, dict[str, Any]] = {}
    shapes = {}
    for bucket, piece, param in _pieces(optimizer):
        name = optimizer.names[param]
        shapes[name] = list(spec_of(param).full_shape)
        for key, value in _states_of(optimizer, bucket, piece).items():
            if not _is_state(key):
                continue
            if not isinstance(value, Tensor):
                check_plain(optimizer, key, value)
                numbers.setdefault(name, {})[key] = ["number", value]
            elif value.dim() == 0:
                numbers.setdefault(name, {})[key] = [str(value.dtype).removeprefix("torch."), value.item()]
    return {"numbers": numbers, "shapes": shapes}


def optimizer_header(optimizer: HybridParallelOptimizer) -> dict[str, Any]:
    """Return what all ranks share: class, groups, their names, ties and loss scale; ValueError if not kept."""
    groups = [
        to_json({key: value for key, value in group.items() if key != "params"}, f"optimizer.param_groups[{index}]")
        for index, group in enumerate(optimizer.param_groups)
    ]
    return {
        "class": type(optimizer.unwrap()).__name__,
        "param_groups": groups,
        "group_names": [list(names) for names in optimizer.group_names],
        "tied": ties_of(optimizer),
        "loss_scale": optimizer.loss_scale.state_dict(),
        "averages": {name: average.num_updates for name, average in optimizer.averages.items()},
    }


def merge_numbers(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the numbers of all ranks; ranks that share a parameter report the same values."""
    merged: dict[str, Any] = {"numbers": {}, "shapes": {}}
    for part in parts:
        for kind in merged:
            merged[kind].update(part[kind])
    return merged


class OptimizerLoad:
    """Optimizer states that are being loaded: tensors to read, then to apply."""

    def __init__(self, optimizer: HybridParallelOptimizer, manifest: Manifest) -> None:
        self.optimizer, self.saved = optimizer, manifest.state["optimizer"]
        self.tensors: dict[str, GlobalTensor] = {}
        self._manifest = manifest
        self._keys = _keys_of(manifest)
        self._states: list[tuple[nn.Parameter, dict[str, Any]]] = []
        optimizer.take_unfrozen(self._names_with_states())  # frozen parameters may be trained again
        for holder in optimizer.updated:
            for piece in holder.pieces:
                self._ask_for(holder, piece)

    def apply(self) -> None:
        """Set the loaded states, parameter group options and loss scale in the optimizer."""
        for group, saved in zip(self.optimizer.param_groups, self.saved["param_groups"], strict=True):
            for key, value in from_json(saved).items():
                group[key] = _like(value, group.get(key))
        self.optimizer.loss_scale.load_state_dict(self.saved["loss_scale"])
        for name, average in self.optimizer.averages.items():
            average.num_updates = self.saved.get("averages", {}).get(name, 0)
            if not average.num_updates:
                average.restart()
        for target, state in self._states:
            if state:
                self.optimizer.state[target] = state
            else:
                self.optimizer.state.pop(target, None)
        self.optimizer.stepper.take_states(self.optimizer.updated)

    def _names_with_states(self) -> set[str]:
        """Return the names of local parameters that have a state in the checkpoint."""
        saved = {name for name, keys in self._keys.items() if any(map(_is_state, keys))} | set(self.saved["numbers"])
        aliases = self.optimizer.aliases
        return {name for name in self.optimizer.names.values() if saved & {name, *aliases.get(name, ())}}

    def _ask_for(self, bucket: Bucket | OwnedParameter, piece: BucketSlice) -> None:
        param, target = bucket.params[piece.index], piece.parameter
        first = self.optimizer.names[param]
        names = [first, *self.optimizer.aliases.get(first, ())]
        spec = spec_of(param)
        name = self._find(names, spec.full_shape)
        if isinstance(bucket, Bucket):
            self._ask_for_weights(names, bucket, piece, spec)
        if param in self.optimizer.wholes:
            return  # the owner of the whole parameter has the state
        state: dict[str, Any] = {}
        for key in self._keys.get(name, ()):
            if not _is_state(key):
                continue
            saved = self._manifest.tensors[f"{PREFIX}{name}/{key}"]
            is_like = saved.shape == spec.full_shape
            shape = target.shape if is_like else torch.Size(saved.shape)
            state[key] = self._room_for(target, key, shape, saved.torch_dtype, is_like and spec.is_padded)
            if is_like:
                wanted = GlobalTensor.piece(spec, state[key], piece.start, piece.stop)
            else:
                wanted = GlobalTensor.whole(state[key])
            self.tensors[f"{PREFIX}{name}/{key}"] = wanted
        group = {**self.optimizer.param_groups[bucket.group_index], **self.saved["param_groups"][bucket.group_index]}
        numbers = self.saved["numbers"].get(name, {})
        for key, (kind, value) in ((key, number) for key, number in numbers.items() if _is_state(key)):
            if kind != "number":
                value = on_state_device(key, torch.tensor(value, dtype=getattr(torch, kind)), group, target)
            state[key] = value
        self._states.append((target, state))

    def _room_for(self, target: nn.Parameter, key: str, shape: torch.Size, dtype: torch.dtype, padded: bool) -> Tensor:
        """Return a tensor to read into: the current state if it fits; zeros if padded, because padding is not saved."""
        present = self.optimizer.state.get(target, {}).get(key)
        if padded:
            return torch.zeros(shape, dtype=dtype, device=target.device)
        if isinstance(present, Tensor) and (present.shape, present.dtype) == (shape, dtype):
            return present
        return self.optimizer.stepper.empty_state(target, key, shape, dtype)

    def _ask_for_weights(self, names: Sequence[str], bucket: Bucket, piece: BucketSlice, spec: ShardSpec) -> None:
        """Request averages, and the fp32 value; if the checkpoint has no masters, the parameter is equally precise."""
        for key, average in self.optimizer.averages.items():
            entries = (f"{PREFIX}{name}/{_AVERAGE}{key}" for name in names)
            entry = next((entry for entry in entries if entry in self._manifest.tensors), None)
            if entry is not None:
                values = average.piece_of(bucket, piece)
                self.tensors[entry] = GlobalTensor.piece(spec, values, piece.start, piece.stop)
        if not bucket.has_masters:
            return
        candidates = [f"{PREFIX}{name}/{MASTER}" for name in names] + [f"{MODEL}{name}" for name in names]
        found = next((name for name in candidates if name in self._manifest.tensors), None)
        if found is not None:
            self.tensors[found] = GlobalTensor.piece(spec, piece.parameter.data, piece.start, piece.stop)

    def _find(self, names: Sequence[str], shape: tuple[int, ...]) -> str | None:
        """Return the first name of a parameter that has a saved state, or None if it was never updated."""
        shapes = self.saved["shapes"]
        name = next((alias for alias in names if alias in shapes), None)
        if name is not None and tuple(shapes[name]) != shape:
            raise ConfigurationError(
                f"the saved state of {name} is that of shape {tuple(shapes[name])} but the model has {shape}; "
                "load a checkpoint of the same configuration"
            )
        return name


def _pieces(optimizer: HybridParallelOptimizer) -> Any:
    """Yield (bucket, piece, parameter) for the pieces that this rank saves: those it counts in the gradient norm."""
    for bucket in optimizer.updated:
        if bucket.counted:
            for piece in bucket.pieces:
                yield bucket, piece, bucket.params[piece.index]


def _states_of(
    optimizer: HybridParallelOptimizer, bucket: Bucket | OwnedParameter, piece: BucketSlice
) -> dict[str, Any]:
    states = dict(optimizer.state.get(piece.parameter, {}))
    if bucket.has_masters:
        states[MASTER] = piece.parameter.detach()
    for name, average in optimizer.averages.items() if isinstance(bucket, Bucket) else ():
        states[f"{_AVERAGE}{name}"] = average.piece_of(bucket, piece)
    return {key: value for key, value in states.items() if value is not None}


def _is_state(key: str) -> bool:
    """Return whether a key is one of the user's optimizer: not a master weight, nor an average."""
    return key != MASTER and not key.startswith(_AVERAGE)


def _keys_of(manifest: Manifest) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for entry in manifest.tensors:
        if entry.startswith(PREFIX):
            name, _, key = entry.removeprefix(PREFIX).rpartition("/")
            keys.setdefault(name, []).append(key)
    return keys


def _like(value: Any, present: Any) -> Any:
    """Convert a saved option to the type of the present one: one of both may be a tensor, as a learning rate."""
    if isinstance(present, Tensor):
        return present.copy_(torch.as_tensor(value))
    return value.item() if isinstance(value, Tensor) and isinstance(present, float) else value
