"""The optimizer's state as whole, per-parameter tensors under Hugging Face names: any layout opens any other's.

A shard holds pieces of parameters. To save, pieces are put together over the data-parallel ranks and then over the
tensor-parallel ranks; to load, each rank reads its own slices and cuts its pieces out of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from booster.checkpoint import write_text
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.agree import all_gather_json, together
from plugins.hybrid_parallel.checkpoint.model_files import open_tensors, read_piece
from plugins.hybrid_parallel.mesh import HybridMesh
from plugins.hybrid_parallel.zero.bucket import Bucket, Piece
from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer, assemble
from shardformer.shard_spec import spec_of

_MASTER = "master"  # the fp32 value of a 16-bit parameter, kept among its states


def save_optimizer_files(optimizer: HybridParallelOptimizer, mesh: HybridMesh, directory: Path) -> None:
    """Write the state; the first replica's first tensor-parallel rank of each stage writes its stage's part.

    Raises:
        ConfigurationError: the directory cannot be written, on all ranks alike.
    """
    together(lambda: directory.mkdir(parents=True, exist_ok=True))
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, states in _gather_states(optimizer, mesh).items():
        for key, value in states.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value.cpu().contiguous()
            else:
                scalars.setdefault(name, {})[key] = value
    shapes = {optimizer.names[param]: spec_of(param).full_shape for b in optimizer.buckets for param in b.params}
    stage = mesh.rank("pp")

    def write() -> None:
        if mesh.rank("dp") == 0 and mesh.rank("tp") == 0:
            save_file(tensors, directory / f"optimizer-stage{stage}.safetensors")
            write_text(directory / f"optimizer-stage{stage}.json", json.dumps({"scalars": scalars, "shapes": shapes}))
        if dist.get_rank() == 0:
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            header = {
                "class": type(optimizer.unwrap()).__name__,
                "num_stages": mesh.size("pp"),
                "param_groups": groups,
                "loss_scale": optimizer.loss_scale.state_dict(),
            }
            write_text(directory / "optimizer.json", json.dumps(header))

    together(write)


def load_optimizer_files(optimizer: HybridParallelOptimizer, directory: Path) -> None:
    """Read what `save_optimizer_files` wrote, under this layout or another.

    Raises:
        ConfigurationError: the files are missing or belong to another optimizer or model, on all ranks alike.
    """
    together(lambda: _load(optimizer, directory))


def _gather_states(optimizer: HybridParallelOptimizer, mesh: HybridMesh) -> dict[str, dict[str, Any]]:
    """Whole states of this stage's parameters: name -> key -> tensor, or [kind, number]."""
    gathered: dict[str, dict[str, Any]] = {}
    cut: dict[tuple[str, str], tuple[nn.Parameter, Tensor]] = {}  # (name, key) -> parameter, local state like it
    for bucket in optimizer.buckets:
        for index, states in _gather_over_data(optimizer, bucket, mesh).items():
            param = bucket.params[index]
            name = optimizer.names[param]
            for key, value in states.items():
                if isinstance(value, Tensor) and value.shape == param.shape:
                    cut[name, key] = (param, value)
                else:
                    gathered.setdefault(name, {})[key] = value
    # By name: tensor-parallel ranks sort their parameters into other buckets.
    for (name, key), (param, value) in sorted(cut.items(), key=lambda item: item[0]):
        gathered.setdefault(name, {})[key] = assemble(param, value, mesh.group("tp"))
    return gathered


def _gather_over_data(
    optimizer: HybridParallelOptimizer, bucket: Bucket, mesh: HybridMesh
) -> dict[int, dict[str, Any]]:
    """This rank's states of a bucket's parameters, put together over the data-parallel ranks.

    Returns:
        Position in the bucket -> key -> tensor, or [kind, number].
    """
    mine = {piece.index: _states_of(optimizer, bucket, piece) for piece in bucket.pieces}
    shapes = {piece.index: piece.parameter.shape for piece in bucket.pieces}
    described = {str(index): _describe(states, shapes[index]) for index, states in mine.items()}
    merged: dict[int, dict[str, Any]] = {}
    like: dict[str, str] = {}  # key -> dtype of the states that are shaped like the parameter
    holders: dict[int, set[str]] = {}
    for rank, found in enumerate(all_gather_json(described, mesh.group("dp"))):
        for index, states in found.items():
            for key, (kind, *details) in states.items():
                if kind == "like":
                    like[key] = details[0]
                    holders.setdefault(int(index), set()).add(key)
                elif kind == "other":
                    merged.setdefault(int(index), {})[key] = (rank, *details)
                else:
                    merged.setdefault(int(index), {})[key] = [kind, details[0]]
    for index, states in merged.items():
        for key, value in list(states.items()):
            if isinstance(value, tuple):
                states[key] = _fetch(mine.get(index, {}).get(key), value, bucket, mesh)
    for key, dtype in sorted(like.items()):
        values = {index: states[key] for index, states in mine.items() if key in states}
        for index, local in bucket.gather_pieces(values, getattr(torch, dtype)).items():
            if key in holders.get(index, ()):
                merged.setdefault(index, {})[key] = local
    return merged


def _states_of(optimizer: HybridParallelOptimizer, bucket: Bucket, piece: Piece) -> dict[str, Any]:
    states = dict(optimizer.state.get(piece.parameter, {}))
    if bucket.has_masters:
        states[_MASTER] = piece.parameter.detach()
    return {key: value for key, value in states.items() if value is not None}


def _describe(states: Mapping[str, Any], shape: torch.Size) -> dict[str, list[Any]]:
    """Kind and details of each state of a piece of `shape`."""
    described: dict[str, list[Any]] = {}
    for key, value in states.items():
        if not isinstance(value, Tensor):
            described[key] = ["number", value]
        elif value.dim() == 0:
            described[key] = [str(value.dtype).removeprefix("torch."), value.item()]
        elif value.shape == shape:
            described[key] = ["like", str(value.dtype).removeprefix("torch.")]
        else:
            described[key] = ["other", str(value.dtype).removeprefix("torch."), list(value.shape)]
    return described


def _fetch(mine: Tensor | None, description: tuple, bucket: Bucket, mesh: HybridMesh) -> Tensor:
    """A state of another shape than its parameter (Adafactor's rows and columns), from the rank that has it."""
    owner, dtype, shape = description
    value = mine if mine is not None else torch.empty(shape, dtype=getattr(torch, dtype), device=bucket.flat.device)
    if mesh.size("dp") > 1:
        dist.broadcast(value, group=mesh.group("dp"), group_src=owner)
    return value


def _load(optimizer: HybridParallelOptimizer, directory: Path) -> None:
    if not (directory / "optimizer.json").is_file():
        raise ConfigurationError(f"{directory} has no optimizer.json; give a directory of save_optimizer")
    header = json.loads((directory / "optimizer.json").read_text())
    if header["class"] != type(optimizer.unwrap()).__name__:
        raise ConfigurationError(
            f"{directory} holds the state of {header['class']}, not of {type(optimizer.unwrap()).__name__}; "
            f"make a {header['class']}"
        )
    if len(header["param_groups"]) != len(optimizer.param_groups):
        raise ConfigurationError(
            f"{directory} holds {len(header['param_groups'])} parameter groups, the optimizer has "
            f"{len(optimizer.param_groups)}; make it with the same groups"
        )
    for group, saved in zip(optimizer.param_groups, header["param_groups"], strict=True):
        for key, value in saved.items():
            group[key] = tuple(value) if isinstance(value, list) and isinstance(group.get(key), tuple) else value
    optimizer.loss_scale.load_state_dict(header["loss_scale"])
    saved = _SavedStates(directory, header["num_stages"])
    with torch.no_grad():
        for bucket in optimizer.buckets:
            for piece in bucket.pieces:
                _load_piece(optimizer, bucket, piece, saved)


class _SavedStates:
    """What the files of all stages hold.

    Attributes:
        files: parameter -> key -> file with the tensor.
        scalars: parameter -> key -> [kind, number].
        shapes: parameter -> its full shape.
    """

    def __init__(self, directory: Path, num_stages: int) -> None:
        self.files: dict[str, dict[str, Path]] = {}
        self.scalars: dict[str, dict[str, Any]] = {}
        self.shapes: dict[str, list[int]] = {}
        for stage in range(num_stages):
            path = directory / f"optimizer-stage{stage}.safetensors"
            with open_tensors(path) as file:
                for entry in file.keys():  # noqa: SIM118 (not a dict)
                    name, _, key = entry.rpartition("/")
                    self.files.setdefault(name, {})[key] = path
            described = json.loads(path.with_suffix(".json").read_text())
            for name, states in described["scalars"].items():
                self.scalars.setdefault(name, {}).update(states)
            self.shapes.update(described["shapes"])

    def find(self, names: Sequence[str], shape: tuple[int, ...]) -> str | None:
        """The first of a parameter's names that has a state; None for one that was never updated.

        Raises:
            ConfigurationError: it is the state of a parameter of another shape.
        """
        name = next((alias for alias in names if alias in self.files or alias in self.scalars), None)
        if name is not None and tuple(self.shapes[name]) != shape:
            raise ConfigurationError(
                f"the saved state of {name} is that of shape {tuple(self.shapes[name])} but the model has {shape}; "
                "load a checkpoint of the same configuration"
            )
        return name


def _load_piece(
    optimizer: HybridParallelOptimizer,
    bucket: Bucket,
    piece: Piece,
    saved: _SavedStates,
) -> None:
    param = bucket.params[piece.index]
    names = [optimizer.names[param], *optimizer.aliases.get(optimizer.names[param], ())]
    spec, target = spec_of(param), piece.parameter
    name = saved.find(names, spec.full_shape)
    if name is None:
        optimizer.state.pop(target, None)
        return
    state: dict[str, Any] = {}
    for key, path in saved.files.get(name, {}).items():
        with open_tensors(path) as file:
            shape = tuple(file.get_slice(f"{name}/{key}").get_shape())
            other = file.get_tensor(f"{name}/{key}") if shape != spec.full_shape else None
        if other is None:
            local = read_piece(path, f"{name}/{key}", spec).reshape(-1)[piece.start : piece.stop]
            other = local.view(target.shape)
        if key == _MASTER:
            target.data.copy_(other)
        else:
            state[key] = other.to(target.device)
    for key, (kind, value) in saved.scalars.get(name, {}).items():
        state[key] = value if kind == "number" else torch.tensor(value, dtype=getattr(torch, kind))
    optimizer.state[target] = state
