"""The error of a user's mistake."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class ConfigurationError(ValueError):
    """A wrong layout, model, option or file, in one sentence: the value, the rule, a value that would do."""


def check_names(names: Iterable[str], known: Collection[str], owner: str) -> None:
    """See that `owner` has options of these names.

    Raises:
        ConfigurationError: one does not exist; says which is nearest.
    """
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigurationError(f"{owner} has no option '{name}'; use {near}")


class SynchronyError(RuntimeError):
    """Ranks hold different values of what they share. Raised on all ranks alike."""


class VerificationError(AssertionError):
    """A model does not train under a layout as it does unsharded: where it differs first, and by how much."""


class NonFiniteError(FloatingPointError):
    """Gradients became nan or inf: where it was seen first. Raised on all ranks alike, before any weight is changed."""
