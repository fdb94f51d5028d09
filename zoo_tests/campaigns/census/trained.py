"""One head class, trained plainly and sharded, by the code of `booster verify`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from plugins.hybrid_parallel.verify.compare import Tolerance, compare
from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, build_small, small_config
from plugins.hybrid_parallel.verify.train import Trace, VerifyCase, train_on_rank, train_reference
from zoo_tests.campaigns.census.classes import HeadClass, training_refused
from zoo_tests.harness.case import LAYOUTS
from zoo_tests.harness.ranks import RankError, run_on_ranks

_ROWS, _STEPS = 6, 2
_TIMEOUT_S = 90.0  # on a machine that does something else, too
_LENGTH = 160  # of a reason
_TOLERANCE = Tolerance(loss=1e-3, tensor=1e-3, floor=1e-4)
# Windows also where a family's own configuration has none.
_SIZES = TwinSizes(kv_heads=4, is_faithful=False)


@dataclass
class Verdict:
    """What became of a class.

    Attributes:
        plain: "exact", or why plain training failed.
        layouts: layout -> "exact" or the reason.
    """

    plain: str
    layouts: dict[str, str] = field(default_factory=dict)

    def exact_under(self, layout: str) -> bool:
        """A class that is exact under both axes is so under each."""
        return self.layouts.get(layout) == "exact" or self.layouts.get("tp2pp2") == "exact"

    def failures(self) -> list[tuple[str, str]]:
        if self.plain != "exact":
            return [("plain", self.plain)]
        return [(layout, reason) for layout, reason in self.layouts.items() if reason != "exact"]

    def __str__(self) -> str:
        return "; ".join(f"{where}: {reason}" for where, reason in self.failures()) or "exact"


def refusal(head: HeadClass) -> str | None:
    """Why the class cannot be sharded at all, or None; also where the model cannot be built, which comes later."""
    from shardformer.policies.registry import policy_for

    if training_refused(head) is not None:  # told by plain_run
        return None
    try:
        model = _twin(head).build()
    except Exception:  # told by plain_run
        return None
    try:
        policy_for(model)
    except ValueError:
        return "neither a policy nor a plan of its own"
    return None


def plain_run(head: HeadClass) -> Trace | str:
    """Plain training, or why there is none."""
    refused = training_refused(head)
    if refused is not None:
        return _short(f"transformers: {refused}")
    try:
        return train_reference(VerifyCase(_twin(head), _ROWS, _STEPS, {}))
    except Exception as error:  # any of a thousand classes may fail in its own way
        return _short(error)


def sharded_verdict(head: HeadClass, layout: str, plain: Trace, **options: Any) -> str:
    """ "exact" if all losses and the first gradients agree, or the reason; `options` are further ones of the plugin."""
    sizes = LAYOUTS[layout]
    options |= {"tp_size": sizes.tp_size, "pp_size": sizes.pp_size, "num_microbatches": sizes.pp_size}
    case = VerifyCase(_twin(head), _ROWS, _STEPS, options)
    try:
        ranks = run_on_ranks(sizes.world_size, train_on_rank, case, timeout_s=_TIMEOUT_S)
    except RankError as error:
        lines = [line for line in str(error).splitlines() if "Error: " in line]
        return _short(lines[-1] if lines else "a rank did not answer")
    verdict = compare(plain, ranks, _TOLERANCE)
    losses, gradients, _ = verdict.worst
    is_exact = losses.value < _TOLERANCE.loss and gradients.value < _TOLERANCE.tensor
    return "exact" if is_exact else _short(verdict.first.text)


class _Twin(TinyModel):
    """A tiny model that may be large: some families have layers of a fixed size."""

    def build(self) -> nn.Module:
        return build_small(getattr(importlib.import_module(self.module), self.name), self.config, self.dtype)


def _twin(head: HeadClass) -> _Twin:
    config_class = getattr(importlib.import_module(head.module), head.name).config_class
    return _Twin(head.module, head.name, small_config(config_class(), _SIZES), torch.float32)


def _short(error: object) -> str:
    text = " ".join(str(error).split()).replace("|", "/") or type(error).__name__
    return text if len(text) <= _LENGTH else text[: _LENGTH - 1] + "…"
