"""What is wrong with a JSON object that a pydantic model describes, one sentence for each mistake."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

AUTO = "auto"


def described(default: Any, rule: str, example: Any) -> Any:
    """A field that says what its values may be.

    Args:
        default: `...` for a key that has to be there.
        rule: goes behind a wrong value, "is not a positive integer; use 1 or more".
        example: a value that would do.
    """
    return Field(default=default, description=rule, examples=[example])


def unknown_key(name: str, known: Iterable[str], where: str = "") -> str:
    """The sentence about a key that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
    return f"the key '{where}{name}' is not known; use {where}{near}"


def auto_value(where: str, example: Any) -> str:
    """The sentence about a value that another program would have filled in."""
    return f"{where}='{AUTO}' is a value that transformers' Trainer fills in; use one such as {example!r}"


def sentences(error: ValidationError, model: type[BaseModel], where: str = "") -> list[str]:
    """pydantic's errors in our words.

    Args:
        model: what was validated; all of its fields are `described`.
        where: goes before the names of keys, "fp16.".
    """
    return [_sentence(each, model, where) for each in error.errors()]


def _sentence(error: Any, model: type[BaseModel], where: str) -> str:
    *parents, name = _keys_of_models(error["loc"], model)
    for parent in parents:
        model, where = _model_of(model.model_fields[parent]), f"{where}{parent}."
    if error["type"] == "extra_forbidden":
        return unknown_key(name, model.model_fields, where)
    field = model.model_fields[name]
    if error["type"] == "missing":
        return f"the key '{where}{name}' is missing; use '{name}': {field.examples[0]!r}"
    inner = error["loc"][len(parents) + 1 :]
    if error["input"] == AUTO and not inner:
        return auto_value(f"{where}{name}", field.examples[0])
    path = f"{where}{name}" + "".join(f"[{part!r}]" for part in inner)
    return f"{path}={error['input']!r} {field.description}"


def _keys_of_models(path: Sequence[Any], model: type[BaseModel]) -> list[str]:
    """The part of a path that leads through models, to a key of the last; keys of plain dicts follow."""
    keys = []
    for key in path:
        keys.append(key)
        inner = _model_of(model.model_fields[key]) if key in model.model_fields else None
        if inner is None:
            break
        model = inner
    return keys


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model that a field holds, if it holds one or None."""
    candidates = (field.annotation, *get_args(field.annotation))
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)
