"""One head class, trained plainly and sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plugins.hybrid_parallel.verify.random_batch import batch_for
from zoo_tests.campaigns.census.classes import HeadClass
from zoo_tests.campaigns.census.tiny import build
from zoo_tests.harness.case import LAYOUTS
from zoo_tests.harness.ranks import RankError, run_on_ranks

_STEPS = 2
_TIMEOUT_S = 90.0  # on a machine that does something else, too
_LENGTH = 160  # of a reason
_TOLERANCE, _FLOOR = 1e-3, 1e-4
# Losses, gradients by every name, the first names of parameters with a gradient.
Run = tuple[list[float], dict[str, Tensor], set[str]]


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

    try:
        model = build(head)
    except Exception:  # told by plain_run
        return None
    try:
        policy_for(model)
    except ValueError:
        return "neither a policy nor a plan of its own"
    return None


def plain_run(head: HeadClass) -> Run | str:
    """Losses and first gradients of plain training, or why there are none."""
    try:
        model = build(head)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses, gradients, required = [], {}, set()
        state = torch.get_rng_state()
        for step in range(_STEPS):
            loss = model(**batch_for(model, step)).loss
            if loss is None:
                return "returns no loss for these labels"
            loss.backward()
            if step == 0:
                named = model.named_parameters(remove_duplicate=False)
                gradients = {name: param.grad.clone() for name, param in named if param.grad is not None}
                required = {name for name, param in model.named_parameters() if param.grad is not None}
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:  # any of a thousand classes may fail in its own way
        return _short(error)
    if not all(abs(loss) < 1e4 for loss in losses):
        return f"losses {losses} are not finite"
    if not torch.equal(torch.get_rng_state(), state) and _depends_on_random_numbers(head, gradients):
        return "draws random numbers in training: no two runs agree"
    return losses, gradients, required


def _depends_on_random_numbers(head: HeadClass, gradients: dict[str, Tensor]) -> bool:
    """Whether another seed in training gives other first gradients (a router that samples; dropout is off here)."""
    model = build(head)
    batch = batch_for(model, 0)
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        model(**batch).loss.backward()
        named = model.named_parameters(remove_duplicate=False)
        found = {name: param.grad for name, param in named if param.grad is not None}
        if found.keys() != gradients.keys() or any(_difference(found[n], gradients[n]) > _TOLERANCE for n in found):
            return True
        model.zero_grad()
    return False


def sharded_verdict(head: HeadClass, layout: str, plain: Run, **options: Any) -> str:
    """ "exact", or the reason; `options` are further ones of the plugin."""
    try:
        runs = run_on_ranks(LAYOUTS[layout].world_size, train_on_rank, head, layout, options, timeout_s=_TIMEOUT_S)
    except RankError as error:
        lines = [line for line in str(error).splitlines() if "Error: " in line]
        return _short(lines[-1] if lines else "a rank did not answer")
    losses, gradients = runs[0][0], {name: value for _, found, _ in runs for name, value in found.items()}
    worst = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, plain[0], strict=True))
    if not worst < _TOLERANCE:
        return f"losses differ by {worst:.1e}"
    lost = sorted(plain[2] - set(gradients))
    if lost:
        return f"no gradient of {lost[0]}"
    differences = {name: _difference(value, plain[1][name]) for name, value in gradients.items() if name in plain[1]}
    name, worst = max(differences.items(), key=lambda item: item[1])
    return "exact" if worst < _TOLERANCE else f"gradient of {name} differs by {worst:.1e}"


def train_on_rank(head: HeadClass, layout: str, options: Mapping[str, Any]) -> Run:
    """Losses, and the full first gradients of this stage's parameters."""
    from booster import Booster
    from plugins.hybrid_parallel import HybridParallelPlugin

    sizes = LAYOUTS[layout]
    plugin = HybridParallelPlugin(
        tp_size=sizes.tp_size, pp_size=sizes.pp_size, num_microbatches=sizes.pp_size, **options
    )
    model = build(head)
    booster, whole = Booster(plugin=plugin), model
    batches = [batch_for(whole, step) for step in range(_STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = booster.boost(model, optimizer)
    losses, gradients = [], {}
    for step, batch in enumerate(batches):
        losses.append(booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss.item())
        if step == 0:
            gradients = {name: value.clone() for name, value in optimizer.full_gradients().items()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, set(gradients)


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    scale = max(expected.abs().max().item(), _FLOOR) if expected.numel() else 1.0
    return (found - expected).abs().max().item() / scale if expected.numel() else 0.0


def _short(error: object) -> str:
    text = " ".join(str(error).split()).replace("|", "/") or type(error).__name__
    return text if len(text) <= _LENGTH else text[: _LENGTH - 1] + "…"
