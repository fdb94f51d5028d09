"""Values that pass through JSON: equal in type and value, or refused with the name of the key."""

from __future__ import annotations

import json
import random
import re
import signal
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from shardformer.utils.typed_json import from_json, to_json

LEAVES = [
    float("inf"),
    -0.0,
    2**80,
    1 + 2j,
    b"bytes",
    bytearray(b"bytes"),
    Decimal("1.10"),
    Fraction(1, 3),
    Path("a/b"),
    range(1, 5, 2),
    slice(None, 3),
    date(2026, 1, 2),
    datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    datetime(2026, 1, 2, fold=1),
    time(1, 2, 3),
    timedelta(1, 2, 3),
    signal.SIGTERM,
    re.IGNORECASE | re.MULTILINE,
    torch.bfloat16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    torch.tensor(0.1, dtype=torch.bfloat16),
    torch.arange(6).reshape(2, 3).t(),
    torch.zeros(0, 3),
    torch.tensor([1 + 2j]).conj(),
    np.float32(0.1),
    np.bool_(True),
    np.arange(6, dtype=np.int16).reshape(2, 3).T,
    np.datetime64("2026-01-02"),
    random.getstate(),
    np.random.get_state(),
    {6: 2, "6": 1, None: 0, (1, 2): {3: (4,)}},
    {"$type": "tuple", "value": [1]},
    {"$type": 1},
    Counter({6: 1}),
    OrderedDict([(2, 1), (1, 2)]),
    deque([1, (2,)], maxlen=3),
]


def through_json(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value, "value"))))


def is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return is_equal(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return repr(one) == repr(other) if isinstance(one, float) else one == other


@pytest.mark.parametrize("value", LEAVES, ids=lambda value: type(value).__name__)
def test_every_kind_comes_back_equal_in_type_and_value(value: Any) -> None:
    for whole in (value, [value], (value,), {"key": {1: value}}):
        assert is_equal(through_json(whole), whole)


_KEYS = some.one_of(some.none(), some.booleans(), some.integers(), some.text(), some.tuples(some.integers()))
_VALUES = some.recursive(
    some.one_of(_KEYS, some.floats(allow_nan=False), some.binary(), some.sets(some.integers())),
    lambda inner: some.one_of(
        some.lists(inner), some.lists(inner).map(tuple), some.dictionaries(_KEYS, inner), some.lists(inner).map(deque)
    ),
)


def test_large_tensors_may_be_kept_apart() -> None:
    apart: list[Tensor] = []
    whole = {"average": (torch.arange(300).to(torch.complex128), {3: torch.ones(2000, 2).t().bfloat16()}), "n": 1}
    text = json.dumps(to_json(whole, "value", apart))
    assert len(text) < 1000
    assert [each.dtype for each in apart] == [torch.uint8] * 2
    assert is_equal(from_json(json.loads(text), apart), whole)
    with pytest.raises(ValueError, match="of the kind 'tensor apart'"):
        from_json(json.loads(text))


@settings(max_examples=40, deadline=None)
@given(_VALUES)
def test_any_nesting_comes_back(value: Any) -> None:
    assert is_equal(through_json(value), value)


class _Mapping(dict):
    pass


def _circle() -> Any:
    value: list[Any] = [1]
    value.append({"again": value})
    return value


def _local_enumeration() -> Any:
    return Enum("Local", "one").one


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: {"a": [{7: print}]}, r"^state\['a'\]\[0\]\[7\] is a builtin_function_or_method, which a checkpoint"),
        (lambda: {object(): 1}, "^a key of state is a object"),
        (lambda: _Mapping(a=1), "^state is a _Mapping"),
        (_circle, r"^state\[1\]\['again'\] contains itself"),
        (_local_enumeration, "^state is a Local, which is not a class of a module; give its value"),
        (lambda: torch.nn.Parameter(torch.ones(1)), "^state is a Parameter"),
        (lambda: torch.ones(1, requires_grad=True), "requires gradients"),
        (lambda: torch.ones(1, device="meta"), "without values"),
        (lambda: torch.ones(2).to_sparse(), "sparse"),
        (lambda: torch.zeros(2**23), "more than 16777216; save it in a file of its own"),
        (lambda: np.array([print]), "an array of the type object"),
    ],
)
def test_what_cannot_be_kept_is_named(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        to_json(make(), "state")


@pytest.mark.parametrize(
    ("kind", "parts", "sentence"),
    [
        ("enum", {"module": "os", "class": "system", "name": "true"}, "import it before loading"),
        ("enum", {"module": "not.imported", "class": "Colour", "name": "red"}, "import it before loading"),
        ("enum", {"module": "signal", "class": "Signals.mro", "name": "x"}, "import it before loading"),
        ("enum", {"module": "signal", "class": "Signals", "name": "man"}, "has Signals.man, and signal has no such"),
        ("dtype", "torch.int99", "has the dtype torch.int99, which torch"),
        ("pickle", "", "of the kind 'pickle', which this version does not read"),
    ],
)
def test_what_a_file_names_and_this_process_has_not_is_refused(kind: str, parts: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_json({"$type": kind, "value": parts})
