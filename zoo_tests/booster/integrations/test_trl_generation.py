"""TRL's trainers that generate, under layouts: they log what one plain process logs that samples the same tokens.

What breaks here first: random numbers that ranks of a replica draw apart, rewards that are taken of the wrong replica,
a mean over ranks. Look in `booster/integrations/trl_trainers.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from zoo_tests.booster.integrations.trl_jobs import Job, differences, ranks_of, run, trainer_of
from zoo_tests.harness.ranks import run_on_ranks

_LORA: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "up_proj"]}
_REUSED = {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "grpo"}
_GREEDY = {"generation_kwargs": {"do_sample": False}}
JOBS = {
    "grpo": Job("grpo", {"beta": 0.04, **_REUSED}),
    "grpo without reference": Job("grpo", {"temperature": 0.8, "top_k": 50}),
    "grpo greedy": Job("grpo", {"scale_rewards": "batch", **_GREEDY}, family="qwen3"),
    "grpo lora": Job("grpo", {"beta": 0.04}, adapters=_LORA),
    "grpo trained lora": Job("grpo", {"beta": 0.04}, adapters=_LORA, trained_adapters=True),
    "grpo synced": Job("grpo", {"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 2}),
    "grpo sequences": Job("grpo", {"importance_sampling_level": "sequence", **_REUSED}),
    "rloo": Job("rloo", {"beta": 0.05, "steps_per_generation": 2}),
    "gmpo": Job("gmpo", {"beta": 0.04}),
    "gkd": Job("gkd", {"lmbda": 0.6, "max_new_tokens": 7}, data="chats"),
}
SAMPLE = {"grpo": "tp2pp2", "grpo lora": "pp2", "rloo": "tp2"}
_OF_REPLICAS = {"grpo": "dp2", "grpo without reference": "pp2dp2", "rloo": "dp2"}
_TOLERANCE = 1e-5
_CAMPAIGN = pytest.mark.campaign


def _steps(job: Job, steps: int) -> Job:
    given = {"eval_strategy": "steps", "eval_steps": steps - 1, "max_steps": steps, "learning_rate": 5e-4}
    return dataclasses.replace(job, arguments={**given, **job.arguments})


def _check(found: list[list[dict[str, Any]]], expected: list[dict[str, Any]]) -> None:
    logged = {name for each in expected for name in each}
    for each in found:
        worst = differences(each, expected)
        assert {"loss", "eval_loss", *logged & {"reward", "entropy"}} <= worst.keys()
        assert not {name: gap for name, gap in worst.items() if gap > _TOLERANCE}


def _check_layout(job: Job, layout: str, folder: Path) -> None:
    expected = run(job, str(folder / "plain"))
    _check(run_on_ranks(ranks_of(layout), run, job, str(folder / layout), layout, timeout_s=300.0), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_few_steps_log_what_one_process_logs(name: str, tmp_path: Path) -> None:
    _check_layout(_steps(JOBS[name], 5), SAMPLE[name], tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2pp2"])
@pytest.mark.parametrize("name", JOBS)
def test_twenty_steps_log_what_one_process_logs(name: str, layout: str, tmp_path: Path) -> None:
    _check_layout(_steps(JOBS[name], 20), layout, tmp_path)


# ----- replicas -----


def record(job: Job, folder: str, layout: str) -> tuple[int, list[dict[str, Any]], list[list[list[int]]]]:
    """Train on this rank; return its replica, what it logs, and the completions of each generation."""
    generations: list[list[list[int]]] = []

    def watch(trainer: Any) -> None:
        generate = trainer._generate_single_turn

        def generate_single_turn(*args: Any, **kwargs: Any) -> Any:
            found = generate(*args, **kwargs)
            generations.append(found[0] if isinstance(found, tuple) else found)  # RLOO returns no log-probabilities
            return found

        trainer._generate_single_turn = generate_single_turn
        replicas.append(trainer.accelerator.process_index)

    replicas: list[int] = []
    history = run(job, folder, layout, before=watch)
    return replicas[0], history, generations


def _replay(job: Job, folder: Path, generations: list[list[list[int]]]) -> list[dict[str, Any]]:
    """Train plainly with the completions that replicas have drawn."""

    def replace(trainer: Any) -> None:
        following = iter(generations if job.kind == "rloo" else [(each, None) for each in generations])
        trainer._generate_single_turn = lambda *args, **kwargs: next(following)

    return run(job, str(folder), before=replace)


@pytest.mark.slow
@pytest.mark.parametrize("name", _OF_REPLICAS)
def test_replicas_log_what_one_process_logs_of_their_completions(name: str, tmp_path: Path) -> None:
    job, layout = _steps(JOBS[name], 4), _OF_REPLICAS[name]
    if "steps_per_generation" in job.arguments:  # each replica shuffles its own rows over the steps
        single = {"steps_per_generation": 1, "gradient_accumulation_steps": 1}
        job = dataclasses.replace(job, arguments=job.arguments | single)
    trainer_of(job, str(tmp_path / "plain"), None)  # it writes the reference
    found = run_on_ranks(ranks_of(layout), record, job, str(tmp_path / layout), layout, timeout_s=300.0)
    shares = {replica: generations for replica, _, generations in found}
    for replica, _, generations in found:
        assert generations == shares[replica], "the ranks of a replica draw the same"
    assert shares[0] != shares[1], "replicas draw by themselves"
    joined = [one + other for one, other in zip(shares[0], shares[1], strict=True)]
    _check([history for _, history, _ in found], _replay(job, tmp_path / "plain", joined))


# ----- checkpoints -----


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("tp2", "pp2"), pytest.param("pp2", "tp2pp2", marks=_CAMPAIGN)])
def test_sampling_goes_on_in_another_layout(first: str, then: str, tmp_path: Path) -> None:
    given = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "beta": 0.04, "learning_rate": 5e-4}
    job, folder = Job("grpo", given), str(tmp_path / "boosted")
    expected = run(job, str(tmp_path / "plain"))
    run_on_ranks(ranks_of(first), run, job, folder, first, timeout_s=300.0)
    for found in run_on_ranks(ranks_of(then), run, job, folder, then, f"{folder}/checkpoint-3", timeout_s=300.0):
        kept = [{name: each[name] for name in each if name != "train_loss"} for each in (*found, *expected)]
        worst = differences(kept[: len(found)], kept[len(found) :])
        assert max(worst.values()) < _TOLERANCE, worst
