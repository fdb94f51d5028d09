"""Saving of a model as a Hugging Face directory, one tensor at a time, published in one rename.

The tensors of a pipeline stage are distributed over files, and the files over the data-parallel replicas of the stage
(with expert parallelism, over groups of replicas that together hold all experts). The first rank of each such group
writes what the others send, while the next tensor is in flight. No rank holds more than one full tensor and the shards
of the next. Under ZeRO stage 3, the replicas that share a tensor send their slices to the one that writes it: the
groups take turns, in an order that all of them know.

At any moment the directory opens as the old model, as the new one, or not at all. Weights are written under hidden
names, then renamed to names that the index of an earlier save does not use, and the new index replaces the old one in
one rename. Only afterwards are the files of the old index removed.

For many models, transformers uses modules that differ from those in the files: experts fused into one tensor, vision
towers with new names. Its own `save_pretrained` converts all tensors of a model at once; here a few at a time are, as
a dry run on the meta device has found which tensors depend on one another.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint.global_tensor import Gather, ReplicaGather, local_tensors
from plugins.hybrid_parallel.checkpoint.tensor_file import TensorFileWriter, sync_directory
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import DP_CP, EP, EXPERT_REPLICAS, HybridMesh
from shardformer.distributed.process_groups import all_gather_json
from shardformer.lazy.weight_files import INDEX, WEIGHTS
from shardformer.peft import model_inside
from shardformer.shard_spec import EXPERTS, spec_of
from shardformer.utils.freed_memory import FreedMemory

_CONFIG = "config.json"
_PARTIAL = ".partial"
_OURS = re.compile(r"model(-b)?(-\d{5}-of-\d{5})?\.safetensors")


def free_names(directory: Path, count: int) -> list[str]:
    """Create the directory, and choose names for `count` files.

    A single file is named as in transformers. Several files are named `model-00001-of-00003.safetensors` and so on, or
    `model-b-...` if the index of an earlier save uses those names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_partial_files(directory)
    if count == 1:
        return [WEIGHTS]
    in_use = (directory / INDEX).read_text() if (directory / INDEX).is_file() else ""
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    return [name.replace("model-", "model-b-") for name in names] if names[0] in in_use else names


def partial_path(directory: Path, name: str) -> Path:
    """Return the path of a file while it is being written."""
    return directory / f".{name}{_PARTIAL}"


def remove_partial_files(directory: Path) -> None:
    """Remove the files of an interrupted save."""
    for path in directory.glob(f".*{_PARTIAL}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def publish(
    model: HybridParallelModel, directory: Path, weight_map: Mapping[str, str], size: int, dtype: torch.dtype | None
) -> None:
    """Rename complete files to their final names, the index and then the configuration last; then remove old weights.

    Args:
        directory: directory that holds the partial files.
        dtype: dtype of the weights in the files; None for that of the model.
    """
    others = _write_other_files(model, directory, dtype or model.dtype)
    names = set(weight_map.values())
    if len(names) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (others / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for path in others.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for name in sorted(names):
        os.replace(partial_path(directory, name), directory / name)
    sync_directory(directory)
    for path in sorted(others.iterdir(), key=lambda path: (path.name == _CONFIG, path.name == INDEX)):
        os.replace(path, directory / path.name)
    others.rmdir()
    sync_directory(directory)
    if len(names) == 1:
        (directory / INDEX).unlink(missing_ok=True)
    for path in directory.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in names:
            path.unlink()
    sync_directory(directory)


def _write_other_files(model: HybridParallelModel, directory: Path, dtype: torch.dtype) -> Path:
    """Write configuration, generation defaults and custom code of the model to a hidden directory, and return it."""
    inside: Any = model_inside(model.unwrap())
    others = Path(tempfile.mkdtemp(prefix=".", suffix=_PARTIAL, dir=directory))
    if getattr(inside, "config", None) is not None:  # as it is now: scripts change it after `boost`, forward passes too
        config = copy.deepcopy(inside.config)
        config.architectures = [type(inside).__name__]
        config.dtype = str(dtype).removeprefix("torch.")
        if getattr(inside, "_auto_class", None) is not None:
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(inside, others, config=config)
        config.save_pretrained(others)
    if getattr(inside, "generation_config", None) is not None:
        inside.generation_config.save_pretrained(others)
    return others


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_AGREE_EVERY = 2**30  # bytes that a rank writes between two error checks over all ranks


@dataclass(frozen=True)
class Item:
    """Tensors that are written together; usually only one."""

    tensors: Mapping[str, Tensor]  # name in memory -> shard of this rank
    unit: Unit  # names and shapes in the file

    @property
    def size(self) -> int:
        """Size in the file, in bytes."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in self.unit.file.values())


def save_model_files(
    model: HybridParallelModel, mesh: HybridMesh, directory: Path, size_per_shard: str, dtype: torch.dtype | None
) -> None:
    """Write a model as a Hugging Face directory.

    Weights are published first, and the files that `from_pretrained` opens first are published last, so that it never
    sees a partial save. Files of an earlier save stay unchanged until all new files are complete.

    Args:
        dtype: dtype of floating-point weights in the files; None for their own.

    Raises:
        ConfigurationError: the directory cannot be written; raised on all ranks, and the earlier save is kept.
    """
    inside = model_inside(model.unwrap())
    files = cut_by_size([*items_of(inside, local_tensors(model, unique=True), dtype)], _bytes(size_per_shard))
    is_first = mesh.rank(DP_CP) == mesh.rank("tp") == 0
    described = [_describe(file) for file in files] if is_first else []
    stages = [each for each in all_gather_json([mesh.rank("pp"), described]) if each[1]]  # in stage order
    everything = [file for _, found in stages for file in found]  # [names, bytes] per file
    names = raise_on_all_ranks(lambda: free_names(directory, len(everything)) if dist.get_rank() == 0 else [])
    names = all_gather_json(names)[0]
    first = sum(len(found) for stage, found in stages if stage < mesh.rank("pp"))
    paths = [partial_path(directory, name) for name in names[first : first + len(files)]]
    rounds = _rounds([found for _, found in stages], mesh.size(EXPERT_REPLICAS))
    try:
        _write(model, [*zip(paths, files, strict=True)], mesh, dtype, rounds)
        weight_map = {name: final for final, file in zip(names, everything, strict=True) for name in file[0]}
        size = sum(size for _, size in everything)
        raise_on_all_ranks(lambda: publish(model, directory, weight_map, size, dtype) if dist.get_rank() == 0 else None)
    except ConfigurationError:
        if dist.get_rank() == 0:
            with suppress(OSError):
                remove_partial_files(directory)
        raise


def items_of(
    inside: nn.Module, named: Iterable[tuple[Sequence[str], Tensor]], dtype: torch.dtype | None
) -> Iterator[Item]:
    """Yield what a stage writes of its tensors.

    Args:
        inside: transformers model that owns the tensors.
        named: all names of a tensor in the model, and its shard on this rank.
        dtype: dtype of floating-point tensors in the files; None for their own.
    """
    tied = getattr(inside, "all_tied_weights_keys", {})  # name -> the name to which `from_pretrained` ties it
    ignored = set(getattr(inside, "_keys_to_ignore_on_save", None) or ())
    tensors = {}
    for names, tensor in named:
        # As in transformers, skip what the constructor recomputes, unless it is being trained.
        if tensor.requires_grad or ignored.isdisjoint(names):
            tensors |= dict.fromkeys((name for name in names if tied.get(name) not in names), tensor)
    forms = {}
    for name, tensor in tensors.items():
        converts = dtype is not None and tensor.is_floating_point()
        forms[name] = (dtype if converts else tensor.dtype, spec_of(tensor).full_shape)
    for unit in units_of(inside, forms):
        yield Item({name: tensors[name] for name in unit.memory}, unit)


def cut_by_size(items: Sequence[Item], limit: int) -> list[list[Item]]:
    """Split items into files, in order; a file exceeds `limit` bytes only if it holds a single item."""
    files: list[list[Item]] = []
    room = 0
    for item in items:
        if not files or item.size > room:
            files.append([])
            room = limit
        files[-1].append(item)
        room -= item.size
    return files


def _describe(file: Sequence[Item]) -> tuple[list[str], int]:
    """Return the tensor names in a file and its size in bytes."""
    return [name for item in file for name in item.unit.file], sum(item.size for item in file)


def _rounds(stages: Sequence[Sequence[tuple[list[str], int]]], replicas: int) -> int:
    """Return the number of error checks that the busiest writer needs; all ranks must run the same number."""
    shares = [sum(size for _, size in files[replica::replicas]) for files in stages for replica in range(replicas)]
    return max(shares, default=0) // _AGREE_EVERY + 1


def _write(
    model: HybridParallelModel,
    files: Sequence[tuple[Path, Sequence[Item]]],
    mesh: HybridMesh,
    dtype: torch.dtype | None,
    rounds: int,
) -> None:
    """Gather and write the items of a stage's files; the first rank of each group writes its share of the files.

    Args:
        files: (path, items) of each file of this stage.
        dtype: dtype of floating-point tensors in the files; None for their own.
        rounds: number of error checks, the same on all ranks.

    Raises:
        ConfigurationError: a rank could not write; all ranks raise after at most `_AGREE_EVERY` more bytes.
    """
    gathering, writer = _Gathering(model, dtype, mesh), mesh.rank(EXPERT_REPLICAS)
    turns = [turn for turn in _turns(files, mesh.size(EXPERT_REPLICAS)) if gathering.takes_part(turn)]
    output = _Output(files[writer :: mesh.size(EXPERT_REPLICAS)], model_inside(model.unwrap()))
    on_its_way = [gathering.begin(turn) for turn in turns[:1]]
    asked, freed = 0, FreedMemory(0)
    try:
        for index, turn in enumerate(turns):
            while asked < min(turn.checks, rounds - 1):
                raise_on_all_ranks(output.raise_stored)
                asked += 1
            on_its_way += [gathering.begin(each) for each in turns[index + 1 : index + 2]]
            full = {name: gather.finish() for name, gather in on_its_way.pop(0).items()}
            if turn.writer == writer and mesh.rank(EXPERTS) == 0:
                output.put(turn.item, full)
            del full
            freed.add(turn.item.size)
        for _ in range(rounds - asked):
            raise_on_all_ranks(output.raise_stored)
    finally:
        for gathers in on_its_way:  # complete the gathers that were in flight when an error was raised
            for gather in gathers.values():
                gather.finish()
        output.close()


@dataclass(frozen=True)
class _Turn:
    """One item, in the order in which all ranks of a stage gather them."""

    item: Item
    writer: int  # the group of replicas that writes it
    checks: int  # number of error checks that come before it


def _turns(files: Sequence[tuple[Path, Sequence[Item]]], writers: int) -> Iterator[_Turn]:
    """Yield the items of a stage's files, of all writers in turn."""
    shares = [[item for _, file in files[writer::writers] for item in file] for writer in range(writers)]
    written = 0
    for items in zip_longest(*shares):
        for writer, item in enumerate(items):
            if item is not None:
                yield _Turn(item, writer, written // (_AGREE_EVERY * writers))
                written += item.size


class _Gathering:
    """Starts the gathers of items on the ranks that have parts of them.

    Args:
        dtype: dtype of floating-point tensors in the files; None for their own.
    """

    def __init__(self, model: HybridParallelModel, dtype: torch.dtype | None, mesh: HybridMesh) -> None:
        self._gathers, self._dtype, self._mesh = model.gathers, dtype, mesh
        self._places = all_gather_json([mesh.rank(EP), mesh.rank(EXPERT_REPLICAS)]) if model.gathers else []

    def takes_part(self, turn: _Turn) -> bool:
        """Return whether this rank has anything to send or to receive."""
        if turn.writer == self._mesh.rank(EXPERT_REPLICAS):
            return True
        return any(self._destination(tensor, turn) is not None for tensor in turn.item.tensors.values())

    def begin(self, turn: _Turn) -> dict[str, Gather | ReplicaGather]:
        """Start to gather the tensors of an item, by name."""
        begun: dict[str, Gather | ReplicaGather] = {}
        for name, tensor in turn.item.tensors.items():
            axis, holder = spec_of(tensor).axis, self._gathers.holder(tensor)
            group, destination = self._mesh.group(axis), self._destination(tensor, turn)
            if destination is not None:
                begun[name] = ReplicaGather.begin(tensor, holder, self._dtype, group, destination)
            elif holder is None and self._is_of_writer(axis, turn):
                begun[name] = Gather.begin(tensor, self._dtype, group)
        return begun

    def _is_of_writer(self, axis: str, turn: _Turn) -> bool:
        # Tensors other than experts are replicated over EP, so only the tensor-parallel group of the writer sends them.
        return turn.writer == self._mesh.rank(EXPERT_REPLICAS) and (axis == EXPERTS or self._mesh.rank(EP) == 0)

    def _destination(self, tensor: Tensor, turn: _Turn) -> int | None:
        """Return which of the ranks that share a tensor with this one gathers it for the writer; None if none does."""
        holder = self._gathers.holder(tensor)
        if holder is None:
            return None
        place = [self._mesh.rank(EP) if spec_of(tensor).axis == EXPERTS else 0, turn.writer]
        ranks = dist.get_process_group_ranks(holder.options.shard_group)
        return next((index for index, rank in enumerate(ranks) if self._places[rank] == place), None)


class _Output:
    """Writer of the files of this rank, one after another.

    After an error it discards further input, so that the sending ranks do not block.

    Args:
        files: (path, items) of each file.
        model: transformers model that owns the tensors.
    """

    def __init__(self, files: Sequence[tuple[Path, Sequence[Item]]], model: nn.Module) -> None:
        self._todo, self._model = list(files), model
        self._file: TensorFileWriter | None = None
        self._left = 0
        self._problem: OSError | ValueError | None = None

    def put(self, item: Item, full: dict[str, Tensor]) -> None:
        """Write the next item, given its full tensors."""
        if self._problem is not None:
            return
        try:
            if self._file is None:
                path, items = self._todo.pop(0)
                entries = {name: form for each in items for name, form in each.unit.file.items()}
                self._file, self._left = TensorFileWriter(path, entries, {"format": "pt"}), len(items)
            for name, tensor in to_files(self._model, item.unit, full).items():
                self._file.write(name, tensor)
            self._left -= 1
            if not self._left:
                self._file.finish()
                self._file = None
        except (OSError, ValueError) as error:
            self._problem = error

    def raise_stored(self) -> None:
        """Raise the error of a file that could not be written, if any."""
        if self._problem is not None:
            raise self._problem

    def close(self) -> None:
        """Close a file that an error left open."""
        if self._file is not None:
            self._file.close()


def _bytes(size: str) -> int:
    """Convert a size such as "5GB" to bytes."""
    number, unit = (size[:-2].strip(), size[-2:].upper()) if isinstance(size, str) else ("", "")
    if unit not in _UNITS or not number.replace(".", "", 1).isdigit():
        raise ConfigurationError(f"size_per_shard={size!r} is not a size; use for example '5GB' or '500MB'")
    return int(float(number) * _UNITS[unit])


Form = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Unit:
    """A group of tensors that are converted together; most groups are one tensor that needs no conversion."""

    memory: tuple[str, ...]  # names in memory
    file: Mapping[str, Form]  # name in files -> (dtype, shape)
    keeps_values: bool  # the group is a single tensor that is at most renamed


def units_of(model: nn.Module, tensors: Mapping[str, Form]) -> list[Unit]:
    """Group a model's `tensors` by their dependencies in the conversion, and find their names in files."""
    if not _conversions(model):
        return [Unit((name,), {name: form}, keeps_values=True) for name, form in tensors.items()]
    traced = {name: _Traced.of(name, *form) for name, form in tensors.items()}
    units: dict[str, Unit] = {}  # name in memory -> its unit
    for name, value in _reverted(model, traced).items():
        parts = [units[source] for source in sorted(value.sources) if source in units]
        memory = sorted(value.sources.union(*(part.memory for part in parts)))
        file = {name: (value.dtype, tuple(value.shape))}
        for part in parts:
            file |= part.file
        unit = Unit(tuple(memory), file, keeps_values=any(value is each for each in traced.values()))
        units.update(dict.fromkeys(memory, unit))
    return list({id(unit): unit for unit in units.values()}.values())


def to_files(model: nn.Module, unit: Unit, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors of a unit to their layout in files."""
    if unit.keeps_values:
        return dict(zip(unit.file, tensors.values(), strict=True))
    return _reverted(model, tensors)


def _reverted(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))


def _conversions(model: nn.Module) -> list[Any]:
    """Return transformers' file-to-memory transforms, preferring those used when the model was loaded."""
    if not hasattr(model, "config"):
        return []
    known = getattr(model, "_weight_conversions", None)
    if known is not None:
        return known
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    transforms = get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in transforms if not isinstance(each, PrefixChange)]


class _Traced(Tensor):
    """A meta tensor that records which tensors it was computed from."""

    sources: frozenset[str]

    @staticmethod
    def of(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> _Traced:
        tensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(_Traced)
        tensor.sources = frozenset([name])
        return tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Traced)]
        sources = frozenset().union(*(getattr(each, "sources", ()) for each in given))
        for each in tree_leaves(result):
            if isinstance(each, _Traced) and not hasattr(each, "sources"):
                each.sources = sources
        return result
