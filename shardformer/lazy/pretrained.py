"""from_pretrained in `record_module_init`: runs transformers' loader, but reads the files later.

For each tensor of the files, transformers' loader gets a tensor without values, whose step in the log reads the file.
The loader renames, converts, casts, ties, initializes missing weights and reports as usual, and all of that is logged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardformer.lazy.dispatch_mode import DispatchRecorder
from shardformer.lazy.init_log import undisturbed
from shardformer.lazy.weight_files import WeightFileError, open_tensors, read_piece, refuses_code
from shardformer.shard_spec import ShardSpec


@contextmanager
def files_are_read_later(recorder: DispatchRecorder, allow_bin: bool) -> Iterator[None]:
    """Give transformers' loader tensors whose values are still in the files."""
    from transformers import PreTrainedModel

    original = PreTrainedModel._load_pretrained_model

    def loading(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        if state_dict is None and checkpoint_files:
            if load_config.hf_quantizer is not None:
                raise ValueError(
                    f"{type(model).__name__} is quantised, and quantised weights cannot be read later; build it "
                    "outside of record_module_init()"
                )
            paths = [Path(file) for file in checkpoint_files]
            check_paths(paths, Path(load_config.pretrained_model_name_or_path), allow_bin)
            with undisturbed():
                state_dict = {name: tensor for path in paths for name, tensor in _tensors_of(path, recorder)}
        # No loader threads: the recorder sees only the operations of its own thread.
        with mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"):
            return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    PreTrainedModel._load_pretrained_model = staticmethod(loading)
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(original)


def check_paths(paths: list[Path], directory: Path, allow_bin: bool) -> None:
    """Refuse files that an index names outside of its directory, and pickle files unless `allow_bin`.

    Raises:
        WeightFileError: there is such a file.
    """
    for path in paths:
        if ".." in path.parts[len(directory.parts) :] or (directory.is_dir() and not path.is_relative_to(directory)):
            raise WeightFileError(f"an index in {directory} names '{path}' outside the directory; do not load it")
        if path.suffix != ".safetensors" and not allow_bin:
            raise WeightFileError(
                f"{path} is no safetensors file; save the model as safetensors, or, where you trust it, use "
                "record_module_init(allow_bin=True)"
            )


@dataclass(frozen=True)
class FileTensor:
    """Reads one tensor of a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def __call__(self) -> Tensor:
        """Read the whole tensor."""
        return self.piece(ShardSpec(self.shape))

    def piece(self, spec: ShardSpec) -> Tensor:
        """Read the piece that `spec` defines, and only that."""
        return read_piece(self.path, self.name, spec)


@dataclass(frozen=True)
class BinTensor:
    """Reads one tensor of a file written by torch.save."""

    path: Path
    name: str

    def __call__(self) -> Tensor:
        """Read the whole tensor."""
        return self._mapped().clone()

    def piece(self, spec: ShardSpec) -> Tensor:
        """Read the piece that `spec` defines; the file is memory-mapped."""
        return spec.shard(self._mapped())

    def _mapped(self) -> Tensor:
        return _load_bin(self.path)[self.name]


def _load_bin(path: Path) -> dict[str, Tensor]:
    with refuses_code(str(path)):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _tensors_of(path: Path, recorder: DispatchRecorder) -> Iterator[tuple[str, Tensor]]:
    """Yield name and a tensor without values for every tensor of a file."""
    if path.suffix != ".safetensors":
        for name, values in _load_bin(path).items():
            yield name, recorder.constant(BinTensor(path, name), values)
        return
    with open_tensors(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            view = file.get_slice(name)
            shape = tuple(view.get_shape())
            dtype = (view[:0] if shape else view[...]).dtype
            like = torch.empty(shape, dtype=dtype, device="meta")
            yield name, recorder.constant(FileTensor(path, name, shape), like)
