"""What became of a head class, and logs of campaigns: rows of JSON, each written when known, so that a run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

EXACT = "exact"
WITH_CRITERION = "exact with a criterion"
NO_ANSWER = "a rank did not answer"
NO_PLAN = "neither a policy nor a plan of its own"
# In the order of the columns of the page.
OUTCOMES = (EXACT, WITH_CRITERION, "differs", "refused", "crashed", "no answer", "does not train plainly")
_BOTH_AXES, _EACH_AXIS = "tp2pp2", ("tp2", "pp2")
AXES = (_BOTH_AXES, *_EACH_AXIS)  # the layouts of which each class has an outcome


@dataclass
class Share:
    """What a layout divides of a model, each between 0 and 1; None where it is not measured.

    Attributes:
        parameters, flops: of the whole model, by two tensor-parallel ranks.
        stages: parameters by two stages: 1 if the larger one has half of them, 0 if it has all.
        full_size: parameters at the sizes of the default configuration, by two tensor-parallel ranks.
    """

    parameters: float | None = None
    flops: float | None = None
    stages: float | None = None
    full_size: float | None = None


@dataclass
class Verdict:
    """What became of a class.

    Attributes:
        plain: "exact", or why plain training failed.
        layouts: layout -> "exact" or the reason.
        share: what tensor parallelism and stages divide.
        seconds: that the class took.
        criterion: why it was trained with a criterion of the script's; empty if the loss was its own.
    """

    plain: str
    layouts: dict[str, str] = field(default_factory=dict)
    share: Share = field(default_factory=Share)
    seconds: float = 0.0
    criterion: str = ""

    def exact_under(self, layout: str) -> bool:
        """A class that is exact under both axes is so under each."""
        is_implied = layout in _EACH_AXIS and self.layouts.get(_BOTH_AXES) == EXACT
        return is_implied or self.layouts.get(layout) == EXACT

    def missing(self, layouts: Iterable[str]) -> list[str]:
        """Those of the layouts that have yet to be trained."""
        if self.plain != EXACT:
            return []
        return [layout for layout in layouts if layout not in self.layouts and not self.exact_under(layout)]

    def outcome(self, layout: str) -> str | None:
        """One of `OUTCOMES`; None if the class was not trained under the layout."""
        if self.plain != EXACT:
            return OUTCOMES[-1]
        if self.exact_under(layout):
            return WITH_CRITERION if self.criterion else EXACT
        return kind_of(self.layouts[layout]) if layout in self.layouts else None

    def failures(self) -> list[tuple[str, str]]:
        if self.plain != EXACT:
            return [("plain", self.plain)]
        return [(layout, reason) for layout, reason in self.layouts.items() if reason != EXACT]

    def __str__(self) -> str:
        return "; ".join(f"{where}: {reason}" for where, reason in self.failures()) or EXACT


def kind_of(reason: str) -> str:
    """Which of `OUTCOMES` a reason stands for."""
    if reason == EXACT:
        return EXACT
    if reason.startswith(NO_ANSWER):
        return "no answer"
    first, colon, _ = reason.partition(": ")
    if reason == NO_PLAN or first.endswith("ConfigurationError"):
        return "refused"
    return "crashed" if colon and first.endswith(("Error", "Exception", "Interrupt", "ended")) else "differs"


def reasons(found: Mapping[str, Mapping[str, str]]) -> str:
    """A line for each reason why models are not exact, with the models; found: model -> layout -> verdict."""
    models: dict[str, dict[str, None]] = {}
    for name, verdicts in found.items():
        for verdict in verdicts.values():
            if verdict != EXACT:
                model = name.partition("/")[2] or name
                sentence = verdict.removeprefix("booster.errors.ConfigurationError: ").replace(model, "the class")
                models.setdefault(sentence, {})[model] = None
    return "\n".join(f"- {sentence}: {', '.join(names)}" for sentence, names in models.items())


def read_rows(log: Path | None) -> list[Any]:
    """The rows of a log; one that was cut short, because its process was killed, does not count."""
    rows = []
    for line in log.read_text(encoding="utf-8").splitlines() if log is not None and log.exists() else ():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def add_row(log: Path | None, row: Any) -> None:
    """Add a row to a log, if there is one."""
    if log is None:
        return
    is_cut_short = log.exists() and log.stat().st_size and not log.read_bytes().endswith(b"\n")
    with log.open("a", encoding="utf-8") as file:
        file.write(("\n" if is_cut_short else "") + json.dumps(row) + "\n")


def read_log(log: Path) -> dict[str, Verdict]:
    """Family/class -> verdict, of the lines of a log; the last of several counts."""
    found = {}
    for entry in read_rows(log):
        name, share = entry.pop("class"), Share(**entry.pop("share"))
        found[name] = Verdict(**entry, share=share)
    return found


def append(log: Path, name: str, verdict: Verdict) -> None:
    """Add the verdict on family/class to a log."""
    add_row(log, {"class": name, **asdict(verdict)})
