"""Exceptions of the library, and checks of the names of options and of the arguments of calls."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

_PLACES = frozenset(("directory", "folder", "path"))  # arguments that name a place on the disk: "" would be this folder


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


def checks_arguments(method: Callable[..., Any], example: str | None = None) -> Callable[..., Any]:
    """Answer wrong arguments of a public call with an example of its call, or with its signature (a decorator).

    The method then raises a `ConfigurationError` where Python raises a `TypeError`, before any other rank waits.
    """
    signature = inspect.signature(method)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    arguments = inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])
    owner, _, name = method.__qualname__.rpartition(".")
    call = owner if name == "__init__" else f"{owner.lower() or 'booster'}.{name}"
    example = example or f"{call}{arguments}"

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ConfigurationError(f"{call}() got wrong arguments ({error}); write {example}") from None
        for name in _PLACES & bound.keys():
            if bound[name] is None or isinstance(bound[name], int) or not str(bound[name]).strip():
                raise ConfigurationError(f"{call}() got {name}={bound[name]!r}; give a name, as in {name}='runs/model'")
        return method(*args, **kwargs)

    return checked


class SynchronyError(RuntimeError):
    """Ranks hold different copies of a value that they must share. Raised on every rank."""


class VerificationError(AssertionError):
    """Training under a layout differs from unsharded training; says where it differs first, and by how much."""


class NonFiniteError(FloatingPointError):
    """Gradients became nan or inf; says where first. Raised on every rank, before any weight is changed."""
