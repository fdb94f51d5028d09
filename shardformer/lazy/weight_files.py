"""Weight files of a Hugging Face directory: index of tensors, and reading of single pieces."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardformer.shard_spec import ShardSpec
from shardformer.utils.typed_json import read_json_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_AT_ONCE = 2**22  # elements of a full tensor that are read at a time
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class WeightFileError(ValueError):
    """Weight file that cannot be used; the message names the file, the problem and the remedy."""


@contextmanager
def refuses_code(name: str) -> Iterator[None]:
    """Say what `torch.load(weights_only=True)` refuses in this context; torch's own words advise to run the code.

    Raises:
        WeightFileError: the file that `name` stands for holds objects of classes, or calls functions.
    """
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":  # of the module that nothing here imports
            raise
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = "more than plain values" if found is None else f"'{found[1]}'"
        raise WeightFileError(
            f"{name} holds {what}, whose code would run when it is read; keep tensors, numbers, texts and containers "
            "of them in it"
        ) from None


def weight_files(directory: Path) -> dict[str, Path]:
    """Return tensor -> file of a directory's safetensors; WeightFileError if there are none, or one is outside."""
    if (directory / INDEX).is_file():
        names = files_of_index(directory, INDEX)
    elif (directory / WEIGHTS).is_file():
        with open_tensors(directory / WEIGHTS) as file:
            names = dict.fromkeys(file.keys(), WEIGHTS)
    else:
        raise WeightFileError(f"{directory} has neither {WEIGHTS} nor {INDEX}; give a directory of save_model")
    return {name: directory / file for name, file in names.items()}


def has_bin_files(directory: Path) -> bool:
    """Return whether the weights are files of torch.save; WeightFileError if one is outside the directory."""
    if (directory / BIN_INDEX).is_file():
        return bool(files_of_index(directory, BIN_INDEX))
    return (directory / BIN).is_file()


def files_of_index(directory: Path, index: str) -> dict[str, str]:
    """Return tensor -> file of an index; WeightFileError if it is broken or names a missing or outside file."""
    try:
        names = read_json_object(directory / index).get("weight_map")
    except ValueError as error:
        raise WeightFileError(str(error)) from None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise WeightFileError(f"{directory / index} is not a complete index (no weight_map); save the model again")
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise WeightFileError(f"{directory / index} names the file '{file}' outside the directory; do not load it")
        if index == INDEX and not file.endswith(".safetensors"):
            raise WeightFileError(f"{directory / index} names the file '{file}', no safetensors file; do not load it")
        if not (directory / file).is_file():
            raise WeightFileError(f"{directory / file} is missing; save the model again")
        check_inside(directory / file)
    return names


def check_paths(paths: list[Path], directory: Path, allow_bin: bool) -> None:
    """Refuse, by WeightFileError, files outside of the index's directory, and pickles unless `allow_bin`."""
    for path in paths:
        if ".." in path.parts[len(directory.parts) :] or (directory.is_dir() and not path.is_relative_to(directory)):
            raise WeightFileError(f"an index in {directory} names '{path}' outside the directory; do not load it")
        if path.suffix != ".safetensors" and not allow_bin:
            raise WeightFileError(
                f"{path} is no safetensors file; save the model as safetensors, or, where you trust it, use "
                "record_module_init(allow_bin=True)"
            )


def check_inside(path: Path) -> None:
    """Refuse, by WeightFileError, a symbolic link out of the directory, unless into a hub cache's blob store."""
    if not path.is_symlink():
        return
    directory, target = path.parent.resolve(), path.resolve()
    in_cache = directory.parent.name == "snapshots" and target.is_relative_to(directory.parent.parent / "blobs")
    if not (target.is_relative_to(directory) or in_cache):
        raise WeightFileError(f"{path} is a link to {target}, outside the directory; do not load it, or copy the file")


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file by `safe_open`; raises WeightFileError, with its name, if it is broken."""
    check_inside(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise WeightFileError(f"{path} is not a complete safetensors file ({error}); save it again") from None


def read_piece(path: Path, name: str, spec: ShardSpec) -> Tensor:
    """Read only this rank's piece of a full tensor in a file; WeightFileError if it has another shape."""
    with open_tensors(path) as file:
        check_shape(file, name, path, spec)
        if spec.dim is None:
            return _read_whole(path, name, file)
        view, parts = file.get_slice(name), []
        for start, stop, padding in spec.pieces():
            part = view[(slice(None),) * spec.dim + (slice(start, stop),)]
            shape = list(part.shape)
            shape[spec.dim] = padding
            parts += [part, part.new_zeros(shape)]
        return torch.cat(parts, dim=spec.dim)


def _read_whole(path: Path, name: str, file: Any) -> Tensor:
    """Read a full tensor of an open file, a large one in parts: pages of a mapping are resident until it is closed."""
    view = file.get_slice(name)
    shape = view.get_shape()
    of_row = math.prod(shape[1:])
    rows = max(1, _AT_ONCE // max(1, of_row))
    if not shape or shape[0] <= rows:
        return file.get_tensor(name).clone()  # a view of the memory map would keep the file open
    whole = torch.empty(shape, dtype=view[:0].dtype)
    for start in range(0, shape[0], rows):
        with open_tensors(path) as part:
            whole[start : start + rows] = part.get_slice(name)[start : start + rows]
    return whole


def check_shape(file: Any, name: str, path: Path, spec: ShardSpec) -> None:
    """Raise WeightFileError if the shape in an open file is not that of the model's whole tensor."""
    shape = tuple(file.get_slice(name).get_shape())
    if shape != spec.full_shape:
        raise WeightFileError(
            f"{name} has shape {shape} in {path} but {spec.full_shape} in the model; "
            "load a checkpoint of the same configuration"
        )
