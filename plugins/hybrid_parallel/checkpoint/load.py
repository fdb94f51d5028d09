"""Loading of a model from a Hugging Face directory; each rank reads only its own slices."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint.global_tensor import local_tensors
from plugins.hybrid_parallel.checkpoint.tensor_file import TensorFileReader, for_each
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.zero.stage3 import ParameterGathers
from shardformer.distributed.process_groups import all_gather_json
from shardformer.lazy.recording import FileTensor, open_directory
from shardformer.lazy.weight_files import WeightFileError, check_shape, open_tensors, read_piece, weight_files
from shardformer.peft import model_inside
from shardformer.shard_spec import ShardSpec, spec_of
from shardformer.utils.freed_memory import FreedMemory

# (local tensor, function: spec -> values of its shard, location of the values in a file if stored unconverted)
Found = list[tuple[Tensor, Callable[[ShardSpec], Tensor], Any]]


def load_model_files(model: HybridParallelModel, directory: Path, strict: bool, allow_bin: bool) -> None:
    """Read the slices of each local tensor from a directory.

    Args:
        directory: Hugging Face directory.
        strict: raise if the directory lacks tensors or has unexpected ones.
        allow_bin: read `.bin` files if there are no safetensors files.
    """
    inside = model_inside(model.unwrap())
    is_whole = inside is model.unwrap()  # only peft's own files use its parameter names
    match = _match_pretrained if is_whole and hasattr(inside, "from_pretrained") else _match_names
    found, missing, unexpected = raise_on_all_ranks(lambda: match(model, directory, allow_bin))
    # Each stage knows only its own parameters, but the message must name those of all stages.
    missing = sorted({name for names in all_gather_json(missing) for name in names})
    if strict and (missing or unexpected):
        raise ConfigurationError(
            f"{directory} does not fit the model: missing {missing[:5]}, unexpected {unexpected[:5]}; "
            "load a checkpoint of the same class, or pass strict=False"
        )
    with model.gathers.changing():
        raise_on_all_ranks(lambda: _copy(found, model.gathers))
    for optimizer in model.optimizers:
        optimizer.refresh_masters()


def _match_pretrained(
    model: HybridParallelModel, directory: Path, allow_bin: bool
) -> tuple[Found, list[str], list[str]]:
    """Find the local tensors in a directory as transformers does; return matches, missing names and unexpected names.

    Shapes are checked before any tensor is overwritten.
    """
    opened = open_directory(type(model.unwrap()), model.origin.config, directory, model.dtype, allow_bin)
    for name, in_files, in_model in opened.mismatched:
        raise WeightFileError(
            f"{name} has shape {in_files} in {directory} but {in_model} in the model; "
            "load a checkpoint of the same configuration"
        )
    found: Found = []
    for names, tensor in local_tensors(model, unique=False):
        name = next(filter(opened.values.is_read, names), None)
        if name is not None:
            found.append((tensor, partial(opened.values, name), opened.values.source(name)))
    # A class need not declare what its `__init__` ties.
    aliases = model.origin.aliases
    missing = [each for each in opened.missing if not any(map(opened.values.is_read, aliases.get(each, ())))]
    return found, missing, opened.unexpected


def _match_names(model: HybridParallelModel, directory: Path, _: bool) -> tuple[Found, list[str], list[str]]:
    """Find the local tensors by their names in the files, for a model that is not a transformers model."""
    files = weight_files(directory)
    found: Found = []
    missing = []
    for names, tensor in local_tensors(model, unique=False):
        name = next((alias for alias in names if alias in files), None)
        if name is None:
            missing.append(names[0])
            continue
        with open_tensors(files[name]) as file:
            check_shape(file, name, files[name], spec_of(tensor))
        found.append((tensor, partial(read_piece, files[name], name), None))
    return found, missing, sorted(set(files) - model.origin.names)


@torch.no_grad()
def _copy(found: Found, gathers: ParameterGathers) -> None:
    in_files: dict[Path, list[tuple[str, Tensor]]] = {}
    freed = FreedMemory(sum(tensor.nbytes for tensor, *_ in found))
    for tensor, read, source in found:
        if isinstance(source, FileTensor):
            in_files.setdefault(source.path, []).append((source.name, tensor))
        else:
            holder = gathers.holder(tensor)
            if holder is None:
                tensor.copy_(read(spec_of(tensor)))
            else:
                holder.fill(tensor, partial(read, spec_of(tensor)))
            freed.add(math.prod(spec_of(tensor).full_shape) * tensor.element_size())
    for path, tensors in in_files.items():
        try:
            with TensorFileReader(path) as file:
                for_each(partial(_read, file), [each for each in tensors if gathers.holder(each[1]) is None])
                for name, tensor in tensors:  # one at a time: each is read whole
                    holder = gathers.holder(tensor)
                    if holder is not None:
                        holder.fill(tensor, partial(_read_whole, file, name, tensor))
                        freed.add(tensor.nbytes)
        except SafetensorError as error:
            raise WeightFileError(f"{path} is not a complete safetensors file ({error}); save it again") from None


def _read_whole(file: TensorFileReader, name: str, tensor: Tensor) -> Tensor:
    """Return the slices of a local tensor without values."""
    read = torch.empty(tensor.shape, dtype=tensor.dtype)
    read.shard_spec = spec_of(tensor)
    _read(file, (name, read))
    return read


@torch.no_grad()  # grad mode is thread-local
def _read(file: TensorFileReader, wanted: tuple[str, Tensor]) -> None:
    """Fill a local tensor with its slices of the tensor in the file."""
    (name, tensor), position = wanted, 0
    spec, tensor = spec_of(tensor), tensor.detach()
    if spec.dim is None:
        file.read(name, [0] * tensor.dim(), tensor.shape, tensor)
        return
    for start, stop, padding in spec.pieces():
        offsets, lengths = [0] * tensor.dim(), list(spec.full_shape)
        offsets[spec.dim], lengths[spec.dim] = start, stop - start
        file.read(name, offsets, lengths, tensor.narrow(spec.dim, position, stop - start))
        tensor.narrow(spec.dim, position + stop - start, padding).zero_()
        position += stop - start + padding
