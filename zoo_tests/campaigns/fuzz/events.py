"""Draws the script of a case: training steps, and what users do between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from zoo_tests.campaigns.fuzz.case import Action, Case
from zoo_tests.campaigns.fuzz.families import LAST_LABEL
from zoo_tests.zoo import Head

MAX_EVENTS = 4
_WEIGHTS = {
    "evaluate": 4,
    "forward": 1.5,
    "generate": 2,
    "reload": 4,
    "files": 1.5,
    "state_dicts": 1.5,
    "freeze": 1.5,
    "scale": 1.5,
    "lr": 1.5,
    "hook": 1.5,
    "exception": 1.5,
}
# With a 16-bit copy of the weights plain torch has no word for the others.
_OF_SIXTEEN_BIT = ("evaluate", "forward", "reload", "lr")
_FROZEN = ("embed", "bias", "norm", ".0.", "k_proj", "query", "dense", "classifier", "score", "mlp")
_SCALED = ("bias", "norm", "LayerNorm", "embed", "q_proj", "dense", "down_proj", "lm_head")
_HOOKED = ("norm", "LayerNorm", "down_proj", "dense", "mlp", "o_proj", "embed_tokens", "q_proj")
_GENERATES = ("causal_lm", "lm_head")


def draw_script(
    numbers: random.Random, case: Case, head: Head, other_options: Callable[[], dict[str, Any]]
) -> list[Action]:
    """Two or three steps, with up to `MAX_EVENTS` events before, between and behind them."""
    script = _Script(numbers, case, head, other_options)
    steps = numbers.choice([2, 2, 3])
    places = sorted(numbers.randrange(steps + 1) for _ in range(numbers.randint(0, MAX_EVENTS)))
    for step in range(steps + 1):
        for _ in range(places.count(step)):
            script.event()
        if step < steps:
            script.step(step)
    return script.actions


class _Script:
    def __init__(
        self, numbers: random.Random, case: Case, head: Head, other_options: Callable[[], dict[str, Any]]
    ) -> None:
        self.numbers, self.case, self.head, self.other_options = numbers, case, head, other_options
        self.actions: list[Action] = []
        self.plugin = case.plugin  # of the layout that the script has come to
        self.frozen: list[str] = []
        self.is_fresh = True  # `execute_pipeline` has not seen a full batch under this layout

    def step(self, number: int) -> None:
        numbers, rows = self.numbers, self.case.rows
        action: dict[str, Any] = {"do": "step", "data": numbers.randrange(40), "rows": rows}
        if not self.is_fresh and numbers.random() < 0.3:
            action["rows"] = numbers.randint(1, rows)  # a short last batch
        if self._may_loop(action["rows"]) and numbers.random() < 0.4:
            action["way"] = "ordinary"
        if numbers.random() < 0.2:
            action["parts"] = 2
        if numbers.random() < 0.25 and self.case.family not in LAST_LABEL:
            first = numbers.randrange(action["rows"])
            action["ignored"] = [first, numbers.randint(first + 1, action["rows"])]
        if numbers.random() < 0.1 and self.case.precision not in ("bf16", "fp16"):
            action["zero"] = "model"
        self.actions.append(action)
        self.is_fresh = self.is_fresh and "way" in action

    def event(self) -> None:
        weights = dict(_WEIGHTS)
        if self.case.precision in ("bf16", "fp16"):
            weights = {name: weights[name] for name in _OF_SIXTEEN_BIT}
        if not self._generates():
            weights.pop("generate", None)
        if self._size("pp_size") > 1:  # the other ranks would not hear of it
            weights.pop("exception", None)
        name = self.numbers.choices(list(weights), list(weights.values()))[0]
        self.actions.append({"do": name, **getattr(self, f"_{name}", dict)()})
        if name == "freeze" and self.actions[-1]["part"] in self.frozen:
            self.frozen.remove(self.actions[-1]["part"])
            self.actions[-1] = {**self.actions[-1], "do": "unfreeze"}
        elif name == "freeze":
            self.frozen.append(self.actions[-1]["part"])

    def _evaluate(self) -> dict[str, Any]:
        rows = self.numbers.randint(1, self.case.rows)
        action = {"data": self.numbers.randrange(40), "rows": rows}
        if self._may_loop(rows) and self.numbers.random() < 0.3:
            action["way"] = "ordinary"
        return action

    _forward = _evaluate

    def _generate(self) -> dict[str, Any]:
        return {"data": self.numbers.randrange(40), "rows": 2, "beams": self.numbers.choice([1, 1, 2])}

    def _reload(self) -> dict[str, Any]:
        self.plugin, self.is_fresh = self.other_options(), True
        return {"plugin": self.plugin, "asynchronous": self.numbers.random() < 0.2}

    def _freeze(self) -> dict[str, Any]:
        parts = self.frozen if self.frozen and self.numbers.random() < 0.5 else _FROZEN
        return {"part": self.numbers.choice(parts)}

    def _scale(self) -> dict[str, Any]:
        return {"part": self.numbers.choice(_SCALED), "factor": self.numbers.choice([0.5, 0.9, 1.1])}

    def _lr(self) -> dict[str, Any]:
        return {"factor": self.numbers.choice([0.1, 0.5, 1.5])}

    def _hook(self) -> dict[str, Any]:
        return {"name": self.numbers.choice(_HOOKED), "factor": self.numbers.choice([0.5, 0.9])}

    def _exception(self) -> dict[str, Any]:
        return {"data": self.numbers.randrange(40), "rows": self.case.rows}

    def _size(self, axis: str) -> int:
        return self.plugin.get(axis, 1)

    def _may_loop(self, rows: int) -> bool:
        """Whether the ordinary loop takes such a batch: no stages, no empty share, and a loss of the head's own."""
        return self._size("pp_size") == 1 and rows >= self._replicas() and self.head.criterion is None

    def _replicas(self) -> int:
        return self.case.world_size // (self._size("tp_size") * self._size("pp_size") * self._size("cp_size"))

    def _generates(self) -> bool:
        return (
            self.case.head in _GENERATES
            and all(self._size(axis) == 1 for axis in ("pp_size", "cp_size", "ep_size"))
            and self.plugin.get("sequence_parallelism_mode") != "all_to_all"
        )
