"""Holds sharded training to plain training: losses, every gradient and every weight, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from zoo_tests.case import Case
from zoo_tests.oracle import Trace, train_plainly
from zoo_tests.ranks import run_on_ranks
from zoo_tests.sharded import RankReport, train_sharded

_SHOWN = 6  # offenders in a message
_FLOOR = 1e-3  # tensors with nothing above this are compared to this


@dataclass(frozen=True)
class Tolerance:
    """Largest differences, relative to the loss or to the largest element of a tensor."""

    loss: float
    gradient: float
    weight: float


TOLERANCES = {
    "fp64": Tolerance(loss=1e-9, gradient=1e-9, weight=1e-9),
    "fp32": Tolerance(loss=1e-5, gradient=1e-4, weight=1e-4),
    "bf16": Tolerance(loss=1e-2, gradient=1e-1, weight=1e-2),
    "fp16": Tolerance(loss=2e-3, gradient=2e-2, weight=2e-3),
}


def check_case(case: Case, directory: Path) -> None:
    """Train both ways and compare everything.

    Args:
        directory: an empty directory for the files of this case.

    Raises:
        AssertionError: they differ; the message names the first tensors that do.
    """
    reports = run_on_ranks(case.sizes.world_size, train_sharded, case, directory)
    plain = train_plainly(case.recipe)
    tolerance = TOLERANCES[case.recipe.precision]
    _check_ranks_agree(reports, exact=case.recipe.precision == "fp64")
    check_losses(reports[0].losses, plain.losses, tolerance.loss)
    if case.recipe.max_norm is not None:
        check_losses(reports[0].grad_norms, plain.grad_norms, tolerance.gradient, "gradient norms")
    check_gradients(_load_gradients(case, directory), plain, tolerance.gradient)
    check_weights(_load_weights(case, directory / "model"), plain, tolerance.weight)


def check_losses(
    found: Sequence[float], expected: Sequence[float], tolerance: float, what: str = "losses"
) -> None:
    """Compare numbers of every step."""
    assert len(found) == len(expected), f"{len(found)} {what}, expected {len(expected)}"
    wrong = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True)]
    # `not <` and not `>=`: a NaN must fail.
    assert all(difference < tolerance for difference in wrong), (
        f"{what} differ by {max(wrong):.3e} (relative, allowed {tolerance:.0e}):\n"
        f"  sharded {[f'{x:.12g}' for x in found]}\n  plain   {[f'{x:.12g}' for x in expected]}"
    )


def check_gradients(found: Mapping[str, Tensor], plain: Trace, tolerance: float) -> None:
    """Compare gradients by name; every parameter that has one in plain training must be there."""
    unknown = sorted(set(found) - set(plain.gradients))
    assert not unknown, f"gradients of parameters that have none in plain training: {unknown[:_SHOWN]}"
    lost = [sorted(names) for names in plain.aliases if names & set(plain.gradients) and not names & set(found)]
    assert not lost, f"{len(lost)} parameters have no gradient: {lost[:_SHOWN]}"
    check_tensors(found, plain.gradients, tolerance, "gradients")


def check_weights(found: Mapping[str, Tensor], plain: Trace, tolerance: float) -> None:
    """Compare weights by name. Plain training must have moved them, or agreement would mean nothing."""
    assert set(found) == set(plain.weights), f"names differ: {sorted(set(found) ^ set(plain.weights))[:_SHOWN]}"
    still = [name for name, gradient in plain.gradients.items() if _is_still(name, gradient, plain, 10 * tolerance)]
    assert not still, f"plain training moved these too little to prove anything: {still[:_SHOWN]}"
    check_tensors(found, plain.weights, tolerance, "weights")


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str) -> None:
    """Compare tensors by name, each relative to its largest element."""
    wrong = []
    for name, value in found.items():
        want = expected[name]
        if value.shape != want.shape:
            wrong.append((float("inf"), f"{name}: shape {tuple(value.shape)}, expected {tuple(want.shape)}"))
            continue
        difference = _largest(value.double() - want.double())
        relative = difference / max(_largest(want.double()), _FLOOR)
        if not relative < tolerance:
            wrong.append((relative, f"{name}: differs by {difference:.3e}, {relative:.3e} of its largest element"))
    wrong.sort(key=lambda item: -item[0])
    lines = "\n  ".join(line for _, line in wrong[:_SHOWN])
    assert not wrong, f"{len(wrong)} of {len(found)} {what} differ (allowed {tolerance:.0e}), worst first:\n  {lines}"


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _is_still(name: str, gradient: Tensor, plain: Trace, least: float) -> bool:
    """Whether a weight with a gradient to speak of has moved by less than `least` of its largest element."""
    if _largest(gradient) < _FLOOR:
        return False
    moved = _largest(plain.weights[name].double() - plain.first_weights[name].double())
    return moved < least * _largest(plain.weights[name])


def _check_ranks_agree(reports: Sequence[RankReport], exact: bool) -> None:
    """Losses are the same on every rank, gradients on every rank of a stage."""
    tolerance = 1e-12 if exact else 1e-6
    for rank, report in enumerate(reports):
        assert report.losses == reports[0].losses, f"rank {rank} has losses {report.losses}, rank 0 {reports[0].losses}"
        first = next(other for other in reports if other.stage == report.stage)
        assert set(report.checksums) == set(first.checksums), f"rank {rank} has gradients of other names"
        for name, value in report.checksums.items():
            difference = abs(value - first.checksums[name])
            assert difference <= tolerance * max(value, _FLOOR), f"rank {rank} has another gradient of {name}"


def _load_gradients(case: Case, directory: Path) -> dict[str, Tensor]:
    """Of all stages; a parameter that two stages hold must have the same gradient on both."""
    gradients: dict[str, Tensor] = {}
    for stage in range(case.sizes.pp_size):
        of_stage = load_file(directory / f"gradients-{stage}.safetensors")
        both = {name: value for name, value in of_stage.items() if name in gradients}
        check_tensors(both, gradients, TOLERANCES[case.recipe.precision].gradient, f"gradients of stage {stage}")
        gradients |= of_stage
    return gradients


def _load_weights(case: Case, directory: Path) -> dict[str, Tensor]:
    """What plain `from_pretrained` finds."""
    model_class = getattr(transformers, case.recipe.zoo_head.model_class)
    model, info = model_class.from_pretrained(directory, dtype=_saved_dtype(case), output_loading_info=True)
    assert not any(info.values()), f"from_pretrained is not content: {info}"
    return model.state_dict()


def _saved_dtype(case: Case) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.recipe.precision, case.recipe.dtype)
