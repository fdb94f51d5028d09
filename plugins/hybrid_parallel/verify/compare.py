"""Compare the sharded training with the unsharded one, and find the first place where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy
import torch

from plugins.hybrid_parallel.verify.module_outputs import Output, difference, relative
from plugins.hybrid_parallel.verify.train import Arrays, RecordedStep, Trace

_LOST = float("inf")


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that are tolerated."""

    loss: float  # tolerance of a loss
    # tolerance of a gradient relative to its largest element, of a weight relative to its change in training
    tensor: float
    floor: float  # lower limit of a gradient's reference value, relative to the largest element of all gradients
    moved_floor: float = 1e-3  # lower limit of a weight's reference value, its change in training


# transformers computes losses and many norms in fp32, whatever the dtype of the model.
TOLERANCES = {"fp64": Tolerance(1e-6, 1e-5, 1e-5), "fp32": Tolerance(1e-4, 1e-3, 1e-4)}


@dataclass(frozen=True)
class Worst:
    """Largest relative difference of several tensors."""

    what: str  # "losses", "gradients of step 1", …
    value: float  # the relative difference
    name: str  # name of the tensor; empty for losses
    count: int  # number of values or tensors that were compared


@dataclass(frozen=True)
class Difference:
    """The first place where the two trainings differ."""

    step: int  # counted from 1
    what: str  # "output", "loss", "gradient", "weight", or "failure" if the sharded training fails
    name: str  # name of the module or parameter; empty for the loss, and for the model itself
    value: float  # relative difference
    text: str  # description of the difference


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison."""

    # the largest difference of the losses, of the first gradients and of the last weights
    worst: list[Worst] = field(default_factory=list)
    first: Difference | None = None  # the first difference; None if the trainings are equal
    # parameters that get no gradient in the unsharded training, and are not compared
    untrained: list[str] = field(default_factory=list)


def compare(plain: Trace, ranks: Sequence[Trace], tolerance: Tolerance) -> Verdict:
    """Compare all steps of both trainings."""
    first = None
    gradients: dict[str, float] = {}
    weights: dict[str, float] = {}
    losses = []
    for index, step in enumerate(plain.steps):
        sharded = [rank.steps[index] for rank in ranks]
        losses.append(max(_relative_loss(each.loss, step.loss) for each in sharded))
        of_gradients = dict(_gradients(plain, step, sharded, tolerance))
        weights = dict(_weights(step, sharded, plain.first_weights, tolerance))
        gradients = gradients or of_gradients
        if first is None:
            first = _first(index, plain, ranks, (losses[-1], of_gradients, weights), tolerance)
    found = [
        Worst("losses", max(losses, key=_rank), "", len(losses)),
        _worst("gradients of step 1", gradients),
        _worst(f"weights after step {len(losses)}", weights),
    ]
    trained = set(plain.steps[0].gradients)
    return Verdict(found, first, sorted(min(names) for names in plain.aliases if not names & trained))


def _first(
    index: int,
    plain: Trace,
    ranks: Sequence[Trace],
    differences: tuple[float, Mapping[str, float], Mapping[str, float]],
    tolerance: Tolerance,
) -> Difference | None:
    """Return the first difference in a step; None if there is none."""
    loss, gradients, weights = differences
    step = plain.steps[index]
    bad_loss = not loss < tolerance.loss
    bad = {name: value for name, value in gradients.items() if not value < tolerance.tensor}
    if bad_loss or bad:
        outputs, compared = _first_output(index, plain, ranks, tolerance)
        if outputs is not None:
            return outputs
        if bad_loss and (compared or not bad):
            text = f"the loss differs by {loss:.1e}, although {compared} outputs of modules agree"
            return Difference(index + 1, "loss", "", loss, text)
        order = _forward_order(step, bad)
        name = order[-1] if compared else order[0]
        why = (
            f"the forward pass agrees; of {len(bad)} gradients that differ this one is computed first, so look at the "
            "backward pass of its module and of the one behind it"
            if compared
            else f"outputs of modules could not be compared; of {len(bad)} gradients that differ this is the first in "
            "the order of the forward pass"
        )
        return Difference(index + 1, "gradient", name, bad[name], f"the gradient of {name} {_by(bad[name])}: {why}")
    worse = {name: value for name, value in weights.items() if not value < tolerance.tensor}
    if worse:
        name = _forward_order(step, worse)[0]
        text = f"{name} {_by(worse[name])} after the optimizer's step, although its gradient agrees"
        return Difference(index + 1, "weight", name, worse[name], text)
    return None


def _by(value: float) -> str:
    return "is missing" if value == _LOST else f"differs by {value:.1e}"


def _first_output(
    index: int, plain: Trace, ranks: Sequence[Trace], tolerance: Tolerance
) -> tuple[Difference | None, int]:
    """Return the first module output that differs (or None), and the number of outputs before it that agree.

    Ranks may return partial sums, which the enclosing module reduces. If it does not, the first partial sum is
    reported.
    """
    sharded, mask = _by_stage(index, ranks), plain.masks[index]
    found = [
        (output, held, value)
        for output in plain.steps[index].outputs
        if (value := _nearest(output, held := sharded.get(output.name, []), mask)) is not None
    ]
    agreeing: dict[str, bool] = {}
    for output, _, value in found:
        agreeing[output.name] = agreeing.get(output.name, True) and value < tolerance.tensor
    agree, part = 0, None
    for output, held, value in found:
        if value < tolerance.tensor:
            agree, part = agree + 1, None
        elif _is_harmless(output.name, agreeing):
            continue
        elif _is_sum(output, held, mask, tolerance):
            part = part or (output, value)
        else:
            first, value = part or (output, value)
            why = "ranks hold partial sums that are never reduced; " if part else ""
            text = (
                f"the output of {first.name or 'the model'} ({first.kind}) is the first that differs, by {value:.1e}: "
                f"{why}{agree} outputs before it agree"
            )
            return Difference(index + 1, "output", first.name, value, text), agree
    return None, agree


def _is_harmless(name: str, agreeing: Mapping[str, bool]) -> bool:
    """Check whether the enclosing module's output agrees: experts may receive their tokens in another order."""
    while name:
        name = name.rpartition(".")[0]
        if name in agreeing:
            return agreeing[name]
    return False


def _is_sum(
    expected: Output, held: Sequence[list[list[Output]]], mask: torch.Tensor | None, tolerance: Tolerance
) -> bool:
    value = _nearest(expected, held, mask, as_sum=True)
    return value is not None and value < tolerance.tensor


def _nearest(
    expected: Output, held: Sequence[list[list[Output]]], mask: torch.Tensor | None, as_sum: bool = False
) -> float | None:
    """Return the smallest difference between an unsharded call and any sharded call of the same module.

    Call indices do not match on a stage that runs only some of the calls. Also, modules that a later stage runs before
    its first layer get placeholder inputs that only have the right shape.
    """
    found = (difference(expected, replicas, mask, as_sum) for replicas in held)
    return min((value for value in found if value is not None), default=None)


def _by_stage(index: int, ranks: Sequence[Trace]) -> dict[str, list[list[list[Output]]]]:
    """Group outputs: module -> calls on every stage, each [dp][tp]; skip calls that some rank of the stage lacks."""
    places: dict[int, dict[tuple[int, int], dict[tuple[str, int], Output]]] = {}
    for rank in ranks:
        numbered: dict[tuple[str, int], Output] = {}
        for output in rank.steps[index].outputs:
            call = sum(1 for name, _ in numbered if name == output.name)
            numbered[output.name, call] = output
        places.setdefault(rank.stage, {})[rank.dp_rank, rank.tp_rank] = numbered
    found: dict[str, list[list[list[Output]]]] = {}
    for grid in places.values():
        num_dp, num_tp = (1 + max(place[axis] for place in grid) for axis in (0, 1))
        for key in grid[0, 0]:
            if all(key in outputs for outputs in grid.values()):
                call = [[grid[dp, tp][key] for tp in range(num_tp)] for dp in range(num_dp)]
                found.setdefault(key[0], []).append(call)
    return found


def _gradients(
    plain: Trace, expected: RecordedStep, sharded: Sequence[RecordedStep], tolerance: Tolerance
) -> Iterator[tuple[str, float]]:
    """Yield (name, largest relative difference over ranks) of gradients; infinite if no rank has the gradient."""
    largest = max((float(numpy.abs(value).max(initial=0.0)) for value in expected.gradients.values()), default=0.0)
    floor = max(largest, 1.0) * tolerance.floor
    held = {name for step in sharded for name in step.gradients}
    for names in plain.aliases:
        trained = names & set(expected.gradients)
        if not trained:
            continue
        if not names & held:
            yield min(trained), _LOST
        for name in sorted(names & held):
            pairs = [(step.gradients[name], expected.gradients[name]) for step in sharded if name in step.gradients]
            yield name, max((_relative(found, value, value, floor) for found, value in pairs), key=_rank)


def _weights(
    expected: RecordedStep, sharded: Sequence[RecordedStep], origin: Arrays, tolerance: Tolerance
) -> Iterator[tuple[str, float]]:
    """Yield (name, largest difference over ranks) of weights, relative to the weight's change in training."""
    for name, value in expected.weights.items():
        found = [step.weights[name] for step in sharded if name in step.weights]
        if found and value.dtype.kind == "f":
            moved = value - origin[name]
            yield name, max((_relative(each, value, moved, tolerance.moved_floor) for each in found), key=_rank)


def _relative(found: numpy.ndarray, expected: numpy.ndarray, scale: numpy.ndarray, floor: float) -> float:
    if found.shape != expected.shape:
        return _LOST
    gap = float(numpy.abs(found - expected).max(initial=0.0))
    size = max(float(numpy.abs(scale).max(initial=0.0)), floor)
    return gap and (gap / size if size and gap == gap else _LOST)


def _relative_loss(found: float, expected: float) -> float:
    return relative(*(torch.tensor([value], dtype=torch.float64) for value in (found, expected)))


def _worst(what: str, differences: Mapping[str, float]) -> Worst:
    name = max(differences, key=lambda each: _rank(differences[each]), default="")
    return Worst(what, differences.get(name, 0.0), name, len(differences))


def _rank(value: float) -> float:
    return value if value == value else _LOST


def _forward_order(step: RecordedStep, names: Mapping[str, float]) -> list[str]:
    """Sort parameters by the order in which their modules returned."""
    position = {output.name: index for index, output in enumerate(step.outputs)}
    last = len(position)
    return sorted(names, key=lambda name: position.get(name.rpartition(".")[0], last))


def to_text(verdict: Verdict, precision: str) -> list[str]:
    """Return lines of text: "equal" or the first difference, then the largest difference of each kind."""
    first, untrained = verdict.first, verdict.untrained
    lines = [_in_a_line(first)]
    for worst in verdict.worst:
        where = f" ({worst.name})" if worst.name and worst.value > 0 else ""
        gap = f"largest relative difference {worst.value:.1e}, allowed {allowed(worst, precision):.0e}"
        lines.append(f"  {worst.count:>4} {worst.what:<22} {gap}{where}")
    if untrained:
        lines.append(f"  {len(untrained):>4} parameters that the batch does not reach were not judged ({untrained[0]})")
    return lines


def allowed(worst: Worst, precision: str) -> float:
    """Return the largest relative difference that is tolerated for this kind."""
    tolerance = TOLERANCES[precision]
    return tolerance.loss if worst.what == "losses" else tolerance.tensor


def _in_a_line(first: Difference | None) -> str:
    if first is None:
        return "equal"
    return f"failed: {first.text}" if first.what == "failure" else f"different: step {first.step}, {first.text}"
