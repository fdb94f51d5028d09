"""Damaged files: whatever happens to one byte of a complete checkpoint, loading notices.

Most damages are shown to the part that verifies, which needs no ranks; some are loaded by all ranks together.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.atomic_save import MANIFEST
from plugins.hybrid_parallel.checkpoint.tensor_file import Manifest
from zoo_tests.campaigns.crashes.marked import MarkedTraining

STEPS = (1, 2, 3)
_BLOCK = 512


def save_some(folder: Path) -> None:
    """On ranks: checkpoints of the same shapes in `folder`, and one more in another folder with the same file names."""
    training = MarkedTraining()
    for step in STEPS:
        training.save(folder / f"step-{step}", step)
        training.save(folder.with_name("other") / f"step-{step}", 10 + step)


def flip_bit(file: Path, checkpoint: Path, numbers: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    file.write_bytes(content)


def cut_off(file: Path, checkpoint: Path, numbers: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: numbers.randrange(len(content))])


def lengthen(file: Path, checkpoint: Path, numbers: random.Random) -> None:
    file.write_bytes(file.read_bytes() + numbers.randbytes(numbers.randint(1, _BLOCK)))


def remove(file: Path, checkpoint: Path, numbers: random.Random) -> None:
    file.unlink()


def overwrite_block(file: Path, checkpoint: Path, numbers: random.Random) -> None:
    """With zeros, as a disk does that lost a write; a block that was zero is left for another one."""
    content = bytearray(file.read_bytes())
    places = [start for start in range(0, len(content), _BLOCK) if any(content[start : start + _BLOCK])]
    start = numbers.choice(places)
    stop = min(start + _BLOCK, len(content))
    content[start:stop] = bytes(stop - start)
    file.write_bytes(content)


def exchange_blocks(file: Path, checkpoint: Path, numbers: random.Random) -> None:
    """Two different blocks of a file change places."""
    content = file.read_bytes()
    blocks = [content[start : start + _BLOCK] for start in range(0, len(content), _BLOCK)]
    first, second = numbers.sample(range(len(blocks)), 2)
    while blocks[first] == blocks[second]:
        first, second = numbers.sample(range(len(blocks)), 2)
    blocks[first], blocks[second] = blocks[second], blocks[first]
    file.write_bytes(b"".join(blocks))


def take_older(file: Path, checkpoint: Path, numbers: random.Random) -> None:
    """The same rank's file of the checkpoint before, or its manifest, under this one's name."""
    older = checkpoint.with_name("step-2")
    suffix = file.name.rpartition("-")[2]
    shutil.copy(next(found for found in older.iterdir() if found.name.endswith(suffix)), file)


def take_other(file: Path, checkpoint: Path, numbers: random.Random) -> None:
    """The file of the same name of another run."""
    shutil.copy(checkpoint.parent.with_name("other") / checkpoint.name / file.name, file)


DAMAGES: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "one bit flipped": flip_bit,
    "cut off": cut_off,
    "bytes appended": lengthen,
    "removed": remove,
    "block of zeros": overwrite_block,
    "blocks exchanged": exchange_blocks,
    "file of the checkpoint before": take_older,
    "file of another run": take_other,
}


def verify(checkpoint: Path) -> None:
    """What all ranks do together, in one process.

    Raises:
        ConfigurationError: the checkpoint is damaged.
    """
    manifest = Manifest.read(checkpoint / MANIFEST)
    for name in manifest.files:
        manifest.verify_file(checkpoint, name)


def undetected(folder: Path, number: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Damage the latest checkpoint in `folder` `number` times, in all ways in turn.

    Returns:
        How often each damage was done; what was not noticed, or not named, in words.
    """
    numbers, done, missed = random.Random(seed), Counter[str](), []
    checkpoint = folder / f"step-{STEPS[-1]}"
    files = sorted(checkpoint.iterdir())
    verify(checkpoint)
    for index in range(number):
        kind = list(DAMAGES)[index % len(DAMAGES)]
        file = numbers.choice(files)
        sound = file.read_bytes()
        DAMAGES[kind](file, checkpoint, numbers)
        try:
            verify(checkpoint)
        except ConfigurationError as error:
            # A manifest of another save names files that are not here.
            if file.name not in str(error) and file.name != MANIFEST:
                missed.append(f"{kind} of {file.name} was noticed as: {error}")
        else:
            missed.append(f"{kind} of {file.name} was not noticed")
        done[kind] += 1
        file.write_bytes(sound)
    verify(checkpoint)
    return done, missed


def load_damaged(folder: Path, kind: str, name: str, seed: int) -> list[str]:
    """On ranks: damage a file of the latest checkpoint, load it by name and as the latest.

    Returns:
        What each rank was told.
    """
    checkpoint, training, told = folder / f"step-{STEPS[-1]}", MarkedTraining(), []
    file = next(found for found in checkpoint.iterdir() if found.name.endswith(name))
    sound = file.read_bytes()
    dist.barrier()
    if dist.get_rank() == 0:
        DAMAGES[kind](file, checkpoint, random.Random(seed))
    dist.barrier()
    training.mark(-1)
    try:
        training.booster.load_checkpoint(checkpoint, **training.objects)
    except ConfigurationError as error:
        told.append(str(error))
    assert training.marks() == [-1], "a refused load changes nothing"
    assert training.load(folder, resume="latest") == STEPS[-2], "the checkpoint before is taken"
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(sound)
    dist.barrier()
    assert training.load(folder, resume="latest") == STEPS[-1]
    return told
