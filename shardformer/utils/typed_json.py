"""States of objects that are not ours as JSON, and back: equal in type and value, or refused with the key's name.

JSON turns integer keys into texts and tuples into lists, and has no tensors, sets or dates. Such a value becomes an
object `{"$type": kind, "value": ...}`; what JSON keeps stays as it is. Reading runs no code of the file: a class is
named for enumerations alone, and taken only if this process has imported it.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import reduce
from operator import or_
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TYPE, _VALUE, _APART = "$type", "value", "tensor apart"
_PLAIN = (bool, int, float, str, type(None))
_MAX_BYTES = 2**24  # of one tensor or array: the text of a manifest is read whole
_INLINE_BYTES = 2**10  # of one tensor, if larger ones have a file of their own
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def to_json(value: Any, name: str, apart: list[Tensor] | None = None) -> Any:
    """Return what `json.dumps` takes for `value`, such that `from_json` returns an equal one.

    Args:
        value: a state: numbers, texts, containers, tensors on any device (which come back on the host), arrays, ...
        name: what to call it in an error.
        apart: takes the bytes of each tensor of more than a kilobyte, [bytes] uint8 on the host, to be kept elsewhere;
            None to keep all in the text.

    Raises:
        ValueError: a part of it cannot be kept; the message names its key and its type.
    """
    return _encode(value, name, (), apart)


def from_json(value: Any, apart: Sequence[Tensor] = ()) -> Any:
    """Return the value that `to_json` was given.

    Args:
        apart: the bytes that `to_json` has left out.

    Raises:
        ValueError: it is of a kind, an enumeration, a member of one or a dtype that this process does not have.
    """
    if isinstance(value, list):
        return [from_json(each, apart) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {_TYPE, _VALUE}:
        return {key: from_json(each, apart) for key, each in value.items()}
    kind = value[_TYPE]
    if kind == _APART and apart:
        return apart[value[_VALUE]]
    if kind not in _KINDS:
        raise ValueError(f"the saved state has a value of the kind {kind!r}, which this version does not read")
    return _KINDS[kind].decode(from_json(value[_VALUE], apart))


@dataclass(frozen=True)
class _Kind:
    """A type that JSON has not."""

    type: type  # exactly this type, no subclass
    encode: Callable[[Any], Any]  # value -> parts, to be encoded in turn
    decode: Callable[[Any], Any]  # parts as `encode` returned them -> value


def _encode(value: Any, path: str, parents: tuple[int, ...], apart: list[Tensor] | None) -> Any:
    if type(value) in _PLAIN:
        return value
    if id(value) in parents:
        raise ValueError(f"{path} contains itself; a checkpoint cannot keep it")
    inside = (*parents, id(value))
    if type(value) is list:
        return [_encode(each, f"{path}[{index}]", inside, apart) for index, each in enumerate(value)]
    if type(value) is dict and all(type(key) is str for key in value) and _TYPE not in value:
        return {key: _encode(each, f"{path}[{key!r}]", inside, apart) for key, each in value.items()}
    kind = "enum" if isinstance(value, Enum) else _NAMES.get(type(value))
    if kind is None:
        raise ValueError(
            f"{path} is a {type(value).__qualname__}, which a checkpoint cannot keep; give plain values, tensors or "
            "containers of them"
        )
    try:
        parts = _tensor_parts(value, apart) if kind == "tensor" else _KINDS[kind].encode(value)
    except _CannotKeepError as error:
        raise ValueError(f"{path} is {error}") from None
    if isinstance(value, dict):
        parts = [
            [_encode(key, f"a key of {path}", inside, apart), _encode(each, f"{path}[{key!r}]", inside, apart)]
            for key, each in parts
        ]
    elif isinstance(parts, list):
        parts = [_encode(each, f"{path}[{index}]", inside, apart) for index, each in enumerate(parts)]
    return {_TYPE: kind, _VALUE: parts}


class _CannotKeepError(Exception):
    """A value of a known type that cannot be kept; the text follows '... is'."""


def _tensor_parts(value: Tensor, apart: list[Tensor] | None = None) -> dict[str, Any]:
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        raise _CannotKeepError("a tensor that is sparse, quantised or without values; give a dense one")
    if value.requires_grad:
        raise _CannotKeepError("a tensor that requires gradients; give tensor.detach()")
    flat = value.cpu().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    data: Any = {_TYPE: _APART, _VALUE: len(apart or ())}
    if apart is None or flat.numel() <= _INLINE_BYTES:
        data = _text(flat.numpy().tobytes())
    else:
        apart.append(flat)
    return {"dtype": str(value.dtype), "shape": list(value.shape), "bytes": data}


def _tensor(parts: dict[str, Any]) -> Tensor:
    flat = parts["bytes"]
    if not isinstance(flat, Tensor):
        data = bytearray(base64.b64decode(flat))
        flat = torch.frombuffer(data, dtype=torch.uint8).clone() if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(_dtype(parts["dtype"])).reshape(parts["shape"])


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"the saved state has the dtype {name}, which torch {torch.__version__} does not have")
    return _DTYPES[name]


def _array_parts(value: np.ndarray | np.generic) -> dict[str, Any]:
    if value.dtype.hasobject or value.dtype.names:
        raise _CannotKeepError(f"an array of the type {value.dtype}; give one of numbers")
    return {"dtype": value.dtype.str, "shape": list(value.shape), "bytes": _text(value.tobytes())}


def _array(parts: dict[str, Any]) -> np.ndarray:
    data = base64.b64decode(parts["bytes"])
    return np.frombuffer(data, dtype=np.dtype(parts["dtype"])).reshape(parts["shape"]).copy()


def _text(data: bytes) -> str:
    if len(data) > _MAX_BYTES:
        raise _CannotKeepError(f"a value of {len(data)} bytes, more than {_MAX_BYTES}; save it in a file of its own")
    return base64.b64encode(data).decode()


def _enum_parts(value: Enum) -> dict[str, str]:
    where = {"module": type(value).__module__, "class": type(value).__qualname__, "name": value.name}
    if value.name is None or _imported(where) is not type(value):
        raise _CannotKeepError(f"a {type(value).__qualname__}, which is not a class of a module; give its value")
    return where


def _enum(parts: dict[str, str]) -> Enum:
    found = _imported(parts)
    if not (isinstance(found, type) and issubclass(found, Enum)):
        raise ValueError(f"the saved state has a {parts['class']} of {parts['module']}; import it before loading")
    names = parts["name"].split("|")  # several of a Flag
    missing = [name for name in names if name not in found.__members__]
    if missing:
        raise ValueError(f"the saved state has {parts['class']}.{missing[0]}, and {parts['module']} has no such member")
    return reduce(or_, (found[name] for name in names))


def _imported(where: dict[str, str]) -> Any:
    """Return what is called so in a module that is imported already, or None."""
    found: Any = sys.modules.get(where["module"])
    for name in where["class"].split("."):
        found = getattr(found, name, None)
    return found


def _moment_parts(value: datetime | time) -> str:
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise _CannotKeepError(f"in the time zone {value.tzinfo}; give one in datetime.timezone.utc")
    return f"{value.isoformat()}|{value.fold}"


def _moment(made: type) -> Callable[[str], Any]:
    def read(parts: str) -> Any:
        text, _, fold = parts.partition("|")
        return made.fromisoformat(text).replace(fold=int(fold))

    return read


def _items(value: Any) -> list[Any]:
    return list(value)


def _pairs(value: Any) -> list[Any]:
    return list(value.items())


def _scalar_of_numpy(parts: dict[str, Any]) -> np.generic:
    return _array(parts)[()]


_KINDS: dict[str, _Kind] = {
    "dict": _Kind(dict, _pairs, dict),
    "ordered_dict": _Kind(OrderedDict, _pairs, OrderedDict),
    "counter": _Kind(Counter, _pairs, lambda parts: Counter(dict(parts))),
    "tuple": _Kind(tuple, _items, tuple),
    "set": _Kind(set, _items, set),
    "frozenset": _Kind(frozenset, _items, frozenset),
    "deque": _Kind(deque, lambda value: [_items(value), value.maxlen], lambda parts: deque(*parts)),
    "range": _Kind(range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    "slice": _Kind(slice, lambda value: [value.start, value.stop, value.step], lambda parts: slice(*parts)),
    "complex": _Kind(complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "bytes": _Kind(bytes, _text, base64.b64decode),
    "bytearray": _Kind(bytearray, _text, lambda parts: bytearray(base64.b64decode(parts))),
    "decimal": _Kind(Decimal, str, Decimal),
    "fraction": _Kind(Fraction, str, Fraction),
    "path": _Kind(PosixPath, str, Path),
    "datetime": _Kind(datetime, _moment_parts, _moment(datetime)),
    "date": _Kind(date, date.isoformat, date.fromisoformat),
    "time": _Kind(time, _moment_parts, _moment(time)),
    "timedelta": _Kind(
        timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda parts: timedelta(*parts)
    ),
    "enum": _Kind(Enum, _enum_parts, _enum),
    "tensor": _Kind(Tensor, _tensor_parts, _tensor),
    "size": _Kind(torch.Size, _items, torch.Size),
    "dtype": _Kind(torch.dtype, str, _dtype),
    "device": _Kind(torch.device, str, torch.device),
    "array": _Kind(np.ndarray, _array_parts, _array),
    "numpy": _Kind(np.generic, _array_parts, _scalar_of_numpy),
}
_NAMES = {each.type: name for name, each in _KINDS.items()} | {each: "numpy" for each in np.sctypeDict.values()}


_LARGEST = 2**28  # bytes; the index of the largest models has a few megabytes


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; ValueError, naming it, if malformed, too deep or too large."""
    if path.stat().st_size > _LARGEST:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, more than the {_LARGEST} of any JSON; do not load it"
        )
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be of use; do not load it") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); give a file that is complete") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; give a JSON object")
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys: readers differ in which value they take, so a file could show one and mean the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(key for key in keys if keys.count(key) > 1)}' is there twice")
    return found
