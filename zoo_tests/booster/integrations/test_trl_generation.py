"""TRL's trainers that generate, under layouts: they log what one plain process logs that samples the same tokens.

What breaks here first: random numbers that ranks of a replica draw apart, rewards that are taken of the wrong replica,
a mean over ranks. Look in `booster/integrations/trl_trainers.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from zoo_tests.booster.integrations.trl_jobs import Job, differences, ranks_of, run, trainer_of
from zoo_tests.harness.ranks import run_on_ranks

_LORA: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "up_proj"]}
_REUSED = {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "grpo"}
_NO_EVALUATION = {"eval_strategy": "no"}  # TRL has none for it
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
    "grpo bnpo": Job("grpo", {"beta": 0.04, "loss_type": "bnpo"}),
    "gmpo": Job("gmpo", {"beta": 0.04}),
    "gkd": Job("gkd", {"lmbda": 0.6, "max_new_tokens": 7}, data="chats"),
    "online_dpo": Job("online_dpo", _NO_EVALUATION),
    "online_dpo lora": Job("online_dpo", _NO_EVALUATION, adapters=_LORA),
    "sdpo": Job("sdpo"),
    "sdpo lora": Job("sdpo", adapters=_LORA),
    "sdft": Job("sdft"),
    "a2po": Job("a2po"),
    "iw_opd": Job("iw_opd", {"distillation_objective": "jsd"}, data="chats"),
    "gold": Job("gold", data="chats"),
}
SAMPLE = {"grpo": "tp2pp2", "grpo lora": "pp2", "rloo": "tp2"}
_OF_REPLICAS = {"grpo": "dp2", "grpo without reference": "pp2dp2", "rloo": "dp2", "grpo bnpo": "dp2"}
_OF_REPLICAS |= {"gmpo": "dp2", "gkd": "dp2"}
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


_GENERATES = {"gkd": "generate_on_policy_outputs"}


def record(job: Job, folder: str, layout: str) -> tuple[int, list[dict[str, Any]], list[list[list[int]]]]:
    """Train on this rank; return its replica, what it logs, and the completions of each generation."""
    generations: list[list[list[int]]] = []

    def watch(trainer: Any) -> None:
        name = _GENERATES.get(job.kind, "_generate_single_turn")
        generate = getattr(trainer, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            found = generate(*args, **kwargs)
            if job.kind == "gkd":  # ids and labels, [batch, length]
                generations.append([ids[labels != -100].tolist() for ids, _, labels in zip(*found, strict=True)])
            else:
                generations.append(found[0] if isinstance(found, tuple) else found)  # RLOO returns no log-probabilities
            return found

        setattr(trainer, name, recorded)
        replicas.append(trainer.accelerator.process_index)

    replicas: list[int] = []
    history = run(job, folder, layout, before=watch)
    return replicas[0], history, generations


def _replay(job: Job, folder: Path, generations: list[list[list[int]]]) -> list[dict[str, Any]]:
    """Train plainly with the completions that replicas have drawn."""

    def replace(trainer: Any) -> None:
        following = iter(generations)

        def completed(model: Any, inputs: Any, config: Any) -> tuple[torch.Tensor, ...]:
            rows, prompts = next(following), inputs["prompts"]
            padded = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
            mask = torch.tensor([[1] * len(row) + [0] * (padded.shape[1] - len(row)) for row in rows])
            labels = torch.cat([torch.full_like(prompts, -100), padded.masked_fill(mask == 0, -100)], 1)
            return torch.cat([prompts, padded], 1), torch.cat([inputs["prompt_attention_mask"], mask], 1), labels

        if job.kind == "gkd":
            trainer.generate_on_policy_outputs = completed
        elif job.kind == "rloo":
            trainer._generate_single_turn = lambda *args, **kwargs: next(following)
        else:
            trainer._generate_single_turn = lambda *args, **kwargs: (next(following), None)

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


# ----- tools -----


def look_up(word: str) -> str:
    """Look up a word.

    Args:
        word: the word.

    Returns:
        What is known of it.
    """
    _calls.append(word)
    if len(word) % 3 == 0:
        raise KeyError(word)
    return f"{word} {dist.get_rank() if dist.is_initialized() else 0}"


_calls: list[str] = []


def _parsed(tokenizer: Any, ids: list[int], **further: Any) -> dict[str, Any]:
    """Read a message of an assistant, who calls the tool now and then."""
    message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    if sum(ids) % 2:
        arguments = {"word": "".join(chr(97 + each % 26) for each in ids[:4])}
        message["tool_calls"] = [{"type": "function", "function": {"name": "look_up", "arguments": arguments}}]
    return message


def with_tools(job: Job, folder: str, layout: str | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what is logged, and the words that were looked up on this rank."""
    _calls.clear()
    with patch("trl.trainer.grpo_trainer.parse_response", _parsed):
        return run(job, folder, layout), list(_calls)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", pytest.param("tp2pp2", marks=_CAMPAIGN)])
def test_a_tool_runs_once_for_the_ranks_of_a_replica(layout: str, tmp_path: Path) -> None:
    job = Job("grpo", {"max_completion_length": 24, "max_steps": 3, "learning_rate": 5e-4}, tools=(look_up,))
    expected, words = with_tools(job, str(tmp_path / "plain"))
    (first, called), *others = run_on_ranks(ranks_of(layout), with_tools, job, str(tmp_path / layout), layout)
    assert called == words and len(words) > 8 and not any(calls for _, calls in others)
    for history in (first, *(history for history, _ in others)):
        worst = differences(history, expected)
        assert {"tools/call_frequency", "tools/failure_frequency", "loss"} <= worst.keys()
        assert max(worst.values()) < _TOLERANCE, worst
