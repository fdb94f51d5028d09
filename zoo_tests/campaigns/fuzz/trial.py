"""Plays a case on both sides and says what came of it."""

from __future__ import annotations

import importlib
import math
import re
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from zoo_tests.campaigns.fuzz.boosted import play_boosted
from zoo_tests.campaigns.fuzz.case import Case
from zoo_tests.campaigns.fuzz.plain import PlainWorker
from zoo_tests.campaigns.fuzz.script import Records
from zoo_tests.campaigns.fuzz.setup import family_of, head_of
from zoo_tests.harness.case import DTYPES
from zoo_tests.harness.compare import Tolerance
from zoo_tests.harness.ranks import RankError, run_on_ranks

TIMEOUT_S = 75.0
KINDS = ("exact", "refused", "differs", "crash", "hang", "void")
FAILURES = ("differs", "crash", "hang")
_TOLERANCES = {
    "fp64": Tolerance(loss=1e-9, gradient=1e-8, weight=1e-8),
    "fp32": Tolerance(loss=2e-5, gradient=1e-3, weight=2e-3, order=2.0),
    "bf16": Tolerance(loss=2e-2, gradient=1e-1, weight=2.5e-1, order=2.0),
    "fp16": Tolerance(loss=5e-3, gradient=5e-2, weight=1e-1, order=2.0),
}
_SHOWN = 4


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        kind: "exact", "refused", "differs", "crash", "hang", or "void" where plain training fails, too.
        text: the refusal, the first differences, or the error.
        seconds: that it took.
    """

    kind: str
    text: str
    seconds: float

    @property
    def is_failure(self) -> bool:
        return self.kind in FAILURES

    @property
    def signature(self) -> str:
        """What two failures of the same cause have in common, as far as can be told: kind and last line."""
        if self.kind == "differs":
            return self.kind
        lines = [line for line in self.text.splitlines() if re.match(r"[\w.]*(Error|Exception|Warning)\b", line)]
        return f"{self.kind} {lines[-1].partition(':')[0] if lines else ''}"


class Trials:
    """Plays cases.

    Attributes:
        worker: the process of the oracle.
    """

    def __init__(self) -> None:
        self.worker = PlainWorker()

    def run(self, case: Case) -> Outcome:
        """Play a case; one that hangs is played twice, since a busy machine looks the same."""
        outcome = self._once(case)
        return self._once(case) if outcome.kind == "hang" else outcome

    def close(self) -> None:
        """End the process of the oracle."""
        self.worker.stop()

    def _once(self, case: Case) -> Outcome:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            self.worker.submit(case, Path(folder))
            kind, found = _on_ranks(case, Path(folder))
            error, answer = self.worker.answer(TIMEOUT_S)
            if error is not None:
                kind, text = "void", error
            elif any(isinstance(value, float) and math.isinf(value) for _, value in answer[0]):
                kind, text = "void", "plain training has a value that is infinite"
            elif kind == "played":
                text = "\n".join(_differences(case, found, *answer, Path(folder)))
                kind = "differs" if text else "exact"
            else:
                text = found
            if kind == "differs" and case.precision == "fp32" and self._amplifies_rounding(case, answer[0]):
                kind, text = "void", f"plain training in fp64 differs from that in fp32 by as much; here {text}"
        return Outcome(kind, text, time.monotonic() - start)

    def _amplifies_rounding(self, case: Case, expected: Records) -> bool:
        """Return whether plain training in fp64 is not that in fp32, `expected`, within what a case may differ."""
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            self.worker.submit(replace(case, precision="fp64"), Path(folder))
            error, answer = self.worker.answer(TIMEOUT_S)
        pairs = zip(answer[0], expected, strict=False) if error is None else ()
        return any(_compare(*pair, _TOLERANCES[case.precision]) for pair in pairs)


def _on_ranks(case: Case, directory: Path) -> tuple[str, Any]:
    """("played", records of each rank), ("refused", sentence), or ("crash" or "hang", message)."""
    try:
        answers = run_on_ranks(case.world_size, play_boosted, case.to_json(), directory, timeout_s=TIMEOUT_S)
    except RankError as error:
        failed = re.match(r"failed ranks \[(.*?)\]", str(error)).group(1)
        return "crash" if failed else "hang", str(error)
    kinds, found = zip(*answers, strict=True)
    if set(kinds) == {"refused"}:
        return "refused", found[0]
    if "refused" in kinds:
        return "crash", f"some ranks refuse, others do not: {found}"
    return "played", found


def _differences(case: Case, found: list[Records], expected: Records, noisy: list[str], directory: Path) -> list[str]:
    tolerance = _TOLERANCES[case.precision]
    for rank, records in enumerate(found):
        wrong = [line for pair in zip(records, expected, strict=False) for line in _compare(*pair, tolerance)]
        if wrong:
            return [f"rank {rank}: {line}" for line in wrong[:_SHOWN]]
    return _wrong_weights(case, noisy, directory, tolerance)[: _SHOWN + 1]


def _compare(found: tuple[str, Any], expected: tuple[str, Any], tolerance: Tolerance) -> list[str]:
    (name, value), (name_there, wanted) = found, expected
    if name != name_there:
        return [f"records '{name}', plain '{name_there}'"]
    if isinstance(wanted, list) or value is None:
        same = value == wanted
    elif isinstance(wanted, tuple):
        same = abs(value[0] - wanted[0]) <= tolerance.gradient * max(wanted[1], 1e-3)
    else:
        allowed = tolerance.loss if "loss" in name else tolerance.gradient
        over_nothing = "loss" in name and math.isnan(wanted) and math.isfinite(value)  # NaN in torch, and 0 here
        same = abs(value - wanted) <= allowed * max(abs(wanted), 1e-3) or over_nothing
    return [] if same else [f"{name} is {value!r}, plain {wanted!r}"]


def _wrong_weights(case: Case, noisy: list[str], directory: Path, tolerance: Tolerance) -> list[str]:
    first, plain = load_file(directory / "first.safetensors"), load_file(directory / "plain.safetensors")
    found = _saved(case, directory / "model")
    if unknown := set(found) ^ set(plain) if not case.lora else set(found) - set(plain):
        return [f"names of saved weights differ: {sorted(unknown)[:_SHOWN]}"]
    wrong = {}
    for name, value in found.items():
        if not value.is_floating_point():
            difference = float(not torch.equal(value, plain[name]))
        else:
            wanted = plain[name].to(value.dtype)
            step = torch.finfo(value.dtype).eps * wanted.abs()  # to which a file in 16 bits rounds
            value = torch.where((value - wanted).abs() <= step, wanted, value)
            difference = tolerance.relative(value, wanted, first[name].double())
        if not difference <= tolerance.weight and not (case.optimizer["name"] == "Adafactor" and name in noisy):
            wrong[name] = difference
    worst = sorted(wrong.items(), key=lambda item: -item[1])
    head = [f"{len(wrong)} of {len(found)} weights differ"] if wrong else []
    return head + [f"{name}: {difference:.2e} of what it moved by" for name, difference in worst]


def _saved(case: Case, directory: Path) -> dict[str, Tensor]:
    """What plain transformers finds in what was saved; of a model with adapters, the adapters by their full names."""
    if case.lora:
        tensors = load_file(directory / "adapter_model.safetensors")
        return {re.sub(r"(lora_[AB])\.weight$", r"\1.default.weight", name): value for name, value in tensors.items()}
    model_class = getattr(importlib.import_module(family_of(case).module), head_of(case).model_class)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision, DTYPES[case.precision])
    return model_class.from_pretrained(directory, dtype=dtype).state_dict()
