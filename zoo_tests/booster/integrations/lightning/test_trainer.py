"""Lightning's Trainer on boosted models: what it logs, and the weights, are those of one plain process.

What fails here first is an order: of optimizer, boost and loader in `trainer_methods.py`, or of the hooks that weigh
replicas in `shares.py`. Weights in fp64 show a difference that AdamW would hide in fp32.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from zoo_tests.booster.integrations.lightning import jobs
from zoo_tests.harness.ranks import run_on_ranks

pytestmark = pytest.mark.slow
TOLERANCE = 1e-6
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bert": ({}, {}),
    "empty-share": ({}, {"counts": (17, 5)}),
    "own-loss": ({"own_loss": True}, {"counts": (17, 7)}),
    "both-losses": ({"own_loss": "both"}, {}),
    "llama": ({"model": "llama"}, {"val_check_interval": 2}),
    "accumulation": ({}, {"accumulate_grad_batches": 2, "gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}),
    "manual": ({"kind": "manual"}, {}),
    "some-batches": ({}, {"limit_train_batches": 3, "max_epochs": 3}),
}
# Each job under one layout, each layout with one job; the campaign has all pairs.
SAMPLE = [
    ("bert", "tp2pp2"),
    ("empty-share", "dp2"),
    ("own-loss", "dp2"),
    ("both-losses", "dp2"),
    ("llama", "pp2"),
    ("accumulation", "tp2"),
    ("manual", "dp2"),
    ("some-batches", "dp2"),
]


@cache
def plain(name: str, *more: tuple[str, Any]) -> dict[str, Any]:
    job, options = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        return jobs.fitted(folder, None, job | dict(more), **options)


@pytest.mark.parametrize(("name", "layout"), SAMPLE)
def test_logs_and_weights_are_those_of_one_process(name: str, layout: str, tmp_path: Path) -> None:
    job, options = JOBS[name]
    for ours in run_on_ranks(jobs.ranks_of(layout), jobs.fitted, str(tmp_path), layout, job, **options):
        difference = jobs.worst_difference(ours, plain(name))
        assert max(difference.values()) < TOLERANCE, difference


@pytest.mark.campaign
@pytest.mark.parametrize("layout", jobs.LAYOUTS)
@pytest.mark.parametrize("name", JOBS)
def test_all_jobs_under_all_layouts(name: str, layout: str, tmp_path: Path) -> None:
    test_logs_and_weights_are_those_of_one_process(name, layout, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("layout", jobs.LAYOUTS)
@pytest.mark.parametrize("model", jobs.MODELS)
def test_fifty_steps_in_single_precision(model: str, layout: str, tmp_path: Path, record_property: Any) -> None:
    job = {"model": model, "dtype": "float32", "optimizer": "sgd"}
    options = {"counts": (19, 7), "max_steps": 50, "max_epochs": -1}
    alone = jobs.fitted(str(tmp_path), None, job, **options)
    assert sum("loss_step" in each for each in alone["logs"]) == 50
    ours = run_on_ranks(jobs.ranks_of(layout), jobs.fitted, str(tmp_path), layout, job, **options)[0]
    difference = jobs.worst_difference(ours, alone)
    record_property("worst_difference", difference)
    assert max(difference.values()) < TOLERANCE, difference


@pytest.mark.parametrize("layout", ["dp2"])
def test_callbacks_and_loggers_say_what_one_process_says(layout: str, tmp_path: Path) -> None:
    alone = jobs.watched(str(tmp_path / "plain"), None)
    first, second = run_on_ranks(2, jobs.watched, str(tmp_path / "ours"), layout)
    assert first["log"].splitlines()[0] == alone["log"].splitlines()[0], "written once, with the same columns"
    assert len(first["log"].splitlines()) == len(alone["log"].splitlines())
    for name in ("best", "stopped", "kept"):
        assert first[name] == second[name] == alone[name]
    assert first["score"] == pytest.approx(alone["score"], abs=TOLERANCE)
    assert first["tested"][0] == pytest.approx(alone["tested"][0], abs=TOLERANCE)
    # Each replica has the predictions of its samples.
    batches = [alone["predicted"][at : at + 2] for at in range(0, 8, 2)]
    assert first["predicted"] == [*batches[0], *batches[2]]
    assert second["predicted"] == [*batches[1], *batches[3]]


@pytest.mark.parametrize(("before", "after"), [("tp2", "pp2"), ("dp2", "dp2")])
def test_training_continues_in_another_layout(before: str, after: str, tmp_path: Path) -> None:
    """7 steps of 5 an epoch: the checkpoint lies in the middle of the second epoch."""
    alone = jobs.continued(str(tmp_path), None, 13, None, None)
    run_on_ranks(2, jobs.continued, str(tmp_path), before, 7, None, "middle.ckpt")
    ours = run_on_ranks(2, jobs.continued, str(tmp_path), after, 13, "middle.ckpt", None)[0]
    steps = [each for each in alone["logs"] if "loss_step" in each][7:]
    assert [each["step"] for each in steps] == list(range(8, 14))
    mine = [each for each in ours["logs"] if "loss_step" in each]
    assert [each["loss_step"] for each in mine] == pytest.approx([each["loss_step"] for each in steps], abs=TOLERANCE)
    for name, value in alone["weights"].items():
        assert float((ours["weights"][name] - value).abs().max()) < TOLERANCE, name
