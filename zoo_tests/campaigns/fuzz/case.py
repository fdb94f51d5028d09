"""What the fuzzer draws: one training script, as data that JSON can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

Action = Mapping[str, Any]  # {"do": "step", ...}: see `script.py`


@dataclass(frozen=True, kw_only=True)
class Case:
    """One script.

    Attributes:
        family, head: of `families.FAMILIES`.
        config: beside the family's own configuration.
        precision: "fp64", "fp32", "bf16" or "fp16".
        world_size: number of ranks.
        plugin: options of `HybridParallelPlugin`.
        optimizer: its "name" in torch.optim, how "groups" are made, and its options.
        scheduler: a class of torch.optim.lr_scheduler and its options; empty for none.
        padding: "mixed", "right", "left", "none" (all of a length) or "no mask".
        rows: samples of a full global batch.
        lora: options of peft's LoRA; empty for none.
        frozen: parts of the names of parameters that are frozen from the start.
        script: actions in their order.
    """

    family: str
    head: str
    config: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp64"
    world_size: int = 1
    plugin: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"name": "SGD", "lr": 0.1, "groups": "one"})
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    padding: str = "mixed"
    rows: int = 6
    lora: Mapping[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    script: tuple[Action, ...] = ()

    @staticmethod
    def from_json(text: str) -> Case:
        """The case of a command line."""
        values = json.loads(text)
        return Case(**{**values, "frozen": tuple(values.get("frozen", ())), "script": tuple(values["script"])})

    def to_json(self) -> str:
        """One line, without what is at its default."""
        plain = asdict(Case(family="", head=""))
        kept = {name: value for name, value in asdict(self).items() if value != plain[name]}
        return json.dumps(kept)

    def but(self, **changes: Any) -> Case:
        """The same case with other values of some fields."""
        return replace(self, **changes)
