"""The trainable head classes of transformers, found in its sources without importing a family."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

_STATEMENT = re.compile(r"^(?=[A-Za-z_@\"'])", re.MULTILINE)  # at the top level of a module
_HEAD = re.compile(r"class \w*(For|LMHeadModel|DoubleHeadsModel|MTModel)")
_LABELS = frozenset(("labels", "start_positions", "next_sentence_label", "mc_labels"))


@dataclass(frozen=True)
class HeadClass:
    """A class whose forward takes labels.

    Attributes:
        family: folder of transformers' models.
        name: of the class.
        switches: (dotted path, value) of fields of its configuration that are not the default.
    """

    family: str
    name: str
    switches: tuple[tuple[str, Any], ...] = ()

    @property
    def module(self) -> str:
        return f"transformers.models.{self.family}.modeling_{self.family}"

    @property
    def kind(self) -> str:
        """What it is for: "ForCausalLM", "ForImageClassification", …"""
        return "For" + self.name.rpartition("For")[2] if "For" in self.name else "other"


@cache
def head_classes() -> tuple[HeadClass, ...]:
    """The heads (…For…, LMHeadModel, DoubleHeadsModel, MTModel) of each `modeling_<family>.py`: they derive from a
    pretrained model, and their forward, written there or one of transformers' generic heads, takes labels."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    found = []
    for file in sorted(models.glob("*/modeling_*.py")):
        if file.stem != f"modeling_{file.parent.name}":
            continue
        for source in _possible_heads(file.read_text(encoding="utf-8")):
            [node] = ast.parse(source).body
            if _is_head(node):
                found.append(HeadClass(file.parent.name, node.name))
    return tuple(found)


def training_refused(head: HeadClass) -> str | None:
    """The message with which the class's own forward refuses labels, as "Training is not yet supported"; or None."""
    import transformers

    file = Path(transformers.__file__).parent / "models" / head.family / f"modeling_{head.family}.py"
    sources = (text for text in _possible_heads(file.read_text("utf-8")) if f"class {head.name}(" in text)
    for node in ast.walk(ast.parse(next(sources, ""))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "labels is not None":
            first = node.body[0]
            if isinstance(first, ast.Raise) and isinstance(first.exc, ast.Call):
                return ast.literal_eval(first.exc.args[0])
    return None


def _possible_heads(source: str) -> Iterator[str]:
    """The sources of classes whose first line looks like a head's: to parse all of transformers takes seconds."""
    starts = [*(match.start() for match in _STATEMENT.finditer(source)), len(source)]
    for start, end in pairwise(starts):
        if _HEAD.match(source, start):
            yield source[start:end]


def _is_head(node: ast.ClassDef) -> bool:
    bases = [ast.unparse(base) for base in node.bases]
    if "For" not in node.name and not node.name.endswith(("LMHeadModel", "DoubleHeadsModel", "MTModel")):
        return False
    if not any("PreTrainedModel" in base or "PretrainedModel" in base for base in bases):
        return False
    if any(base.startswith("GenericFor") for base in bases):
        return True
    forwards = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "forward"]
    return any(argument.arg in _LABELS for each in forwards for argument in (*each.args.args, *each.args.kwonlyargs))


if __name__ == "__main__":  # for `benchmarks.league`, which is no part of the tests
    import json
    import sys

    sys.stdout.write(json.dumps([[head.family, head.name] for head in head_classes()]))
