"""The error of a user's mistake."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """A wrong layout, model, option or file, in one sentence: the value, the rule, a value that would do."""


class SynchronyError(RuntimeError):
    """Ranks hold different values of what they share. Raised on all ranks alike."""


class NonFiniteError(FloatingPointError):
    """Gradients became nan or inf: where it was seen first. Raised on all ranks alike, before any weight is changed."""
