"""Holds sharded training to plain training: losses, every gradient and every weight, by name."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from zoo_tests.harness.adapters import load_adapters
from zoo_tests.harness.case import Case
from zoo_tests.harness.quantised import values_of
from zoo_tests.harness.ranks import DEVICE_VARIABLE, run_on_ranks
from zoo_tests.harness.reference import Trace, train_reference
from zoo_tests.harness.train_sharded import RankReport, train_sharded

_SHOWN = 6  # offenders in a message
_OF_A_FILE = {"architectures", "dtype"}
_FLOOR = 1e-3  # of norms: what is smaller is compared to this


@dataclass(frozen=True)
class Tolerance:
    """Largest differences.

    Attributes:
        loss: relative.
        gradient, weight: relative to the norm of the gradient, and of what the weight has moved by.
        order: of that norm, `inf` for the largest element. In 16 bit single elements jump by a rounding step.
    """

    loss: float
    gradient: float
    weight: float
    order: float = float("inf")

    def relative(self, found: Tensor, expected: Tensor, origin: Tensor | float = 0.0) -> float:
        """Norm of the difference relative to the norm of `expected - origin`, or to rounding where that is larger."""
        rounding = 2 * torch.finfo(found.dtype).eps * self._norm(expected.double())
        scale = self._norm(expected.double() - origin)
        return self._norm(found.double() - expected.double()) / max(scale, rounding, _FLOOR)

    def _norm(self, tensor: Tensor) -> float:
        return torch.linalg.vector_norm(tensor, self.order).item() if tensor.numel() else 0.0


TOLERANCES = {
    "fp64": Tolerance(loss=1e-9, gradient=1e-9, weight=1e-9),
    # One rounding step of a weight around 1 that hardly moved is 1.2e-4 of `_FLOOR`.
    "fp32": Tolerance(loss=1e-5, gradient=1e-4, weight=3e-4),
    "bf16": Tolerance(loss=1e-3, gradient=1e-1, weight=2e-1, order=2.0),
    # Processors round products of 16 bit differently: weights have been 0.051 apart on one, and below 0.05 on others.
    "fp16": Tolerance(loss=1e-4, gradient=2e-2, weight=1e-1, order=2.0),
}

# Plain training runs on the CPU. transformers computes norms and rotary positions in fp32, which GPUs round otherwise.
_FP64_ON_GPU = Tolerance(loss=5e-6, gradient=5e-6, weight=5e-6)


def tolerance_of(precision: str) -> Tolerance:
    """How far ranks on the device of `pytest --device` may be from plain training on the CPU."""
    is_gpu = os.environ.get(DEVICE_VARIABLE) == "gpu"
    return _FP64_ON_GPU if is_gpu and precision == "fp64" else TOLERANCES[precision]


def check_case(
    case: Case, directory: Path, weights: bool = True, train: Callable[[Case, Path], RankReport] = train_sharded
) -> None:
    """Train both ways, with as few layers as the case needs, and compare everything.

    Args:
        directory: an empty directory for the files of this case.
        train: runs on every rank.
        weights: False where weights cannot be compared: Adam blows up the rounding of gradients that are zero in
            exact arithmetic (key biases) to whole steps.

    Raises:
        AssertionError: they differ; the message names the first tensors that do.
    """
    case = case.shallow()
    reports = run_on_ranks(case.sizes.world_size, train, case, directory)
    check_reports(case, reports, directory, weights)


def check_reports(case: Case, reports: Sequence[RankReport], directory: Path, weights: bool = True) -> None:
    """Compare what the ranks of a case have left with plain training, see `check_case`."""
    plain = train_reference(case.recipe)
    tolerance = tolerance_of(case.recipe.precision)
    _check_ranks_agree(reports, exact=case.recipe.precision == "fp64")
    check_losses(reports[0].losses, plain.losses, tolerance.loss)
    if case.recipe.max_norm is not None:
        check_losses(reports[0].grad_norms, plain.grad_norms, tolerance.gradient, "gradient norms")
    check_gradients(_load_gradients(case, directory), plain, tolerance)
    found = _load_weights(case, directory / "model", plain)
    if weights:
        check_weights(found, plain, tolerance)


def check_losses(found: Sequence[float], expected: Sequence[float], tolerance: float, what: str = "losses") -> None:
    """Compare numbers of every step."""
    assert len(found) == len(expected), f"{len(found)} {what}, expected {len(expected)}"
    wrong = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True)]
    # `not <` and not `>=`: a NaN must fail.
    assert all(difference < tolerance for difference in wrong), (
        f"{what} differ by {max(wrong):.3e} (relative, allowed {tolerance:.0e}):\n"
        f"  sharded {[f'{x:.12g}' for x in found]}\n  plain   {[f'{x:.12g}' for x in expected]}"
    )


def check_gradients(found: Mapping[str, Tensor], plain: Trace, tolerance: Tolerance) -> None:
    """Compare gradients by name; every parameter that has one in plain training must be there."""
    unknown = sorted(set(found) - set(plain.gradients))
    assert not unknown, f"gradients of parameters that have none in plain training: {unknown[:_SHOWN]}"
    lost = [sorted(names) for names in plain.aliases if names & set(plain.gradients) and not names & set(found)]
    assert not lost, f"{len(lost)} parameters have no gradient: {lost[:_SHOWN]}"
    wrong = {name: tolerance.relative(gradient, plain.gradients[name]) for name, gradient in found.items()}
    _check_all(wrong, tolerance.gradient, "gradients")


def check_weights(found: Mapping[str, Tensor], plain: Trace, tolerance: Tolerance) -> None:
    """Compare weights by name. Relative to how far training has moved them: no training at all is no agreement."""
    assert set(found) == set(plain.weights), f"names differ: {sorted(set(found) ^ set(plain.weights))[:_SHOWN]}"
    wrong = {}
    for name, weight in found.items():
        expected, first = plain.weights[name].to(weight.dtype), plain.first_weights[name].double()
        if weight.is_floating_point():
            wrong[name] = tolerance.relative(weight, expected, first)
        else:  # a counter
            wrong[name] = float(not torch.equal(weight, expected))
    _check_all(wrong, tolerance.weight, "weights")


def _check_all(differences: Mapping[str, float], allowed: float, what: str) -> None:
    # `not <` and not `>=`: a NaN must fail.
    wrong = {name: value for name, value in differences.items() if not value < allowed}
    worst = sorted(wrong.items(), key=lambda item: -item[1])[:_SHOWN]
    lines = "".join(f"\n  {name}: {value:.3e}" for name, value in worst)
    assert not wrong, f"{len(wrong)} of {len(differences)} {what} differ (relative, allowed {allowed:.0e}):{lines}"


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
        tolerance = tolerance_of(case.recipe.precision)
        both = {name: tolerance.relative(of_stage[name], gradients[name]) for name in set(of_stage) & set(gradients)}
        _check_all(both, tolerance.gradient, f"gradients that stage {stage} shares with another")
        gradients |= of_stage
    return gradients


def _load_weights(case: Case, directory: Path, plain: Trace) -> dict[str, Tensor]:
    """What plain `from_pretrained` finds; of a model with adapters, the model with the adapters that were saved."""
    if case.recipe.has_adapters:
        return values_of(load_adapters(case.recipe.base_model(), directory).state_dict())
    saved = json.loads((directory / "config.json").read_text())
    wrong = {key for key in {*saved, *plain.config} - _OF_A_FILE if saved.get(key) != plain.config.get(key)}
    assert not wrong, f"config.json has other values of {sorted(wrong)}"
    model_class = getattr(importlib.import_module(case.recipe.zoo_family.module), case.recipe.zoo_head.model_class)
    model, info = model_class.from_pretrained(directory, dtype=_saved_dtype(case), output_loading_info=True)
    assert not any(info.values()), f"from_pretrained is not content: {info}"
    return model.state_dict()


def _saved_dtype(case: Case) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.recipe.precision, case.recipe.dtype)
