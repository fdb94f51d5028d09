"""The model as a Hugging Face directory: written shard by shard, read slice by slice."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from booster.checkpoint import write_text
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.agree import all_gather_json, together
from plugins.hybrid_parallel.mesh import HybridMesh
from plugins.hybrid_parallel.model import HybridParallelModel
from plugins.hybrid_parallel.zero.optimizer import assemble
from shardformer.adapters import model_inside
from shardformer.shard_spec import ShardSpec, spec_of

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def save_model_files(
    model: HybridParallelModel, mesh: HybridMesh, directory: Path, size_per_shard: str, dtype: torch.dtype | None
) -> None:
    """Write `config.json` and the weights; the first replica's first tensor-parallel rank of each stage writes.

    Files appear under their final names only when all of them are complete.

    Raises:
        ConfigurationError: the directory cannot be written, on all ranks alike.
    """
    limit = _bytes(size_per_shard)
    partial = directory / f".partial-{mesh.rank('pp')}"
    writes = mesh.rank("dp") == 0 and mesh.rank("tp") == 0
    together(lambda: partial.mkdir(parents=True, exist_ok=True) if writes else None)
    files: list[tuple[str, list[str], int]] = []  # file, names, bytes
    if mesh.rank("dp") == 0:
        for number, tensors in enumerate(_shards_of(_full_tensors(model, mesh, dtype), limit)):
            if writes and tensors:
                path = partial / f"{number}.safetensors"
                save_file(tensors, path, metadata={"format": "pt"})
                files.append((str(path), sorted(tensors), sum(_size(tensor) for tensor in tensors.values())))
    everyone = [entry for found in all_gather_json(files) for entry in found]
    together(lambda: _publish(model, directory, everyone) if dist.get_rank() == 0 else None)
    if writes:
        partial.rmdir()
    dist.barrier()


def load_model_files(model: HybridParallelModel, directory: Path, strict: bool) -> None:
    """Read each local tensor's own slices.

    Raises:
        ConfigurationError: files are missing or broken, or, when strict, names or shapes differ.
    """
    found, missing, unexpected = together(lambda: _match(model, directory))
    # Each stage knows of its own parameters only; the message is to name those of all.
    missing = sorted({name for names in all_gather_json(missing) for name in names})
    if strict and (missing or unexpected):
        raise ConfigurationError(
            f"{directory} does not fit the model: missing {missing[:5]}, unexpected {unexpected[:5]}; "
            "load a checkpoint of the same class, or pass strict=False"
        )
    together(lambda: _copy(found))
    for optimizer in model.optimizers:
        optimizer.refresh_masters()


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """`safe_open` whose error names the file.

    Raises:
        ConfigurationError: the file is cut off, or is no safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ConfigurationError(f"{path} is not a complete safetensors file ({error}); save it again") from None


def read_piece(path: Path, name: str, spec: ShardSpec) -> Tensor:
    """This rank's piece of a full tensor in a file; only its bytes are read.

    Raises:
        ConfigurationError: the tensor has another shape.
    """
    with open_tensors(path) as file:
        _check_shape(file, name, path, spec)
        if spec.dim is None:
            return file.get_tensor(name)
        view, parts = file.get_slice(name), []
        for start, stop, padding in spec.pieces():
            part = view[(slice(None),) * spec.dim + (slice(start, stop),)]
            shape = list(part.shape)
            shape[spec.dim] = padding
            parts += [part, part.new_zeros(shape)]
        return torch.cat(parts, dim=spec.dim)


def _check_shape(file: Any, name: str, path: Path, spec: ShardSpec) -> None:
    shape = tuple(file.get_slice(name).get_shape())
    if shape != spec.full_shape:
        raise ConfigurationError(
            f"{name} has shape {shape} in {path} but {spec.full_shape} in the model; "
            "load a checkpoint of the same configuration"
        )


def weight_files(directory: Path) -> dict[str, Path]:
    """Name -> file of a Hugging Face directory's weights.

    Raises:
        ConfigurationError: there are none, or the index points outside the directory.
    """
    if (directory / _INDEX).is_file():
        names = json.loads((directory / _INDEX).read_text())["weight_map"]
    elif (directory / _WEIGHTS).is_file():
        with open_tensors(directory / _WEIGHTS) as file:
            names = dict.fromkeys(file.keys(), _WEIGHTS)
    else:
        raise ConfigurationError(f"{directory} has neither {_WEIGHTS} nor {_INDEX}; give a directory of save_model")
    for file in set(names.values()):
        if Path(file).name != file:
            raise ConfigurationError(
                f"{directory / _INDEX} names the file '{file}' outside the directory; do not load it"
            )
        if not (directory / file).is_file():
            raise ConfigurationError(f"{directory / file} is missing; save the model again")
    return {name: directory / file for name, file in names.items()}


def _match(model: HybridParallelModel, directory: Path) -> tuple[list[tuple[Tensor, str, Path]], list[str], list[str]]:
    """(tensor, name, file) of what is there, names that the files lack on this rank, and names that the model lacks.

    Shapes are compared too: nothing is to be overwritten by a checkpoint that does not fit.
    """
    files = weight_files(directory)
    found, missing = [], []
    for names, tensor in local_tensors(model, unique=False):
        name = next((alias for alias in names if alias in files), None)
        if name is None:
            missing.append(names[0])
            continue
        with open_tensors(files[name]) as file:
            _check_shape(file, name, files[name], spec_of(tensor))
        found.append((tensor, name, files[name]))
    return found, missing, sorted(set(files) - model.origin.names)


@torch.no_grad()
def _copy(found: Sequence[tuple[Tensor, str, Path]]) -> None:
    for tensor, name, path in found:
        tensor.copy_(read_piece(path, name, spec_of(tensor)))


def local_tensors(model: HybridParallelModel, unique: bool) -> Iterator[tuple[list[str], Tensor]]:
    """Parameters and persistent buffers here, each once, with all of its names.

    Args:
        unique: leave out what another stage is the one to save.
    """
    module = model.unwrap()
    persistent = set(module.state_dict(keep_vars=True))
    groups: dict[int, tuple[list[str], Tensor]] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        if name in persistent:
            groups.setdefault(id(tensor), ([], tensor))[0].append(name)
    for names, tensor in groups.values():
        if not unique or tensor not in model.saved_elsewhere:
            yield (
                names + [alias for name in names for alias in model.origin.aliases.get(name, ()) if alias not in names],
                tensor,
            )


def _full_tensors(
    model: HybridParallelModel, mesh: HybridMesh, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors one after the other, on the CPU; all tensor-parallel ranks take part."""
    for names, tensor in local_tensors(model, unique=True):
        full = assemble(tensor, tensor.detach(), mesh.group("tp"))
        if dtype is not None and full.is_floating_point():
            full = full.to(dtype)
        yield names[0], full.cpu().contiguous()


def _shards_of(tensors: Iterator[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + _size(tensor) > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += _size(tensor)
    yield shard


def _publish(model: HybridParallelModel, directory: Path, files: list[tuple[str, list[str], int]]) -> None:
    """Move complete files to their final names, index last; then remove what an earlier save left."""
    count = len(files)
    finals = [_WEIGHTS] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for (path, _, _), final in zip(files, finals, strict=True):
        os.replace(path, directory / final)
    if count > 1:
        weight_map = {name: final for (_, names, _), final in zip(files, finals, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(size for _, _, size in files)}, "weight_map": weight_map}
        write_text(directory / _INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    else:
        (directory / _INDEX).unlink(missing_ok=True)
    for stale in directory.glob("model*.safetensors"):
        if stale.name not in finals:
            stale.unlink()
    if model.origin.config is not None:
        config = copy.deepcopy(model.origin.config)
        config.architectures = [type(model_inside(model.unwrap())).__name__]
        config.save_pretrained(directory)
    generation_config = getattr(model.unwrap(), "generation_config", None)
    if generation_config is not None:
        generation_config.save_pretrained(directory)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(size: str) -> int:
    """Bytes of a phrase such as "5GB".

    Raises:
        ConfigurationError: it is not one.
    """
    number, unit = size[:-2].strip(), size[-2:].upper()
    if unit not in _UNITS or not number.replace(".", "", 1).isdigit():
        raise ConfigurationError(f"size_per_shard='{size}' is not a size; use for example '5GB' or '500MB'")
    return int(float(number) * _UNITS[unit])
