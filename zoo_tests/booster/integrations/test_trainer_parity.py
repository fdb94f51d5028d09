"""A boosted Trainer logs what one plain process with the same global batch logs, and leaves the same weights.

What breaks here first: a mean of replicas' means (`booster/integrations/transformers.py`), which shows in dp2 where the
last batch is short; or a batch that a layout shares out in another order.
"""

from __future__ import annotations

import functools
import json
import tempfile
from typing import Any

import pytest

from zoo_tests.booster.integrations import trainer_jobs
from zoo_tests.booster.integrations.trainer_jobs import LAYOUTS, Job, Outcome, check_same, difference, ranks_of
from zoo_tests.harness.ranks import run_on_ranks

_EVERY_EPOCH: dict[str, Any] = {"num_train_epochs": 2, "eval_strategy": "epoch"}
_ACCUMULATED: dict[str, Any] = {**_EVERY_EPOCH, "gradient_accumulation_steps": 2}
_GENERATED: dict[str, Any] = {**_EVERY_EPOCH, "predict_with_generate": True, "generation_max_length": 9}
_SCORED = {"compute_metrics": "accuracy"}
_SMOOTHED = {"label_smoothing_factor": 0.1}
_DECODED = {"data_collator": "collate_with_decoder"}

JOBS = {
    "bert": Job("bert", {**_EVERY_EPOCH, "warmup_steps": 2, "max_grad_norm": 0.5}, _SCORED),
    "bert accumulated": Job("bert", {**_ACCUMULATED, **_SMOOTHED}, _SCORED),
    "bert by length": Job("bert", {"max_steps": 6, "train_sampling_strategy": "group_by_length"}, samples=171),
    "t5": Job("t5", _GENERATED, {"compute_metrics": "overlap"}),
    "t5 accumulated": Job("t5", {**_ACCUMULATED, "lr_scheduler_type": "cosine"}),
    "t5 smoothed": Job("t5", {**_ACCUMULATED, **_SMOOTHED}, _DECODED),
    "t5 smoothed and generated": Job("t5", {**_GENERATED, **_SMOOTHED}, {"compute_metrics": "overlap", **_DECODED}),
    "t5 generated, a share without samples": Job("t5", _GENERATED, {"compute_metrics": "overlap"}, eval_samples=9),
    "mean over a batch": Job("bert", _ACCUMULATED, _SCORED, trainer="MeanLoss"),
    # The last batch has a sample for one replica alone.
    "loss of samples": Job("bert", _EVERY_EPOCH, _SCORED, samples=9, trainer="LossOfSamples"),
    "sum over a step": Job("bert", _ACCUMULATED, _SCORED, trainer="SumLoss"),
    "sum over a step of processes": Job("bert", _ACCUMULATED, _SCORED, trainer="SumLossOfProcesses"),
    "own evaluation": Job("bert", _EVERY_EPOCH, _SCORED, trainer="OwnEvaluation"),
    "function's mean": Job("bert", _EVERY_EPOCH, {**_SCORED, "compute_loss_func": "mean_loss"}),
    "function's sum": Job("bert", _ACCUMULATED, {**_SCORED, "compute_loss_func": "sum_loss"}),
}
# Each job where its averages are hardest, and the two main ones in all layouts.
_SAMPLE = [
    *((name, layout) for name in ("bert", "t5") for layout in LAYOUTS),
    *((name, "dp2") for name in JOBS if name not in ("bert", "t5")),
    ("bert accumulated", "tp2pp2"),
    ("mean over a batch", "pp2"),
    ("function's sum", "pp2"),
    ("t5 smoothed and generated", "pp2"),
]
_REST = [(name, layout) for name in JOBS for layout in LAYOUTS if (name, layout) not in _SAMPLE]


@functools.cache
def _plain(job_name: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return trainer_jobs.run(JOBS[job_name], folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job_name", "layout"), [*_SAMPLE, *(pytest.param(*each, marks=pytest.mark.campaign) for each in _REST)]
)
def test_a_job_logs_what_one_process_logs(job_name: str, layout: str, tmp_path: Any) -> None:
    job = JOBS[job_name]
    outcomes = run_on_ranks(ranks_of(layout), trainer_jobs.run, job, str(tmp_path), layout)
    for outcome in outcomes:
        # transformers' label smoother adds up in single precision.
        check_same(outcome, _plain(job_name), 1e-7 if "label_smoothing_factor" in job.arguments else 1e-9)
    if layout != "dp2":  # replicas pad their shares less than one process pads the batch
        assert outcomes[0].state == _plain(job_name).state


_LONG = {"max_steps": 50, "eval_strategy": "steps", "eval_steps": 10, "learning_rate": 5e-4, "warmup_steps": 5}
LONG_JOBS = {
    "Trainer, BERT": Job("bert", _LONG, _SCORED, samples=91, eval_samples=29, dtype="float32"),
    "Seq2SeqTrainer, T5": Job(
        "t5",
        {**_LONG, "predict_with_generate": True, "generation_max_length": 9},
        {"compute_metrics": "overlap"},
        samples=91,
        eval_samples=29,
        dtype="float32",
    ),
}


@pytest.mark.campaign
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("job_name", LONG_JOBS)
def test_fifty_steps_in_single_precision(
    job_name: str, layout: str, tmp_path: Any, record_property: pytest.RecordProperty
) -> None:
    job = LONG_JOBS[job_name]
    expected = trainer_jobs.run(job, str(tmp_path / "plain"))
    found = run_on_ranks(ranks_of(layout), trainer_jobs.run, job, str(tmp_path / layout), layout)[0]
    worst = difference(found.history, expected.history)
    record_property("worst_difference", json.dumps(worst))
    assert sum("loss" in entry for entry in found.history) == 50
    order = worst.pop("eval_order", 0.0)  # of these tests: a sum of terms of both signs
    assert max(worst.values()) < 1e-6 and order < 1e-5, (worst, order)
