"""Checkpoints of a boosted Trainer: they go on in any layout, open plainly, and the best one is the one that is kept.

What breaks here first: batches of a resumed epoch that are seen twice, or a learning rate that begins anew. Look in
`booster/integrations/trainer_checkpoints.py`.
"""

from __future__ import annotations

import functools
import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader
from zoo_tests.booster.integrations import trainer_jobs
from zoo_tests.booster.integrations.trainer_jobs import Job, Notes, Outcome, check_same, make_trainer, ranks_of
from zoo_tests.harness.ranks import run_on_ranks

_SCORED = {"compute_metrics": "accuracy"}
_RESUMED: dict[str, Any] = {
    "num_train_epochs": 3,
    "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "save_strategy": "steps",
    "save_steps": 4,
    "eval_strategy": "epoch",
    "include_num_input_tokens_seen": "non_padding",
}
# 23 samples are 6 batches and 3 updates an epoch: the fourth step leaves the second epoch in its middle.
JOBS = {
    "bert": Job("bert", _RESUMED, _SCORED, samples=23),
    "bert, by length": Job("bert", {**_RESUMED, "train_sampling_strategy": "group_by_length"}, samples=23),
    "t5": Job("t5", _RESUMED, samples=23),
    "best": Job(
        "bert",
        {
            "num_train_epochs": 8,
            "learning_rate": 3e-2,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "save_total_limit": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "order",
        },
        _SCORED,
        callbacks=("Patience",),
    ),
}
WEIGHTS_ONLY = Job(
    "bert",
    JOBS["best"].arguments | {"save_only_model": True, "save_strategy": "best"},
    _SCORED,
    callbacks=("Patience",),
)
_CHANGES = (("bert", "tp2", "dp2"), ("bert", "dp2", "pp2"), ("t5", "pp2", "tp2"))
_MORE_CHANGES = (
    ("bert", "tp2pp2", "dp2"),
    ("bert", "dp2", "tp2pp2"),
    ("t5", "dp2", "dp2"),
    ("t5", "tp2pp2", "pp2"),
    ("bert, by length", "pp2", "tp2"),
)


@functools.cache
def _plain(job_name: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return trainer_jobs.run(JOBS[job_name], folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job_name", "first", "then"),
    [*_CHANGES, *(pytest.param(*each, marks=pytest.mark.campaign) for each in _MORE_CHANGES)],
)
def test_a_run_goes_on_in_another_layout(job_name: str, first: str, then: str, tmp_path: Path) -> None:
    job, folder = JOBS[job_name], str(tmp_path)
    run_on_ranks(ranks_of(first), trainer_jobs.run, job, folder, first)
    resumed = run_on_ranks(ranks_of(then), trainer_jobs.run, job, folder, then, f"{folder}/checkpoint-4")
    expected = _plain(job_name)
    for outcome in resumed:
        after = [note for note in expected.notes if _step_of(note) is None or _step_of(note) > 4]
        assert outcome.history[-1]["step"] == 9
        check_same(Outcome(_without_mean(outcome.history), outcome.weights, [], outcome.state), _part(expected))
        assert [note for note in outcome.notes if _step_of(note)] == [note for note in after if _step_of(note)]
        assert outcome.state["num_input_tokens_seen"] == expected.state["num_input_tokens_seen"]


def _part(outcome: Outcome) -> Outcome:
    return Outcome(_without_mean(outcome.history), outcome.weights, [], outcome.state)


def _without_mean(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out `train_loss`, which Trainer takes over the steps after the checkpoint."""
    return [{name: value for name, value in entry.items() if name != "train_loss"} for entry in history]


def _step_of(note: tuple[Any, ...]) -> int | None:
    return note[0] if len(note) > 2 else None


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", pytest.param("tp2pp2", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("job", [JOBS["best"], WEIGHTS_ONLY], ids=["whole", "weights only"])
def test_the_best_model_is_kept_and_loaded(job: Job, layout: str, tmp_path: Path) -> None:
    expected = trainer_jobs.run(job, str(tmp_path / "plain"))
    for outcome in run_on_ranks(ranks_of(layout), trainer_jobs.run, job, str(tmp_path / "boosted"), layout):
        check_same(outcome, expected, 1e-7)
    assert _checkpoints(tmp_path / "boosted") == _checkpoints(tmp_path / "plain")
    assert expected.state["global_step"] < 24, "patience ended it"


def _checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoint-*")}


@pytest.mark.slow
def test_weights_of_a_checkpoint_open_plainly(tmp_path: Path) -> None:
    job, folder = JOBS["bert"], tmp_path / "out"
    run_on_ranks(2, trainer_jobs.run, job, str(folder), "tp2")
    trainer_jobs.run(job, str(tmp_path / "plain"))
    found, report = BertForSequenceClassification.from_pretrained(
        folder / "checkpoint-4", output_loading_info=True, dtype=torch.float64
    )
    assert not any(report.values()), report
    expected = BertForSequenceClassification.from_pretrained(tmp_path / "plain" / "checkpoint-4", dtype=torch.float64)
    torch.testing.assert_close(dict(found.state_dict()), dict(expected.state_dict()), rtol=1e-9, atol=1e-9)
    _check_that_plain_trainer_goes_on(job, folder)


def _check_that_plain_trainer_goes_on(job: Job, folder: Path) -> None:
    """The weights and the number of steps; the optimizer begins anew, as Trainer does without its file."""
    resumed = trainer_jobs.run(job, str(folder), resume=str(folder / "checkpoint-4"))
    losses = [entry["loss"] for entry in resumed.history if "loss" in entry]
    expected = [entry["loss"] for entry in _plain("bert").history if "loss" in entry]
    assert len(losses) == 9
    assert losses[:5] == pytest.approx(expected[:5], rel=1e-6)


def _resume_from(folder: str, checkpoint: str) -> str:
    with pytest.raises(ConfigurationError) as refusal:
        trainer_jobs.run(JOBS["bert"], folder, "tp2", checkpoint)
    return str(refusal.value)


@pytest.mark.slow
def test_a_checkpoint_without_training_state_is_refused(tmp_path: Path) -> None:
    trainer_jobs.run(JOBS["bert"], str(tmp_path))
    for checkpoint in (str(tmp_path / "checkpoint-4"), str(tmp_path / "nowhere")):
        messages = run_on_ranks(2, _resume_from, str(tmp_path / "other"), checkpoint)
        assert messages[0] == messages[1]
        assert messages[0] == (
            f"{checkpoint} holds no training state of a boosted Trainer; start from its weights instead, as in "
            f"from_pretrained('{checkpoint}'), without resume_from_checkpoint"
        )


def _train_and_save_before(folder: str) -> None:
    trainer_jobs.as_a_new_process()
    trainer = make_trainer(JOBS["bert"], folder, "tp2", callbacks=[Notes()])
    trainer.save_model(f"{folder}/untrained")
    trainer.evaluate()
    trainer.save_model(f"{folder}/evaluated")


@pytest.mark.slow
def test_a_model_that_is_not_trained_is_saved(tmp_path: Path) -> None:
    run_on_ranks(2, _train_and_save_before, str(tmp_path))
    expected = trainer_jobs.bert().state_dict()
    for name in ("untrained", "evaluated"):
        found = BertForSequenceClassification.from_pretrained(tmp_path / name, dtype=torch.float64)
        torch.testing.assert_close(dict(found.state_dict()), dict(expected), rtol=0, atol=0)
        assert (tmp_path / name / "training_args.bin").exists()


def _loaders_after_evaluations(folder: str) -> list[int]:
    """Evaluate and predict again and again; return how many boosted loaders there are after each round."""
    trainer_jobs.as_a_new_process()
    trainer = make_trainer(Job("bert", {"max_steps": 1}, samples=4), folder, "dp2")
    trainer.train()
    counts = []
    for _ in range(3):
        trainer.evaluate()
        trainer.evaluate({name: trainer.eval_dataset for name in ("one", "other")})
        trainer.predict(trainer.eval_dataset)
        gc.collect()
        counts.append(sum(type(each) is ShardedDataLoader for each in gc.get_objects()))
    return counts


def test_loaders_of_evaluations_are_let_go(tmp_path: Path) -> None:
    for counts in run_on_ranks(2, _loaders_after_evaluations, str(tmp_path)):
        assert len(set(counts)) == 1
