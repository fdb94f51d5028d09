"""The tables of families that `verify` reads: each entry names what exists.

What breaks here first: a group of fields or a maker of inputs that is spelled otherwise, or gets other arguments.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from plugins.hybrid_parallel.verify import family_inputs, tiny_model
from plugins.hybrid_parallel.verify.tiny_model import family_fields

_FOLDER = Path(tiny_model.__file__).parent
_FIELDS = json.loads((_FOLDER / "family_fields.json").read_text(encoding="utf-8"))
_INPUTS = json.loads((_FOLDER / "family_inputs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("section", ["fields", "switches"])
def test_a_family_has_the_fields_of_its_groups_and_its_own(section: str) -> None:
    for kind, own in _FIELDS[section].items():
        groups = [_FIELDS["groups"][name] for name in own.get("like", ())]
        expected = set(own).union(*groups) - {"like", "why"}
        assert expected and family_fields(kind, section).keys() == expected, kind


def test_an_unknown_family_has_no_fields() -> None:
    assert family_fields("unknown", "fields") == {}


def test_every_input_has_a_maker_that_takes_its_arguments() -> None:
    makers = family_inputs._MAKERS
    for name, how in _INPUTS.items():
        if how is not None:
            inspect.signature(makers[how[0]]).bind(None, *how[1:])
            assert name.count("/") == 1, name
    unused = makers.keys() - {how[0] for how in _INPUTS.values() if how is not None}
    assert not unused, unused
