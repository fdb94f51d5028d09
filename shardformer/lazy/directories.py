"""Weights of a directory, opened without reading values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardformer.lazy.recording import record_module_init
from shardformer.lazy.replay import RecordedValues
from shardformer.lazy.weight_files import WeightFileError, has_bin_files, weight_files


@dataclass(frozen=True)
class Opened:
    """The weights of a directory, matched to a model.

    Attributes:
        values: values of the model's parameters and buffers, read piece by piece.
        missing: names that the files lack.
        unexpected: names that the model lacks.
        mismatched: (name, shape in the files, shape in the model).
    """

    values: RecordedValues
    missing: list[str]
    unexpected: list[str]
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]]


def open_directory(model_class: type, config: Any, directory: Path, dtype: torch.dtype, allow_bin: bool) -> Opened:
    """Open the weights of a directory as transformers' `from_pretrained` of a model class would.

    Raises:
        WeightFileError: a file is missing, broken, or must not be loaded.
    """
    if not (allow_bin and has_bin_files(directory)):
        weight_files(directory)  # given a missing directory, transformers would search its hub
    try:
        with record_module_init(allow_bin), _without_progress_bar():
            model, info = model_class.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
            )
    except (RuntimeError, KeyError) as error:
        raise WeightFileError(f"{directory} cannot be read as a {model_class.__name__}: {error}") from error
    mismatched = [(name, tuple(found), tuple(expected)) for name, found, expected in info["mismatched_keys"]]
    return Opened(
        RecordedValues(model, seed=0), sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), sorted(mismatched)
    )


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Hide the progress bar: no value is read here, and every rank would show one."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
