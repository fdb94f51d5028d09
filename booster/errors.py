"""Exceptions of the library, and a check of option names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class ConfigurationError(ValueError):
    """Invalid layout, model, option or file; one sentence with the value, the rule and a valid value."""


def check_names(names: Iterable[str], known: Collection[str], owner: str) -> None:
    """Check that `owner` has options of these names.

    Raises:
        ConfigurationError: a name does not exist; the message suggests the nearest one.
    """
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigurationError(f"{owner} has no option '{name}'; use {near}")


class SynchronyError(RuntimeError):
    """Ranks hold different copies of a value that they must share. Raised on every rank."""


class VerificationError(AssertionError):
    """Training under a layout differs from unsharded training; says where it differs first, and by how much."""


class NonFiniteError(FloatingPointError):
    """Gradients became nan or inf; says where first. Raised on every rank, before any weight is changed."""
