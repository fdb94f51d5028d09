"""Arguments of Trainer keep their meaning under a layout, or are refused in one sentence on all ranks.

What breaks here first: an argument that transformers has renamed. The table of `docs/trainer.md` lists them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from booster.errors import ConfigurationError
from booster.integrations.arguments import check_release
from booster.integrations.transformers import boosted
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.booster.integrations import trainer_jobs
from zoo_tests.booster.integrations.trainer_jobs import Job, Notes, check_same, difference, make_trainer, ranks_of
from zoo_tests.harness.ranks import run_on_ranks, under_load
from zoo_tests.zoo import FAMILIES

_SCORED = {"compute_metrics": "accuracy"}
_STEPS: dict[str, Any] = {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 2}
KEPT = {
    "no clipping, plateau": (
        "dp2",
        Job(
            "bert",
            {
                **_STEPS,
                "optim": "sgd",
                "max_grad_norm": 0.0,
                "learning_rate": 0.5,
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
                "metric_for_best_model": "loss",
                "accelerator_config": {"use_seedable_sampler": False},
            },
            _SCORED,
        ),
    ),
    "adafactor": (
        "dp2",
        Job(
            "t5", {**_STEPS, "optim": "adafactor", "weight_decay": 0.1, "data_seed": 7, "include_for_metrics": ["loss"]}
        ),
    ),
    "recomputed, sequential, full batches": (
        "pp2",
        Job(
            "bert",
            {
                **_STEPS,
                "gradient_checkpointing": True,
                "include_num_input_tokens_seen": "all",
                "dataloader_drop_last": True,
                "train_sampling_strategy": "sequential",
                "prediction_loss_only": True,
            },
        ),
    ),
    "metrics batch by batch": (
        "dp2",
        Job(
            "bert",
            {**_STEPS, "batch_eval_metrics": True, "include_for_metrics": ["loss"], "eval_on_start": True},
            {"compute_metrics": "running_count"},
        ),
    ),
    "table, workers": (
        "dp2",
        Job(
            "bert",
            {
                **_STEPS,
                "dataloader_num_workers": 1,
                "dataloader_persistent_workers": True,
                "eval_accumulation_steps": 1,
                "include_for_metrics": ["inputs"],
            },
            {"compute_metrics": "inputs_too"},
            data="table",
        ),
    ),
    "stream": ("dp2", Job("bert", {"max_steps": 5, "gradient_accumulation_steps": 2}, data="Stream")),
    "new model each time": ("tp2", Job("bert", _STEPS, {"model": None, "model_init": "new_bert", **_SCORED})),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_an_argument_keeps_its_meaning(name: str, tmp_path: Path) -> None:
    layout, job = KEPT[name]
    expected = trainer_jobs.run(job, str(tmp_path / "plain"))
    for outcome in run_on_ranks(ranks_of(layout), trainer_jobs.run, job, str(tmp_path / "boosted"), layout):
        check_same(outcome, expected)
        if layout != "dp2":
            assert outcome.state == expected.state


@pytest.mark.slow
def test_bf16_is_autocast(tmp_path: Path) -> None:
    job = Job("bert", {**_STEPS, "bf16": True}, dtype="float32")
    expected = trainer_jobs.run(job, str(tmp_path / "plain"))
    found = run_on_ranks(2, trainer_jobs.run, job, str(tmp_path / "tp2"), "tp2")[0]
    worst = difference(found.history, expected.history)
    assert 1e-6 < worst["grad_norm"] < 0.03, "as far apart as sums of halves"
    assert worst["loss"] < 5e-3
    assert all(weight.dtype == torch.float32 for weight in found.weights.values() if weight.is_floating_point())


@pytest.mark.slow
def test_fp16_is_the_plugins(tmp_path: Path) -> None:
    job = Job("bert", _STEPS, dtype="float32")
    expected = trainer_jobs.run(job, str(tmp_path / "plain"))
    half = Job("bert", {**_STEPS, "fp16": True}, dtype="float32", plugin={"precision": "fp16", "initial_scale": 256})
    found = run_on_ranks(2, trainer_jobs.run, half, str(tmp_path / "dp2"), "dp2")[0]
    worst = difference(found.history, expected.history)
    assert 0 < worst["grad_norm"] < 0.03
    assert worst["loss"] < 5e-3


def _evaluate_everywhere(folder: str, layout: str | None) -> list[Any]:
    """Evaluate before training, each of several datasets; predict; train twice."""
    trainer_jobs.as_a_new_process()
    job = Job("bert", {"max_steps": 2}, _SCORED)
    data = {"first": trainer_jobs.pairs(5, 1), "second": trainer_jobs.pairs(6, 2)}
    trainer = make_trainer(job, folder, layout, eval_dataset=data, callbacks=[Notes()])
    found = [trainer.evaluate()]
    trainer.train()
    found.append(trainer.evaluate())
    trainer.train()
    found += trainer.state.log_history[:2]
    prediction = trainer.predict(trainer_jobs.pairs(5, 3), metric_key_prefix="test")
    found.append(prediction.metrics)
    found += [dict(enumerate(map(float, row))) for row in prediction.predictions]
    return [{str(key): value for key, value in each.items()} for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_evaluation_before_and_after(layout: str, tmp_path: Path) -> None:
    expected = _evaluate_everywhere(str(tmp_path), None)
    for found in run_on_ranks(2, _evaluate_everywhere, str(tmp_path), layout):
        worst = difference(found, expected)
        assert max(apart for name, apart in worst.items() if name != "loss") < 1e-9, worst
        assert worst["loss"] < 3e-7


@pytest.mark.slow
def test_trackers_get_the_log(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(tmp_path / "board")
    job = Job("bert", {**_STEPS, "report_to": "tensorboard"}, _SCORED)
    try:
        found = run_on_ranks(2, trainer_jobs.run, job, str(tmp_path), "dp2")[0]
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]
    [file] = [path for path in tmp_path.rglob("events.out.tfevents.*")]  # one rank writes
    events = EventAccumulator(str(file))
    events.Reload()
    losses = [entry["loss"] for entry in found.history if "loss" in entry]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses)
    assert len(events.Scalars("eval/accuracy")) == 3


# ----- refusals -----

_OTHER_ENGINE = "leave it out, and give HybridParallelPlugin(zero_stage=1)"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "torch_compile": ({"torch_compile": True}, "use HybridParallelPlugin(compile_layers=True)"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "set per_device_train_batch_size"),
    "neftune_noise_alpha": ({"neftune_noise_alpha": 5.0}, "add the noise in your data collator"),
    "fsdp": ({"fsdp": "full_shard"}, _OTHER_ENGINE),
    "use_liger_kernel": ({"use_liger_kernel": True}, "use HybridParallelPlugin(enable_all_optimization=True)"),
    "fp16": ({"fp16": True}, "use HybridParallelPlugin(precision='fp16')"),
    "bf16_full_eval": ({"bf16_full_eval": True}, "use HybridParallelPlugin(precision='bf16')"),
    "fp16_full_eval": ({"fp16_full_eval": True}, "use HybridParallelPlugin(precision='fp16')"),
    "enable_jit_checkpoint": ({"enable_jit_checkpoint": True}, "use save_steps"),
    "debug": ({"debug": "underflow_overflow"}, "use HybridParallelPlugin(debug=True)"),
    "train_sampling_strategy": ({"train_sampling_strategy": "batch_rebalance"}, "use 'random' or 'group_by_length'"),
    "split_batches": ({"accelerator_config": {"split_batches": True}}, "leave it out"),
    "average_tokens_across_devices": ({"average_tokens_across_devices": False}, "leave it out"),
    "eval_use_gather_object": ({"eval_use_gather_object": True}, "return tensors from prediction_step"),
}


def _refuse_all(folder: str) -> dict[str, str]:
    """Ask for each argument, and for what no argument names."""
    trainer_jobs.as_a_new_process()
    messages = {name: _refusal_of(_with_arguments(folder, given)) for name, (given, _) in REFUSED.items()}
    messages["plugin"] = _refusal_of(lambda: boosted(Trainer)(trainer_jobs.bert(), _arguments(folder)))
    messages["class"] = _refusal_of(lambda: boosted(dict))
    stream = _with_arguments(folder, {}, train_dataset=trainer_jobs.Stream(5, 0))
    messages["length"] = _refusal_of(stream, ValueError)  # Trainer's own
    tuples = trainer_jobs.bert()
    tuples.config.return_dict = False
    messages["tuples"] = _refusal_of(_with_arguments(folder, {}, model=tuples))
    messages["generate"] = _refusal_of(lambda: _evaluate_whisper(folder, HybridParallelPlugin(pp_size=2)))
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    messages["variable"] = _refusal_of(_with_arguments(folder, {}))
    del os.environ["ACCELERATE_USE_FSDP"]
    return messages


def _arguments(folder: str, **given: Any) -> TrainingArguments:
    return TrainingArguments(folder, use_cpu=True, report_to="none", **given)


def _with_arguments(folder: str, given: dict[str, Any], **options: Any) -> Any:
    def make(plugin: Any = None) -> Trainer:
        plugin = plugin or HybridParallelPlugin()
        objects = {"model": trainer_jobs.bert(), "data_collator": trainer_jobs.collate, **options}
        return boosted(Trainer)(args=_arguments(folder, **given), plugin=plugin, **objects)

    return make


def _evaluate_whisper(folder: str, plugin: Any) -> None:
    family = FAMILIES["whisper"]
    model = family.build(family.main_head, torch.float32)
    args = Seq2SeqTrainingArguments(folder, use_cpu=True, report_to="none", predict_with_generate=True)
    boosted(Seq2SeqTrainer)(model=model, args=args, data_collator=trainer_jobs.collate, plugin=plugin)


def _refusal_of(action: Any, kind: type[Exception] = ConfigurationError) -> str:
    with pytest.raises(kind) as refusal:
        action()
    return str(refusal.value)


@pytest.mark.slow
def test_what_cannot_hold_is_refused_on_all_ranks(tmp_path: Path) -> None:
    messages, *others = run_on_ranks(2, _refuse_all, str(tmp_path))
    assert all(other == messages for other in others)
    for name, (_, instead) in REFUSED.items():
        assert name in messages[name], messages[name]
        assert instead in messages[name], messages[name]
    assert messages["plugin"] == (
        "BoostedTrainer got no plugin; give the layout, as in plugin=HybridParallelPlugin(tp_size=2)"
    )
    assert "which does not derive from transformers.Trainer" in messages["class"]
    assert "does not implement __len__" in messages["length"]
    assert "max_steps has to be specified" in messages["length"]
    assert "model.config.return_dict=False" in messages["tuples"]
    assert messages["generate"].endswith("pp_size=2 has in pieces; use pp_size=1, or predict_with_generate=False")
    assert messages["variable"].startswith("ACCELERATE_USE_FSDP asks for FSDP")
    for message in messages.values():
        assert "\n" not in message


def _train_without_trl(folder: str) -> None:
    assert "trl" not in sys.modules
    sys.modules["trl"] = None  # an import of it fails
    make_trainer(Job("bert", {"max_steps": 1}), folder, "dp2", callbacks=[Notes()]).train()
    print("trained")


@pytest.mark.slow
def test_trainer_needs_no_trl(tmp_path: Path) -> None:
    # Not from the server that forks ranks, which has imported what other tests need.
    code = f"import {__name__} as tests; tests._train_without_trl({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=under_load(120))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained\n")


def test_an_old_transformers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^transformers 5.16.1 is too old .*; install transformers>=5.17$"):
        check_release("transformers", "5.16.1")
    check_release("transformers", "5.17.0")
