"""Outputs of a model whose values lie on the last stage until a script reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from booster.errors import ConfigurationError

_NOT_FETCHED = object()


class WithheldError(ConfigurationError, AttributeError):
    """An output that the plain model has and a pipeline does not give; `hasattr` finds none."""


class StageOutputs(dict[str, Any]):
    """Outputs by name, by attribute and by position, as transformers' `ModelOutput`; each is fetched when first read.

    Reading a value for the first time is collective: all ranks of the pipeline must read it.

    Args:
        names: names of the outputs, in order.
        fetch: name -> value, on all ranks of the pipeline.
        withheld: name -> why the output of the plain model cannot be read; such outputs are not listed.
    """

    def __init__(self, names: Iterable[str], fetch: Callable[[str], Any], withheld: Mapping[str, str]) -> None:
        super().__init__(dict.fromkeys(names, _NOT_FETCHED))
        # Not in the mapping: `vars` would list it among the outputs.
        object.__setattr__(self, "_fetch", fetch)
        object.__setattr__(self, "_withheld", withheld)

    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key] if isinstance(key, slice) else self[list(self.keys())[key]]
        self._refuse_withheld(key)
        value = super().__getitem__(key)
        if value is _NOT_FETCHED:
            value = self._fetch(key)
            self[key] = value
        return value

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("__"):
            raise AttributeError(f"the model's outputs have no {name}")
        self._refuse_withheld(name)
        return None  # as an optional field of a `ModelOutput`

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def _refuse_withheld(self, name: str) -> None:
        if name in self._withheld:
            raise WithheldError(f"outputs.{name} {self._withheld[name]}")

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def __repr__(self) -> str:
        """Name the outputs without fetching them."""
        return f"{type(self).__name__}({', '.join(self.keys())})"

    def get(self, key: str, default: Any = None) -> Any:
        """Return an output, or `default` if the model has none of that name."""
        self._refuse_withheld(key)
        return self[key] if key in self else default  # noqa: SIM401 (dict.get would not fetch it)

    def pop(self, key: str, *default: Any) -> Any:
        """Fetch and remove an output."""
        if key in self:
            default = (self[key],)
            del self[key]
        elif not default:
            raise KeyError(key)
        return default[0]

    def values(self) -> list[Any]:
        """Fetch and return all outputs."""
        return [self[name] for name in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        """Fetch and return all outputs with their names."""
        return [(name, self[name]) for name in self.keys()]

    def to_tuple(self) -> tuple[Any, ...]:
        """Fetch and return all outputs in order."""
        return tuple(self.values())
