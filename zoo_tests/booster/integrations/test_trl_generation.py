"""TRL's trainers that generate, under layouts: they log what one plain process logs that samples the same tokens.

What breaks here first: random numbers that ranks of a replica draw apart, rewards that are taken of the wrong replica,
a mean over ranks. Look in `booster/integrations/trl_trainers.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import GenerationMixin

from booster.errors import ConfigurationError
from booster.integrations.arguments import check_shares
from booster.integrations.replicas import Replicas
from booster.integrations.transformers import boosted
from booster.integrations.trl_trainers import BoostedTRLTrainer
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.booster.integrations.trl_jobs import Job, classes_of, differences, ranks_of, run, trainer_of
from zoo_tests.harness.ranks import run_on_ranks

_LORA: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "up_proj"]}
_REUSED = {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "grpo"}
_GREEDY = {"generation_kwargs": {"do_sample": False}}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
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
    "grpo entropy": Job("grpo", {"entropy_coef": 0.1}),
    "grpo experts": Job("grpo", {"beta": 0.04}, family="qwen3_moe", sizes=_EXPERTS),
    "gmpo": Job("gmpo", {"beta": 0.04}),
    "gkd": Job("gkd", {"lmbda": 0.6, "max_new_tokens": 7}, data="chats"),
}
_FURTHER = {
    "online_dpo": Job("online_dpo", {"eval_strategy": "no"}),  # TRL has none for it
    "sdpo": Job("sdpo"),
    "sdft": Job("sdft"),
    "a2po": Job("a2po"),
    "iw_opd": Job("iw_opd", {"distillation_objective": "jsd"}, data="chats"),
    "gold": Job("gold", data="chats"),
    "distillation": Job("distillation", {"beta": 0.4, "temperature": 0.8, "gradient_accumulation_steps": 2}),
}
for _name, _job in _FURTHER.items():
    _top = {"top_k": 1} if _name in ("a2po", "iw_opd", "gold") else _GREEDY  # they take no generation_kwargs
    JOBS[_name], JOBS[f"{_name} greedy"] = _job, dataclasses.replace(_job, arguments=_job.arguments | _top)
    JOBS[f"{_name} lora"] = dataclasses.replace(_job, adapters=_LORA, trained_adapters=_name == "a2po")
del JOBS["online_dpo greedy"]  # its two answers would be one, and Adam scale up a gradient that is rounding alone
JOBS["iw_opd own"] = Job("iw_opd", {"distillation_objective": "iw_opd"}, data="chats")
SAMPLE = {"grpo": "tp2pp2", "rloo": "pp2", "sdpo lora": "tp2", "distillation": "tp2pp2"}
_OF_REPLICAS = {
    "grpo": "dp2",
    "grpo without reference": "pp2dp2",
    "grpo bnpo": "dp2",
    "grpo entropy": "dp2",
    "grpo experts": "pp2ep2",
    "iw_opd own": "dp2",
    "online_dpo": "dp2",
    **dict.fromkeys(("rloo", "gmpo", "gkd", "gold", "sdpo", "sdft", "a2po", "distillation"), "dp2"),
}
_ALIKE = tuple(_OF_REPLICAS)[7:]  # to those before
# What TRL takes as a mean over the means of processes.
_MEANS_OF_MEANS = {
    "sdpo": ("self_distillation/distillation_loss", "sdpo/distillation_loss"),
    "sdft": ("self_distillation/distillation_loss", "sdft/distillation_loss"),
    "grpo": ("policy_loss",),
}
_TOLERANCE = 1e-5
# Norms of gradients in which rounding adds up over 20 steps: in fp64 they agree to 1e-13.
_OF_ROUNDING = {"rloo, tp2pp2": 2e-5, "grpo without reference, pp2dp2": 5e-5}
_CAMPAIGN = pytest.mark.campaign


def _steps(job: Job, steps: int) -> Job:
    given = {"eval_strategy": "steps", "eval_steps": steps - 1, "max_steps": steps, "learning_rate": 5e-4}
    return dataclasses.replace(job, arguments={**given, **job.arguments})


def _check(found: list[list[dict[str, Any]]], expected: list[dict[str, Any]], what: str) -> None:
    logged = {name for each in expected for name in each}
    for each in found:
        worst = differences(each, expected)
        assert {"loss", *logged & {"eval_loss", "reward", "entropy"}} <= worst.keys()
        print(f"{what}: {max(worst.values()):.0e} ({max(worst, key=worst.__getitem__)})")
        limits = {"grad_norm": _OF_ROUNDING.get(what, _TOLERANCE)}
        assert not {name: gap for name, gap in worst.items() if gap > limits.get(name, _TOLERANCE)}


def _check_layouts(name: str, steps: int, layouts: Sequence[str], folder: Path) -> None:
    job = _steps(JOBS[name], steps)
    expected = run(job, str(folder / "plain"))
    for layout in layouts:
        found = run_on_ranks(ranks_of(layout), run, job, str(folder / layout), layout, timeout_s=300.0)
        _check(found, expected, f"{name}, {layout}")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_few_steps_log_what_one_process_logs(name: str, tmp_path: Path) -> None:
    _check_layouts(name, 5, [SAMPLE[name]], tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("name", JOBS)
def test_twenty_steps_log_what_one_process_logs(name: str, tmp_path: Path) -> None:
    _check_layouts(name, 20, ["tp2", "pp2", "tp2pp2"], tmp_path)


# ----- replicas -----


def record(job: Job, folder: str, layout: str) -> tuple[int, list[dict[str, Any]], list[list[list[int]]]]:
    """Train on this rank; return its replica, what it logs, and the tokens of each row of each generation."""
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel

    generations: list[list[list[int]]] = []
    replicas: list[int] = []
    generate = HybridParallelModel.generate

    def recorded(model: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        found = generate(model, input_ids=input_ids, **options)
        ids = found if isinstance(found, torch.Tensor) else found.sequences
        generations.append(ids[:, input_ids.shape[1] :].tolist())
        return found

    with patch.object(HybridParallelModel, "generate", recorded):
        history = run(job, folder, layout, before=lambda each: replicas.append(each.accelerator.process_index))
    return replicas[0], history, generations


def _replay(job: Job, folder: Path, generations: list[list[list[int]]]) -> list[dict[str, Any]]:
    """Train plainly with the completions that replicas have drawn."""
    following = iter(generations)

    def completed(model: Any, input_ids: torch.Tensor, generation_config: Any, **options: Any) -> Any:
        rows, count = next(following), generation_config.num_return_sequences or 1
        padded = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
        ids = torch.cat([input_ids.repeat_interleave(count, 0), padded], 1)
        return SimpleNamespace(sequences=ids) if options.get("return_dict_in_generate") else ids

    with patch.object(GenerationMixin, "generate", completed):
        history = run(job, str(folder))
    assert not list(following)
    return history


def _joined(one: list[list[int]], other: list[list[int]], answers: int) -> list[list[int]]:
    """Rows of two replicas as one process has them: the first answers to all prompts, then the second."""
    parts = [
        [rows[len(rows) * turn // answers : len(rows) * (turn + 1) // answers] for rows in (one, other)]
        for turn in range(answers)
    ]
    return [row for first, second in parts for row in first + second]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *(pytest.param(name, 4, marks=_CAMPAIGN) if name in _ALIKE else (name, 4) for name in _OF_REPLICAS),
        *(pytest.param(name, 20, marks=_CAMPAIGN) for name in ("grpo", "grpo without reference")),
    ],
)
def test_replicas_log_what_one_process_logs_of_their_completions(name: str, steps: int, tmp_path: Path) -> None:
    job, layout = _steps(JOBS[name], steps), _OF_REPLICAS[name]
    # Over several steps, each replica would shuffle its own rows.
    single = dict.fromkeys(job.arguments.keys() & {"steps_per_generation", "gradient_accumulation_steps"}, 1)
    job = dataclasses.replace(job, arguments=job.arguments | single)
    trainer_of(job, str(tmp_path / "plain"), None)  # it writes the reference
    found = run_on_ranks(ranks_of(layout), record, job, str(tmp_path / layout), layout, timeout_s=300.0)
    shares = {replica: generations for replica, _, generations in found}
    for replica, _, generations in found:
        assert generations == shares[replica], "the ranks of a replica draw the same"
    assert shares[0] != shares[1], "replicas draw by themselves"
    joined = [
        _joined(one, other, 2 if job.kind == "online_dpo" else 1) for one, other in zip(*shares.values(), strict=True)
    ]
    means = _MEANS_OF_MEANS.get(job.kind, ())
    kept = [
        [{key: each[key] for key in each if key.removeprefix("eval_") not in means} for each in history]
        for history in (_replay(job, tmp_path / "plain", joined), *(history for _, history, _ in found))
    ]
    _check(kept[1:], kept[0], f"{name}, {layout}")


def refusals(job: Job, folder: str) -> list[str | None]:
    """Return why shares of samples are refused: those of A2PO's loader, then numbers of replicas 0 and 1."""
    found: list[str | None] = []

    def note(function: Any, *args: Any) -> None:
        try:
            function(*args)
            found.append(None)
        except ConfigurationError as error:
            found.append(str(error))

    note(run, job, folder, "dp2")
    for kind, rows in (("sdft", (3, 0)), ("sdft", (3, 2)), ("grpo", (3, 2)), ("grpo", (4, 4))):
        trainer = object.__new__(boosted(classes_of(kind)[0]))
        trainer.plugin, trainer.args = HybridParallelPlugin(), SimpleNamespace(device="cpu")
        trainer.accelerator = SimpleNamespace(replicas=Replicas(trainer.plugin), all_ranks_lead=False)
        note(check_shares, trainer, rows[dist.get_rank()])
    return found


@pytest.mark.slow
def test_a_batch_of_which_a_replica_has_no_samples_is_refused(tmp_path: Path) -> None:
    job = dataclasses.replace(_steps(JOBS["a2po"], 2), samples=25)
    one, other = run_on_ranks(2, refusals, job, str(tmp_path), timeout_s=300.0)
    assert one == other, "the same on all ranks"
    for said, shares in zip(one, ([0, 1], [3, 0], None, [3, 2], None), strict=True):
        assert (said is None) == (shares is None)
        assert said is None or f"Trainer get {shares} samples of a batch, and generate for as many each; use" in said


@pytest.mark.slow
def test_tokens_that_tie_for_the_highest_entropies_are_all_kept() -> None:
    trainer = object.__new__(boosted(classes_of("grpo")[0]))
    trainer.accelerator = SimpleNamespace(gather=torch.atleast_1d, pad_across_processes=lambda each, **_: each)
    entropies = torch.tensor([[2.0, 3.0, 1.0], [2.0 - 2e-7, 2.5, 9.0]])
    kept = trainer.get_high_entropy_mask(entropies, torch.tensor([[1, 1, 1], [1, 1, 0]]), 0.5)
    assert kept.tolist() == [[True, True, False], [True, True, False]], "rounding does not part equal beginnings"


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_replica_without_tokens_to_learn_adds_nothing(tokens: int) -> None:
    """To the mean of CPO over 4 tokens of another replica, where its own would be nan."""

    class Scorer:
        def concatenated_forward(self, model: Any, batch: Any) -> tuple[Any, ...]:
            return (0, 0, 0, 0, torch.tensor(6.0 if tokens else torch.nan))

    trainer: Any = object.__new__(type("", (BoostedTRLTrainer, Scorer), {"is_encoder_decoder": True}))
    gather = lambda own: torch.cat([own, torch.tensor([[4, 1]])])  # noqa: E731
    trainer.accelerator = SimpleNamespace(replicas=SimpleNamespace(size=2, gather=gather))
    labels = torch.tensor([[5, 6, 7]]).masked_fill(torch.arange(3) >= tokens, -100)
    assert trainer.concatenated_forward(None, {"chosen_labels": labels})[4] == 6 * tokens * 2 / 6


# ----- trainer and sampler -----


def log_probs_by_text(folder: str, layout: str) -> list[dict[tuple[int, ...], list[float]]]:
    """Update once with `reproducible=True`; return tokens -> log-probabilities, as generated, scored and trained on."""
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel

    generated, scored, trained = made = [{}, {}, {}]
    temperature, generate = 0.8, HybridParallelModel.generate

    def recorded(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        options |= {"output_logits": True, "return_dict_in_generate": True}
        found = generate(model, input_ids=input_ids, attention_mask=attention_mask, **options)
        log_probs = (torch.stack(found.logits, 1).float() / temperature).log_softmax(-1)  # [rows, tokens, vocabulary]
        answers = found.sequences[:, input_ids.shape[1] :]
        log_probs = log_probs.gather(-1, answers[..., None])[..., 0]
        for prompt, row, values in zip(input_ids, answers.tolist(), log_probs.tolist(), strict=True):
            count = next((index + 1 for index, each in enumerate(row) if each in range(1, 40)), len(row))
            generated[(*prompt[prompt > 0].tolist(), *row[:count])] = values[:count]
        return found.sequences

    def watch(trainer: Any) -> None:
        score = trainer._get_per_token_logps_and_entropies

        def watched(model: Any, ids: torch.Tensor, mask: torch.Tensor, count: int, *rest: Any, **options: Any) -> Any:
            found = score(model, ids, mask, count, *rest, **options)
            for text, seen, values in zip(ids, mask.bool(), found[0].detach(), strict=True):
                log_probs = values[seen[-count:]].tolist()
                (trained if torch.is_grad_enabled() else scored)[tuple(text[seen].tolist())] = log_probs
            return found

        trainer._get_per_token_logps_and_entropies = watched

    job = Job("grpo", {"temperature": temperature, "max_steps": 1, **_REUSED}, plugin={"reproducible": True})
    with patch.object(HybridParallelModel, "generate", recorded):
        run(job, folder, layout, before=watch)
    return made


@pytest.mark.slow
def test_grpo_trains_on_the_bits_that_it_has_sampled_from(tmp_path: Path) -> None:
    for generated, scored, trained in run_on_ranks(2, log_probs_by_text, str(tmp_path), "tp2", timeout_s=300.0):
        assert generated == scored == trained and len(trained) > 8, "the ratio of the first update is exactly 1"


# ----- checkpoints -----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "adapters"),
    [("tp2", "pp2", None), *(pytest.param("pp2", "tp2pp2", each, marks=_CAMPAIGN) for each in (None, _LORA))],
)
def test_sampling_goes_on_in_another_layout(first: str, then: str, adapters: Any, tmp_path: Path) -> None:
    given = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "beta": 0.04, "learning_rate": 5e-4}
    job, folder = Job("grpo", given, adapters=adapters), str(tmp_path / "boosted")
    expected = run(job, str(tmp_path / "plain"))
    run_on_ranks(ranks_of(first), run, job, folder, first, timeout_s=300.0)
    for found in run_on_ranks(ranks_of(then), run, job, folder, then, f"{folder}/checkpoint-3", timeout_s=300.0):
        kept = [{name: each[name] for name in each if name != "train_loss"} for each in (*found, *expected)]
        worst = differences(kept[: len(found)], kept[len(found) :])
        assert max(worst.values()) < _TOLERANCE, worst


# ----- tools, environments and rollouts -----

_calls: list[str] = []


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


class Library:
    """An environment that keeps what was looked up in it, and gives rewards for it."""

    def reset(self, **example: Any) -> str:
        self.words: list[str] = []
        return f" {len(_calls) % 10}"

    def look_up(self, word: str) -> str:
        """Look up a word.

        Args:
            word: the word.

        Returns:
            What is known of it, and how many were looked up.
        """
        self.words.append(word)
        return f"{look_up(word)} {len(self.words)}"

    async def get_reward(self) -> float:
        return len(self.words) - len(_calls) % 3 / 4


def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Generate twice, the second turn after a token from outside."""
    from trl.models import utils

    _calls.append(str(len(prompts)))
    ids = [trainer.processing_class.apply_chat_template(each, return_dict=True)["input_ids"] for each in prompts]
    turns: list[list[list[int]]] = [[] for _ in ids]
    for turn in range(2):
        texts = [prompt + sum(each, []) for prompt, each in zip(ids, turns, strict=True)]
        width = max(map(len, texts))
        padded = torch.tensor([[0] * (width - len(each)) + each for each in texts])
        with utils.unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
            found = model.generate(input_ids=padded, attention_mask=padded.ne(0).long(), max_new_tokens=5)
        for each, row in zip(turns, found[:, width:].tolist(), strict=True):
            each.append([*filter(None, row), 50 + turn])
    completions = [sum(each, []) for each in turns]
    mask = [[int(token < 50) for token in each] for each in completions]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": mask}


def _parsed(tokenizer: Any, ids: list[int], **further: Any) -> dict[str, Any]:
    """Read a message of an assistant, who calls the tool now and then."""
    message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    if sum(ids) % 2:
        arguments = {"word": "".join(chr(97 + each % 26) for each in ids[:4])}
        message["tool_calls"] = [{"type": "function", "function": {"name": "look_up", "arguments": arguments}}]
    return message


def with_outside(job: Job, folder: str, layout: str | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what is logged, and what was called on this rank."""
    _calls.clear()
    with patch("trl.trainer.grpo_trainer.parse_response", _parsed):
        return run(job, folder, layout), list(_calls)


_OUTSIDE = {
    "tools": {"tools": [look_up]},
    "environments": {"environment_factory": Library},
    "rollouts": {"rollout_func": roll_out},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=_CAMPAIGN), "tp2pp2"])
@pytest.mark.parametrize("name", [pytest.param("tools", marks=_CAMPAIGN), "environments", "rollouts"])
def test_programs_outside_say_the_same_to_the_ranks_of_a_replica(name: str, layout: str, tmp_path: Path) -> None:
    given = {"max_completion_length": 24, "max_steps": 3, "learning_rate": 5e-4}
    job = Job("grpo", given, outside=_OUTSIDE[name])
    expected, calls = with_outside(job, str(tmp_path / "plain"))
    found = run_on_ranks(ranks_of(layout), with_outside, job, str(tmp_path / layout), layout, timeout_s=300.0)
    others = calls if name == "rollouts" else []  # every rank of the model runs it
    assert [called for _, called in found] == [calls, *[others] * (len(found) - 1)] and len(calls) >= 3
    for history, _ in found:
        worst = differences(history, expected)
        assert {"loss", *(["tools/call_frequency"] if name != "rollouts" else [])} <= worst.keys()
        assert max(worst.values()) < _TOLERANCE, worst
