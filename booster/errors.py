"""Exceptions of the library, and a check of option names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable


class ConfigurationError(ValueError):
    """Invalid layout, model, option or file; one sentence with the value, the rule and a valid value."""


def check_names(
    names: Iterable[str],
    known: Collection[str],
    owner: str,
    elsewhere: Callable[[str], str | None] = lambda name: None,
) -> None:
    """Check that `owner` has options of these names.

    Args:
        elsewhere: what to do instead of an option of another library, as "use …".

    Raises:
        ConfigurationError: a name does not exist; the message says what to write, if that can be told.
    """
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            instead = elsewhere(name) or (f"use {near[0]}" if near else f"it has {', '.join(known)}")
            raise ConfigurationError(f"{owner} has no option '{name}'; {instead}")


class SynchronyError(RuntimeError):
    """Ranks hold different copies of a value that they must share. Raised on every rank."""


class VerificationError(AssertionError):
    """Training under a layout differs from unsharded training; says where it differs first, and by how much."""


class NonFiniteError(FloatingPointError):
    """Gradients became nan or inf; says where first. Raised on every rank, before any weight is changed."""
