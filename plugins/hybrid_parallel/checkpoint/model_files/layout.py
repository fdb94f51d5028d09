"""Atomic publication of model files: at any moment a directory opens as the old model, as the new one, or not at all.

Weights are written under hidden names. They are then renamed to names that the index of an earlier save does not use,
and the new index replaces the old one in one rename. Only afterwards are the files of the old index removed.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.checkpoint.files.tensor_file import sync_directory
from shardformer.lazy.weight_files import INDEX, WEIGHTS
from shardformer.peft import model_inside

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
        model: the boosted model.
        directory: directory that holds the partial files.
        weight_map: tensor name -> name of its file.
        size: size of all tensors in bytes.
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
    if model.origin.config is not None:
        config = copy.deepcopy(model.origin.config)
        config.architectures = [type(inside).__name__]
        config.dtype = str(dtype).removeprefix("torch.")
        if getattr(inside, "_auto_class", None) is not None:
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(inside, others, config=config)
        config.save_pretrained(others)
    if getattr(inside, "generation_config", None) is not None:
        inside.generation_config.save_pretrained(others)
    return others
