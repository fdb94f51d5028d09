"""Manifest of a checkpoint: its tensors, the locations of their chunks, and checksums of every byte.

The manifest is one JSON object and the last file that a save writes: a directory without it is not a checkpoint. It
ends in a checksum of itself. It holds the checksum of every chunk and of every file header, which together cover all
bytes of all files.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.tensor_file import LENGTH_BYTES, for_each, naming, read_header
from plugins.hybrid_parallel.distributed.agreement import checksum_in_file

FORMAT, VERSION = "hybrid-booster checkpoint", 1
_CHECKSUM = b', "crc32": '
_SEQUENCE = re.compile(rb'^\{"format": "[^"]*", "version": \d+, "sequence": (\d+),')


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor that is stored in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    checksum: int

    def key(self, name: str) -> str:
        """Return the name of the chunk in its file."""
        return chunk_key(name, self.offsets)


@dataclass
class SavedTensor:
    """A whole tensor: its shape, its dtype, and the chunks that it is stored in."""

    shape: tuple[int, ...]
    dtype: str
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that `dtype` names."""
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class SavedFile:
    """Size of a file, and checksum of its header (everything in it that is not a chunk)."""

    size: int
    header_checksum: int


@dataclass
class Manifest:
    """Contents of a checkpoint."""

    sequence: int  # number that grows with each save in a folder; the largest is the newest
    files: dict[str, SavedFile]  # file name -> size and header checksum
    tensors: dict[str, SavedTensor]  # logical name -> tensor
    state: dict[str, Any]  # everything that is not a tensor, as JSON
    checksum: int = 0  # checksum of the text that was read; 0 for a manifest that was not read from a file

    def to_bytes(self) -> bytes:
        """Return the JSON text, ending in its own checksum."""
        body = json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "sequence": self.sequence,
                "files": {name: asdict(file) for name, file in self.files.items()},
                "tensors": {
                    name: {
                        "shape": tensor.shape,
                        "dtype": tensor.dtype,
                        "chunks": [[chunk.offsets, chunk.sizes, chunk.file, chunk.checksum] for chunk in tensor.chunks],
                    }
                    for name, tensor in self.tensors.items()
                },
                "state": self.state,
            }
        ).encode()
        return body[:-1] + _CHECKSUM + b"%d}" % zlib.crc32(body)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read and check a manifest file."""
        if not path.is_file():
            raise ConfigurationError(
                f"{path.parent} has no {path.name}: it is no checkpoint, or its save did not finish; "
                "give a directory that save_checkpoint finished"
            )
        with naming(path):
            text = path.read_bytes()
        front, _, checksum = text.rpartition(_CHECKSUM)
        if checksum != b"%d}" % zlib.crc32(front + b"}"):
            raise ConfigurationError(f"{path} is damaged (its checksum does not match); load another checkpoint")
        found = json.loads(front + b"}")
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise ConfigurationError(
                f"{path} has the format {found['format']!r} version {found['version']}; this package reads "
                f"{FORMAT!r} version {VERSION}"
            )
        for name in found["files"]:
            if Path(name).name != name:
                raise ConfigurationError(f"{path} names the file '{name}' outside of its directory; do not load it")
        return cls(
            sequence=found["sequence"],
            files={name: SavedFile(**file) for name, file in found["files"].items()},
            tensors={
                name: SavedTensor(
                    tuple(tensor["shape"]), tensor["dtype"], [_chunk(*chunk) for chunk in tensor["chunks"]]
                )
                for name, tensor in found["tensors"].items()
            },
            state=found["state"],
            checksum=zlib.crc32(text),
        )

    def check_sizes(self, directory: Path) -> None:
        """Check that all files exist and have the right sizes."""
        for name in self.files:
            self._check_size(directory / name)

    def verify_file(self, directory: Path, name: str) -> None:
        """Compare every byte of a file with the checksums.

        Raises:
            ConfigurationError: the file is missing, truncated or changed; the message names the damaged tensor.
            OSError: the file cannot be read.
        """
        path = directory / name
        self._check_size(path)
        with naming(path):
            self._verify_content(path)

    def _check_size(self, path: Path) -> None:
        expected = self.files[path.name].size
        if not path.is_file():
            raise ConfigurationError(f"{path} is missing; load another checkpoint")
        if path.stat().st_size != expected:
            raise ConfigurationError(
                f"{path} has {path.stat().st_size} bytes instead of {expected}; load another checkpoint"
            )

    def _verify_content(self, path: Path) -> None:
        name, expected = path.name, self.files[path.name]
        with path.open("rb") as file:
            if header_checksum(path) != expected.header_checksum:
                raise ConfigurationError(f"{path} is damaged in its header; load another checkpoint")

            def verify(found: tuple[str, Chunk, int, int]) -> None:
                tensor, chunk, begin, end = found
                if checksum_in_file(file.fileno(), begin, end - begin) != chunk.checksum:
                    raise ConfigurationError(f"{path} is damaged in the tensor {tensor}; load another checkpoint")

            for_each(verify, sorted(self._chunks_of(file, name), key=lambda found: found[2]))

    def _chunks_of(self, file: Any, name: str) -> Iterator[tuple[str, Chunk, int, int]]:
        """Yield (tensor, chunk, first byte, end) for each chunk in a file whose header is valid."""
        start, entries = read_header(file)
        for tensor, saved in self.tensors.items():
            for chunk in saved.chunks:
                if chunk.file == name:
                    begin, end = entries[chunk.key(tensor)]["data_offsets"]
                    yield tensor, chunk, start + begin, start + end


def chunk_key(name: str, offsets: Sequence[int]) -> str:
    """Return the name of a chunk in its file."""
    return f"{name}@{','.join(map(str, offsets))}"


def name_and_offsets(key: str) -> tuple[str, tuple[int, ...]]:
    """Return the name of a tensor and the offsets of its chunk from `chunk_key`."""
    name, _, offsets = key.rpartition("@")
    return name, tuple(map(int, filter(None, offsets.split(","))))


def header_checksum(path: Path) -> int:
    """Return the checksum of everything in a safetensors file that precedes the tensor data."""
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        # A damaged length may be larger than any file.
        header = file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
        return zlib.crc32(header, zlib.crc32(length))


def sequence_of(path: Path) -> int | None:
    """Return the sequence number of a manifest, read from its first bytes, or None if it cannot be read."""
    try:
        with path.open("rb") as file:
            found = _SEQUENCE.match(file.read(200))
    except OSError:
        return None
    return None if found is None else int(found.group(1))


def merge_tensors(parts: Sequence[Mapping[str, Any]]) -> dict[str, SavedTensor]:
    """Merge the tensors of all ranks, given the results of `write_tensors`."""
    merged: dict[str, SavedTensor] = {}
    for part in parts:
        for name, (shape, dtype, chunks) in part.items():
            tensor = merged.setdefault(name, SavedTensor(tuple(shape), dtype))
            tensor.chunks += [_chunk(*chunk) for chunk in chunks]
    return merged


def _chunk(offsets: Sequence[int], sizes: Sequence[int], file: str, checksum: int) -> Chunk:
    return Chunk(tuple(offsets), tuple(sizes), file, checksum)
