"""Error messages for JSON objects that a pydantic model validates, one sentence per mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from plugins.hybrid_parallel.config.option_group import unknown_key

AUTO = "auto"


def described(default: Any, rule: str, example: Any) -> Any:
    """Create a field that describes its allowed values.

    Args:
        default: default value; `...` for a required key.
        rule: text that follows a wrong value, such as "is not a positive integer; use 1 or more".
        example: a valid value.
    """
    return Field(default=default, description=rule, examples=[example])


def auto_value(where: str, example: Any) -> str:
    """Return the sentence about an "auto" value, which transformers' Trainer would have filled in."""
    return f"{where}='{AUTO}' is a value that transformers' Trainer fills in; use one such as {example!r}"


def sentences(error: ValidationError, model: type[BaseModel], where: str = "") -> list[str]:
    """Convert the errors of pydantic to sentences.

    Args:
        error: the validation error.
        model: model that was validated; all of its fields are `described`.
        where: prefix of the key names, such as "fp16.".
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
    """Return the leading part of a path, down to a key of the innermost model; keys of plain dicts are dropped."""
    keys = []
    for key in path:
        keys.append(key)
        inner = _model_of(model.model_fields[key]) if key in model.model_fields else None
        if inner is None:
            break
        model = inner
    return keys


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model type of a field, if it holds a model or None."""
    candidates = (field.annotation, *get_args(field.annotation))
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)
