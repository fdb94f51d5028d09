"""HybridParallelCheckpointIO: checkpointing of the hybrid-parallel plugin. Each rank reads its own slices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from booster import failure
from booster.errors import ConfigurationError
from booster.logging import get_logger
from booster.plugin import CheckpointIO, SavedCheckpoint
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint import global_tensor, tensor_file
from plugins.hybrid_parallel.checkpoint.atomic_save import (
    MANIFEST,
    BackgroundWriter,
    PendingSave,
    Staging,
    checkpoints_in,
    data_file,
    is_whole,
    keep_latest,
    partial_directory,
    remove_remains,
)
from plugins.hybrid_parallel.checkpoint.checks import refuse_bare_adapters
from plugins.hybrid_parallel.checkpoint.dcp_storage import read_tensors, write_tensors
from plugins.hybrid_parallel.checkpoint.peft import has_adapters, load_adapter_files, save_adapter_files
from plugins.hybrid_parallel.checkpoint.save import save_model_files
from plugins.hybrid_parallel.checkpoint.stream import WeightStream
from plugins.hybrid_parallel.checkpoint.training_state import (
    KEPT,
    MEMORY,
    Snapshot,
    StateSnapshot,
    keep_global_batch,
    manifest_of,
    newest_snapshot,
    restore,
    take_snapshot,
)
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import HybridMesh, control_group
from plugins.hybrid_parallel.guards import check_boosted, check_dtype
from plugins.hybrid_parallel.zero.stage3 import ParameterGathers
from shardformer.distributed.collectives import world_timeout
from shardformer.distributed.process_groups import all_gather_json, gather_json
from shardformer.lazy.recording import FileTensor, open_directory
from shardformer.lazy.weight_files import WeightFileError, check_shape, open_tensors, read_piece, weight_files
from shardformer.peft import model_inside
from shardformer.shard_spec import ShardSpec, spec_of
from shardformer.utils.freed_memory import FreedMemory
from shardformer.utils.typed_json import from_json

_logger = get_logger(__name__)


class HybridParallelCheckpointIO(CheckpointIO):
    """Saves and loads models and training states under any parallel layout."""

    def __init__(self, mesh: HybridMesh) -> None:
        self.mesh = mesh
        self._background, self._staging = BackgroundWriter(), Staging()

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group used by the main thread."""
        return control_group()

    @cached_property
    def background_group(self) -> dist.ProcessGroup:
        """Process group for background saves, separate so that their collectives do not mix with the main thread's."""
        return dist.new_group(backend="gloo", timeout=world_timeout(), group_desc="asynchronous saves")

    @failure.guard("booster.save_model")
    def save_model(
        self, model: nn.Module, directory: str, size_per_shard: str = "5GB", dtype: torch.dtype | None = None
    ) -> None:
        """Write a Hugging Face directory, or the adapters of a peft model.

        Args:
            dtype: dtype of the weights in the files; None for that of the model.

        Raises:
            ConfigurationError: an argument is invalid.
        """
        check_boosted({"model": model})
        check_dtype(dtype)
        if has_adapters(model.unwrap()):
            save_adapter_files(model, self.mesh, Path(directory), dtype)
        else:
            refuse_bare_adapters(model.unwrap())
            save_model_files(model, self.mesh, Path(directory), size_per_shard, dtype)

    @failure.guard("booster.load_model")
    def load_model(self, model: nn.Module, directory: str, strict: bool = True, allow_bin: bool = False) -> None:
        """Read a Hugging Face directory, as the model class's `from_pretrained` would, or the adapters of a peft model.

        Args:
            strict: raise if the directory lacks tensors or has unexpected ones.
            allow_bin: read `.bin` files with `torch.load(weights_only=True)` if there are no safetensors files.
        """
        check_boosted({"model": model})
        if has_adapters(model.unwrap()):
            load_adapter_files(model, Path(directory), strict)
        else:
            refuse_bare_adapters(model.unwrap())
            load_model_files(model, Path(directory), strict, allow_bin)

    @failure.guard("the whole state dict")
    def whole_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the state dict of the whole model, on all ranks, in host memory."""
        check_boosted({"model": model})
        with model.summon_full_params(writeback=False):
            return global_tensor.whole_state_dict(model, self.mesh)

    def weights(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        bucket_size_in_mb: float,
        to_rank: int | None,
        merge_adapters: bool,
        shards: bool,
    ) -> Iterator[tuple[str, Any]]:
        """Return an iterator over (name, tensor) of what `save_model` would write; see `Booster.weights`."""
        check_boosted({"model": model})
        check_dtype(dtype)
        if not isinstance(bucket_size_in_mb, int | float) or not bucket_size_in_mb > 0:
            raise ConfigurationError(f"bucket_size_in_mb={bucket_size_in_mb!r} is not a size; use for example 512")
        if to_rank is not None and to_rank not in range(dist.get_world_size()):
            raise ConfigurationError(
                f"to_rank={to_rank!r} is no rank of {dist.get_world_size()}; use 0, or None for all"
            )
        if shards and to_rank is not None:
            raise ConfigurationError("shards=True gives each rank its own pieces; leave out to_rank")
        size = int(bucket_size_in_mb * 2**20)
        stream = WeightStream(model, self.mesh, dtype, size, to_rank, merge_adapters)
        return stream.shards() if shards else iter(stream)

    def write_part(self, model: nn.Module, directory: str) -> list[Any]:
        """Write what this rank has of a model to a folder, without other ranks; return its description as JSON."""
        path = Path(directory) / data_file(0, dist.get_rank())
        path.parent.mkdir(parents=True, exist_ok=True)
        # The device may be waiting for another rank in the stream that training uses.
        stream = torch.cuda.Stream() if self.mesh.device.type == "cuda" else None
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            return [write_tensors(global_tensor.model_tensors(model, self.mesh, ()), path)]

    def joined_parts(self, model: nn.Module, directory: str, parts: list[list[Any]]) -> dict[str, Tensor]:
        """Return the state dict of the whole model, from what `write_part` wrote and returned on all ranks."""
        saved = tensor_file.merge_tensors([written for written, *_ in parts])
        for tensor in saved.values():  # several stages have the buffers of the root model
            tensor.chunks[:] = {chunk.offsets: chunk for chunk in reversed(tensor.chunks)}.values()
        whole = {name: torch.empty(each.shape, dtype=each.torch_dtype) for name, each in saved.items()}
        places = {name: global_tensor.GlobalTensor.whole(value) for name, value in whole.items()}
        try:
            read_tensors(places, Path(directory), tensor_file.Manifest(0, {}, saved, {}))
        except OSError as error:
            raise ConfigurationError(
                f"only rank 0 saves this model, and the parts of the others are in {directory} on their machines "
                f"({error}); call it on all ranks, or give a folder on a file system that they share"
            ) from error
        state = {name.removeprefix(global_tensor.PREFIX): value for name, value in whole.items()}
        aliases = {other: value for name, value in state.items() for other in model.origin.aliases.get(name, ())}
        return state | aliases

    def save_optimizer(self, optimizer: torch.optim.Optimizer, directory: str) -> None:
        """Write a checkpoint that holds only the optimizer and the random states."""
        self.save_checkpoint(directory, {"optimizer": optimizer}, {})

    def load_optimizer(self, optimizer: torch.optim.Optimizer, directory: str) -> None:
        """Read the optimizer state from a checkpoint; random states are not changed."""
        check_boosted({"optimizer": optimizer})
        self._background.finish()
        manifest = self._verified(Path(directory))
        fill = partial(read_tensors, directory=Path(directory), manifest=manifest)
        restore(self.mesh, {"optimizer": optimizer}, fill, manifest, self.group, with_random=False)

    @failure.guard("booster.save_checkpoint")
    def save_checkpoint(
        self,
        directory: str,
        objects: dict[str, Any],
        extra: dict[str, Any],
        asynchronous: bool = False,
        keep_last: int | None = None,
    ) -> SavedCheckpoint:
        """Write a checkpoint to a temporary directory, then publish it atomically.

        Args:
            directory: final path of the checkpoint, the same on all ranks.
            objects: objects to save, by kind ("model", "optimizer", "lr_scheduler", "dataloader").
            asynchronous: write a copy of the state in the background while training continues.
            keep_last: number of checkpoints in the folder to keep; None keeps all.

        Returns:
            A handle of the save.

        Raises:
            ConfigurationError: the arguments are invalid, or the checkpoint cannot be written; on all ranks.
        """
        check_boosted(objects)
        began = time.perf_counter()
        self._background.finish()
        elsewhere: set[str] = set()
        if objects.get("model") is not None:
            elsewhere = global_tensor.buffers_of_earlier_stages(objects["model"], self.mesh, self.group)

        def prepare() -> tuple[Path, StateSnapshot]:
            if keep_last is not None and keep_last < 1:
                raise ConfigurationError(f"keep_last={keep_last} would keep nothing; use keep_last=1 or more")
            snapshot = take_snapshot(self.mesh, objects, extra, elsewhere)
            return Path(directory).resolve(), self._staging.copy(snapshot) if asynchronous else snapshot

        path, snapshot = raise_on_all_ranks(prepare, self.group)
        if not asynchronous:
            self._write(path, snapshot, keep_last, self.group)
            return SavedCheckpoint(path, time.perf_counter() - began)
        group = self.background_group
        saved = self._background.start(path, began, lambda: self._write(path, snapshot, keep_last, group))
        _logger.info("the checkpoint %s is being saved; training was blocked for %.3f s", path, saved.stall_s)
        return saved

    @failure.guard("booster.load_checkpoint")
    def load_checkpoint(self, directory: str, objects: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
        """Read a checkpoint; random states are restored only if the layout is the same.

        Args:
            directory: a checkpoint, or the folder of the checkpoints if `resume` is given.
            resume: "latest" for the newest complete checkpoint in `directory`.

        Returns:
            The `extra` values of the checkpoint.
        """
        check_boosted(objects)
        self._background.finish()
        if resume not in (None, "latest"):
            raise ConfigurationError(f"resume='{resume}' is not known; use resume='latest' or leave it out")
        found = self._snapshot(directory, resume is not None)
        if found is not None:
            loader = objects.get("dataloader")
            raise_on_all_ranks(lambda: keep_global_batch(loader, found.manifest.state["dataloader"]), self.group)
            manifest, fill = found.manifest, partial(found.fill, device=self.mesh.device)
        else:
            path, manifest = self._latest(Path(directory)) if resume else (Path(directory), None)
            manifest = manifest or self._verified(path)
            fill = partial(read_tensors, directory=path, manifest=manifest)
        model = objects.get("model")
        with nullcontext() if model is None else model.gathers.changing():
            restore(self.mesh, objects, fill, manifest, self.group)
        return from_json(manifest.state["extra"])

    def latest_checkpoint(self, folder: str) -> str | None:
        """Return the newest complete checkpoint in a folder, or the name of a newer snapshot; None without either."""
        self._background.finish()
        found = self._snapshot(folder, True)
        return self._newest_on_disk(folder) if found is None else f"{MEMORY}{found.number}"

    def finish_saving(self) -> None:
        """Wait for a background save to finish."""
        self._background.finish()

    # ----- saving -----

    def _write(self, path: Path, snapshot: StateSnapshot, keep_last: int | None, group: dist.ProcessGroup) -> None:
        """Write this rank's part of a snapshot, and publish the checkpoint; may run concurrently with training."""
        partial = self._start(path, group)
        try:
            sequence = self._from_first(lambda: partial.sequence, group)
            part = raise_on_all_ranks(lambda: _write_part(path, sequence, snapshot), group)
            parts = gather_json(part, group)
            raise_on_all_ranks(lambda: partial and _publish(partial, snapshot, parts, keep_last), group)
        except ConfigurationError:  # raised on all ranks, so all can take part in the cleanup
            raise_on_all_ranks(lambda: partial and partial.discard(), group)
            raise
        finally:
            if partial is not None:
                partial.close()

    def _start(self, path: Path, group: dist.ProcessGroup) -> PendingSave | None:
        """Check that all ranks save to the same path, and return the pending save on rank 0 and None on the others."""
        given = all_gather_json(str(path), group)
        for rank, other in enumerate(given):
            if other != given[0]:
                raise ConfigurationError(
                    f"rank {rank} was given the directory {other}, rank 0 {given[0]}; give the same to all ranks"
                )
        return raise_on_all_ranks(lambda: PendingSave(path) if dist.get_rank() == 0 else None, group)

    # ----- loading -----

    def _snapshot_folders(self, folder: Path | None) -> list[Path]:
        """Return where snapshots may be: with a folder of checkpoints, what jobs that have ended have left there."""
        return [] if folder is None else sorted(folder.glob(KEPT))

    def _snapshot(self, directory: str, newest: bool) -> Snapshot | None:
        """Return the snapshot that `directory` names, or with `newest` the newest, if no checkpoint there is newer."""
        if str(directory).startswith(MEMORY):
            found = newest_snapshot(self._snapshot_folders(None), self.group)
            if found is None:
                raise ConfigurationError(f"the snapshot {directory} does not exist any more; give resume='latest'")
            return found
        found = newest_snapshot(self._snapshot_folders(Path(directory)), self.group) if newest else None
        path = None if found is None else self._newest_on_disk(directory)
        if path is None:
            return found
        on_disk = self._from_first(lambda: tensor_file.Manifest.read(Path(path) / MANIFEST).state["step"], self.group)
        return None if (on_disk or 0) > (found.manifest.state["step"] or 0) else found

    def _newest_on_disk(self, folder: str) -> str | None:
        return self._from_first(
            lambda: next((str(path) for path in checkpoints_in(Path(folder)) if is_whole(path)), None), self.group
        )

    def _verified(self, path: Path) -> tensor_file.Manifest:
        """Read the manifest of a checkpoint, and verify all files against it; each rank verifies some of the files."""
        manifest = raise_on_all_ranks(lambda: tensor_file.Manifest.read(path / MANIFEST), self.group)
        if len(set(all_gather_json(manifest.checksum, self.group))) > 1:
            raise ConfigurationError(f"{path} was overwritten, or differs between ranks; load it again")
        rank, world_size = dist.get_rank(), dist.get_world_size()

        def verify() -> None:
            for name in sorted(manifest.files)[rank::world_size]:
                manifest.verify_file(path, name)

        raise_on_all_ranks(verify, self.group)
        return manifest

    def _latest(self, folder: Path) -> tuple[Path, tensor_file.Manifest]:
        """Return the newest checkpoint in a folder that passes verification, and its manifest."""
        candidates = self._from_first(lambda: [str(path) for path in checkpoints_in(folder)], self.group)
        for path in map(Path, candidates):
            try:
                return path, self._verified(path)
            except ConfigurationError as error:
                if dist.get_rank() == 0:
                    _logger.warning("%s; trying the checkpoint before it", error)
        raise ConfigurationError(
            f"{folder} holds no {'readable ' if candidates else ''}checkpoint; "
            "give the folder of the checkpoints, or start without resume='latest'"
        )

    @staticmethod
    def _from_first(look: Callable[[], Any], group: dist.ProcessGroup) -> Any:
        """Return the result of `look` on rank 0: other ranks might see the file system at a later moment."""
        found = raise_on_all_ranks(lambda: look() if dist.get_rank() == 0 else None, group)
        return all_gather_json(found, group)[0]


def _write_part(path: Path, sequence: int, snapshot: StateSnapshot) -> list[Any]:
    """Write the file of this rank, and return its description as JSON."""
    name = data_file(sequence, dist.get_rank())
    file = partial_directory(path) / name
    written = write_tensors(snapshot.tensors, file)
    return [[written, snapshot.numbers], name, file.stat().st_size, tensor_file.header_checksum(file)]


def _publish(partial: PendingSave, snapshot: StateSnapshot, parts: list[Any], keep_last: int | None) -> None:
    """Complete the checkpoint from the descriptions of all ranks, and remove old checkpoints."""
    files = {name: tensor_file.SavedFile(size, checksum) for _, name, size, checksum in parts}
    partial.publish(manifest_of(snapshot.state, [part for part, *_ in parts], partial.sequence, files))
    partial.close()
    if keep_last is not None:
        keep_latest(partial.path, keep_last)
    remove_remains(partial.path.parent)


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
    """Match local tensors with a directory as transformers does; return matches, missing, unexpected names."""
    opened = open_directory(type(model.unwrap()), model.origin.config, directory, model.dtype, allow_bin)
    for name, in_files, in_model in opened.mismatched:
        raise WeightFileError(
            f"{name} has shape {in_files} in {directory} but {in_model} in the model; "
            "load a checkpoint of the same configuration"
        )
    found: Found = []
    for names, tensor in global_tensor.local_tensors(model, unique=False):
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
    for names, tensor in global_tensor.local_tensors(model, unique=False):
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
            with tensor_file.TensorFileReader(path) as file:
                tensor_file.for_each(
                    partial(_read, file), [each for each in tensors if gathers.holder(each[1]) is None]
                )
                for name, tensor in tensors:  # one at a time: each is read whole
                    holder = gathers.holder(tensor)
                    if holder is not None:
                        holder.fill(tensor, partial(_read_whole, file, name, tensor))
                        freed.add(tensor.nbytes)
        except SafetensorError as error:
            raise WeightFileError(f"{path} is not a complete safetensors file ({error}); save it again") from None


def _read_whole(file: tensor_file.TensorFileReader, name: str, tensor: Tensor) -> Tensor:
    """Return the slices of a local tensor without values."""
    read = torch.empty(tensor.shape, dtype=tensor.dtype)
    read.shard_spec = spec_of(tensor)
    _read(file, (name, read))
    return read


@torch.no_grad()  # grad mode is thread-local
def _read(file: tensor_file.TensorFileReader, wanted: tuple[str, Tensor]) -> None:
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
