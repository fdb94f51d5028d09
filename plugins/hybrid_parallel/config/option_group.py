"""Groups of options: each option is a dataclass field with a default and a rule, which keywords and JSON share."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Allowed values of an option.

    Attributes:
        checks: pairs of a test, and what an error message says of a value that fails it. The first test is about the
            type; the next ones may rely on it.
        example: a valid value.
        shows_value: whether a message shows the value; otherwise it shows its type, for objects without a short `repr`.
    """

    checks: tuple[tuple[Callable[[Any], bool], str], ...]
    example: Any
    shows_value: bool = True

    def problem(self, name: str, value: Any) -> str | None:
        """Return the sentence about a refused value of the option `name`; None if the value is valid."""
        said = next((text for holds, text in self.checks if not holds(value)), None)
        if said is None:
            return None
        return f"{name}={value!r} {said}" if self.shows_value else f"{name} is a {type(value).__name__}; {said}"

    def has_type(self, value: Any) -> bool:
        """Return whether a value has the option's type."""
        return self.checks[0][0](value)


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Base of frozen dataclasses, all of whose fields are made by `option`."""

    def problems(self) -> list[str]:
        """Return one sentence for each refused value, and for each broken rule between options of the group."""
        found = (rule.problem(name, value) for name, value, rule in self._to_check())
        refused = [problem for problem in found if problem is not None]
        return [*refused, *(self.conflicts() if not refused or self.is_typed() else ())]

    def conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between options of the group; all values have their types."""
        return []

    def is_typed(self) -> bool:
        """Return whether all values have the types of their options."""
        return all(rule.has_type(value) for _, value, rule in self._to_check())

    def _to_check(self) -> Iterable[tuple[str, Any, Rule]]:
        """Iterate over (name, value, rule) of all options whose value is not the default."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not each.default:
                yield each.name, value, each.metadata["rule"]


def option(default: Any, rule: Rule) -> Any:
    """Create a field of an `OptionGroup`. A default of None needs not pass the rule."""
    return field(default=default, metadata={"rule": rule})


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, of Python or numpy; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, of Python or numpy; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def one_of(*choices: Any, text: str | None = None) -> Rule:
    """Create the rule of an option with named values, all but None of one type.

    Args:
        choices: the values; the last one is the example.
        text: end of the message about another value; None to list the values.
    """
    has_type = is_integer if is_integer(choices[-1]) else lambda value: isinstance(value, type(choices[-1]))
    text = text or f"is not available; use {' or '.join(repr(choice) for choice in choices)}"
    return Rule(((has_type, text), (lambda value: value in choices, text)), choices[-1])


def not_negative(example: float) -> Rule:
    """Create the rule of an option that is a number from 0 on."""
    finite = (math.isfinite, f"is not finite; use a number such as {example}")
    above = (lambda value: value >= 0, "is negative; use 0 or more")
    return Rule(((is_number, f"is not a number; use one such as {example}"), above, finite), example)


def positive(example: Any) -> Rule:
    """Create the rule of an option above 0, which is an integer if the example is one."""
    above = (lambda value: value > 0, "is not positive; use a value above 0")
    if is_integer(example):
        return Rule(((is_integer, f"is not an integer; use one such as {example}"), above), example)
    finite = (math.isfinite, f"is not finite; use a number such as {example}")
    return Rule(((is_number, f"is not a number; use one such as {example}"), above, finite), example)


def unknown_key(name: str, known: Iterable[str], where: str = "") -> str:
    """Return the sentence about an unknown key of a JSON object, with the closest known one."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
    return f"the key '{where}{name}' is not known; use {where}{near}"


_COUNT = "is not a positive integer; use 1 or more"
COUNT = Rule(
    ((lambda value: isinstance(value, int) and is_integer(value), _COUNT), (lambda value: value >= 1, _COUNT)), 2
)
SWITCH = Rule(((lambda value: isinstance(value, bool), "is neither True nor False; use one of them"),), True)
