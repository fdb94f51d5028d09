"""Lightning's Trainer on boosted models: what it logs, and the weights, are those of one plain process.

What fails here first is an order: of optimizer, boost and loader in `strategy.py`, or of the hooks that weigh
replicas in `inner_model.py`. Weights in fp64 show a difference that AdamW would hide in fp32.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from zoo_tests.booster.integrations.lightning import jobs, trainer_runs
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
    "two-optimizers": ({"kind": "two-optimizers"}, {}),
    "some-batches": ({}, {"limit_train_batches": 3, "max_epochs": 3}),
}
# Each job under one layout, each layout with one job; the campaign has all pairs.
SAMPLE = [
    ("bert", "tp2pp2"),
    ("empty-share", "dp2"),
    ("own-loss", "dp2"),
    ("own-loss", "dp2pp2"),
    ("both-losses", "dp2"),
    ("llama", "pp2"),
    ("accumulation", "dp2tp2"),
    ("manual", "dp2"),
    ("two-optimizers", "dp2"),
    ("two-optimizers", "pp2"),
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
        assert all(value < TOLERANCE for value in difference.values()), difference


@pytest.mark.campaign
@pytest.mark.parametrize("layout", jobs.LAYOUTS)
@pytest.mark.parametrize("name", JOBS)
def test_all_jobs_under_all_layouts(name: str, layout: str, tmp_path: Path) -> None:
    test_logs_and_weights_are_those_of_one_process(name, layout, tmp_path)


_FIFTY_STEPS = {"counts": (19, 7), "max_steps": 50, "max_epochs": -1}


@pytest.mark.campaign
@pytest.mark.parametrize("layout", jobs.LAYOUTS)
@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.02), ("adamw", 1e-3)])
@pytest.mark.parametrize("model", jobs.MODELS)
def test_fifty_steps_in_single_precision(
    model: str, optimizer: str, lr: float, layout: str, tmp_path: Path, record_property: Any
) -> None:
    job = {"model": model, "dtype": "float32", "optimizer": optimizer, "lr": lr}
    alone = jobs.fitted(str(tmp_path), None, job, **_FIFTY_STEPS)
    assert sum("loss_step" in each for each in alone["logs"]) == 50
    ours = run_on_ranks(jobs.ranks_of(layout), jobs.fitted, str(tmp_path), layout, job, **_FIFTY_STEPS)[0]
    difference = jobs.differences_of_logs(ours, alone)
    record_property("worst_difference", difference)
    limits = {name: 2 * TOLERANCE if name == "grad_norm" else TOLERANCE for name in difference}
    assert all(difference[name] < limit for name, limit in limits.items()), difference


@pytest.mark.campaign
@pytest.mark.parametrize("layout", jobs.LAYOUTS)
def test_fifty_steps_that_amplify_rounding(layout: str, tmp_path: Path, record_property: Any) -> None:
    """A large rate of AdamW: no difference in fp64, and one in fp32 such as another order of samples makes."""
    worst: dict[str, dict[str, float]] = {}
    for dtype in ("float64", "float32"):
        job = {"dtype": dtype, "lr": 1e-2}
        alone = jobs.fitted(str(tmp_path), None, job, **_FIFTY_STEPS)
        reordered = jobs.fitted(str(tmp_path), None, job, is_reversed=True, **_FIFTY_STEPS)
        ours = run_on_ranks(jobs.ranks_of(layout), jobs.fitted, str(tmp_path), layout, job, **_FIFTY_STEPS)[0]
        worst[dtype] = jobs.differences_of_logs(ours, alone)
        worst[f"{dtype}, one process"] = jobs.differences_of_logs(reordered, alone)
    record_property("worst_difference", worst)
    # Metrics of torchmetrics, such as "val_metric", add up in single precision.
    assert all(worst["float64"][name] < 1e-12 for name in ("loss_step", "grad_norm", "val_loss")), worst
    assert worst["float32"]["loss_step"] < 10 * worst["float32, one process"]["loss_step"], worst


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_callbacks_and_loggers_say_what_one_process_says(layout: str, tmp_path: Path) -> None:
    alone = watched_alone()
    first, second = run_on_ranks(2, trainer_runs.watched, str(tmp_path), layout)
    assert first["log"].splitlines()[0] == alone["log"].splitlines()[0], "written once, with the same columns"
    assert len(first["log"].splitlines()) == len(alone["log"].splitlines())
    for name in ("best", "stopped", "kept"):
        assert first[name] == second[name] == alone[name]
    assert first["score"] == pytest.approx(alone["score"], abs=TOLERANCE)
    assert first["tested"][0] == pytest.approx(alone["tested"][0], abs=TOLERANCE)
    predicted = [first["predicted"], second["predicted"]]
    if layout == "pp2":
        assert predicted == [alone["predicted"]] * 2
        return
    # Each replica has the predictions of its samples.
    batches = [alone["predicted"][at : at + 2] for at in range(0, 8, 2)]
    assert predicted == [[*batches[0], *batches[2]], [*batches[1], *batches[3]]]


@cache
def watched_alone() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return trainer_runs.watched(folder, None)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_evaluation_without_training(layout: str, tmp_path: Path) -> None:
    alone = trainer_runs.evaluated(str(tmp_path), None)
    for ours in run_on_ranks(2, trainer_runs.evaluated, str(tmp_path), layout):
        for name in ("validated", "tested"):
            assert ours[name] == [pytest.approx(each, abs=TOLERANCE) for each in alone[name]]
        assert ours["predicted"] == alone["predicted"]


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2"])
def test_weights_in_callbacks_are_whole_or_refused(layout: str, tmp_path: Path) -> None:
    alone = trainer_runs.weights_in_callback(str(tmp_path), None)
    for ours in run_on_ranks(jobs.ranks_of(layout), trainer_runs.weights_in_callback, str(tmp_path), layout):
        if layout == "dp2":  # each rank has all weights
            assert not ours["refused"]
        else:
            asked, loaded = ours["refused"]
            assert asked.startswith("Job.state_dict() would have this rank's part of self.model alone")
            assert "trainer.strategy.whole_state_dict()" in asked
            assert loaded.startswith("Job.load_state_dict() takes whole weights")
        assert list(ours["whole"]) == list(alone["whole"])
        for name, value in alone["whole"].items():
            assert float((ours["whole"][name] - value).abs().max()) < TOLERANCE, name
        losses = [[each["loss_step"] for each in run["logs"] if "loss_step" in each] for run in (ours, alone)]
        assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("automatic", "tp2", "pp2"),
        ("automatic", "dp2", "dp2"),
        ("manual", "pp2", "dp2"),
        ("two-optimizers", "dp2", "tp2"),
    ],
)
def test_training_continues_in_another_layout(kind: str, before: str, after: str, tmp_path: Path) -> None:
    """The checkpoint lies in the middle of an epoch of 5 batches, where no gradients wait for their step."""
    saved = 6 if kind == "two-optimizers" else 7
    alone = trainer_runs.continued(str(tmp_path), None, 13, None, None, kind)
    run_on_ranks(2, trainer_runs.continued, str(tmp_path), before, saved, None, "middle.ckpt", kind)
    ours = run_on_ranks(2, trainer_runs.continued, str(tmp_path), after, 13, "middle.ckpt", None, kind)[0]
    logs, mine = ([each for each in run["logs"] if "loss_step" in each] for run in (alone, ours))
    done = [each["step"] for each in logs].index(saved) + 1
    assert logs[-1]["step"] == 13 and len(logs) > done
    assert [each["step"] for each in mine] == [each["step"] for each in logs[done:]]
    assert [each["loss_step"] for each in mine] == pytest.approx(
        [each["loss_step"] for each in logs[done:]], abs=TOLERANCE
    )
    for name, value in alone["weights"].items():
        assert float((ours["weights"][name] - value).abs().max()) < TOLERANCE, name
