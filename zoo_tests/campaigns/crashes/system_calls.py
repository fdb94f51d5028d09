"""The calls by which a process changes files: counted, so that something can happen at a chosen one."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Self

_CHANGING = {
    os: ("open", "mkdir", "posix_fallocate", "pwrite", "fsync", "rename", "replace", "unlink", "rmdir"),
    io: ("open",),
}


class SystemCalls:
    """A context in which calls that change files are counted.

    Args:
        before: called with number, name and arguments before each of them; what it raises the call seems to raise.

    Attributes:
        names: of the calls so far.
    """

    def __init__(self, before: Callable[[int, str, tuple[Any, ...]], None] = lambda *_: None) -> None:
        self._before = before
        self._originals = {(module, name): getattr(module, name) for module in _CHANGING for name in _CHANGING[module]}
        self.names: list[str] = []

    def __enter__(self) -> Self:
        for (module, name), original in self._originals.items():
            setattr(module, name, self._counting(module, name, original))
        return self

    def __exit__(self, *_: object) -> None:
        for (module, name), original in self._originals.items():
            setattr(module, name, original)

    def _counting(self, module: ModuleType, name: str, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (name == "open" and _only_reads(module, *args)):
                self.names.append(name)
                self._before(len(self.names) - 1, name, args)
            return original(*args, **kwargs)

        return call


def _only_reads(module: ModuleType, _: Any, mode: Any = "r", *rest: Any) -> bool:
    return not mode & os.O_CREAT if module is os else "w" not in mode
