"""The error of a user's mistake."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """A wrong layout, model, option or file, in one sentence: the value, the rule, a value that would do."""
