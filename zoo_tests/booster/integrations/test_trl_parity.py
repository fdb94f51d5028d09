"""TRL's trainers under layouts log what one plain process logs: SFT, DPO, reward models and KTO, with adapters too.

What breaks here first: a mean over replicas' means, a token that is counted once a rank, a reference that is trained.
The suite has few steps, and layouts in turns; `pytest --campaigns` has all layouts, and 50 steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zoo_tests.booster.integrations.trl_jobs import LAYOUTS, Job, differences, ranks_of, run
from zoo_tests.harness.ranks import run_on_ranks

_LORA: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
_PROMPTS: dict[str, Any] = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
_ENCODED_PROMPTS = {**_PROMPTS, "peft_type": "P_TUNING", "encoder_hidden_size": 10}
_SCORE_LORA = {**_LORA, "task_type": "SEQ_CLS"}
_ACCUMULATION = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 6, "max_grad_norm": 0.05}
_MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 36}
_MANY_LOSSES = ["hinge", "exo_pair", "nca_pair", "robust", "sppo_hard", "apo_zero", "discopop", "sigmoid_norm"]
_OTHER_LOSSES = {"loss_type": ["ipo", "bco_pair", "apo_down"], "loss_weights": [0.8, 0.2, 1.0]}
JOBS = {
    "sft": Job("sft"),
    "sft assistant only": Job("sft", {"assistant_only_loss": True}, data="chats"),
    "sft texts": Job("sft", {"pad_to_multiple_of": 8}, data="texts", family="qwen3"),
    "sft packed": Job("sft", {"packing": True, "max_length": 64}, data="texts"),
    "sft wrapped": Job("sft", {"packing": True, "max_length": 32, "packing_strategy": "wrapped"}, data="texts"),
    "sft without padding": Job("sft", {"padding_free": True, "max_length": None}),
    "sft dft": Job("sft", {"loss_type": "dft", **_ACCUMULATION}),
    "sft smoothed": Job("sft", {"label_smoothing_factor": 0.1}),
    "sft tied": Job("sft", family="qwen2", sizes={"tie_word_embeddings": True}, plugin={"num_microbatches": 2}),
    "sft capped logits": Job("sft", family="gemma2"),
    "sft experts": Job("sft", {"router_aux_loss_coef": 0.0}, family="mixtral", sizes=_MIXTURE),
    "sft router loss": Job("sft", {"router_aux_loss_coef": 0.3}, family="mixtral", sizes=_MIXTURE),
    "sft whole activations": Job("sft", {"gradient_checkpointing": False}),
    "sft selective": Job("sft", {"gradient_checkpointing_kwargs": {"selective": True}}),
    "sft lora": Job("sft", adapters=_LORA),
    "sft trained lora": Job("sft", adapters=_LORA, trained_adapters=True),
    "dpo": Job("dpo"),
    "dpo accumulated": Job("dpo", _ACCUMULATION),
    "dpo precomputed": Job("dpo", {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 6}),
    "dpo precomputed by itself": Job("dpo", {"precompute_ref_log_probs": True, "beta": 0.3}, reference="none"),
    "dpo precomputed lora": Job("dpo", {"precompute_ref_log_probs": True}, reference="none", adapters=_LORA),
    "dpo lora": Job("dpo", reference="none", adapters=_LORA),
    "dpo trained lora": Job("dpo", reference="none", adapters=_LORA, trained_adapters=True),
    "dpo lora and reference": Job("dpo", adapters={**_LORA, "modules_to_save": ["lm_head"]}),
    "dpo losses": Job("dpo", {"loss_type": _MANY_LOSSES, "label_smoothing": 0.1}),
    "dpo other losses": Job("dpo", _OTHER_LOSSES),
    "dpo lengths": Job("dpo", {"ld_alpha": 0.5}),
    "dpo weighted": Job("dpo", {"use_weighting": True, "f_divergence_type": "js_divergence"}),
    "dpo router loss": Job("dpo", {"router_aux_loss_coef": 0.3}, family="mixtral", sizes=_MIXTURE),
    "dpo synced": Job("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}),
    "dpo synced, stage 3": Job("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 2}, plugin={"zero_stage": 3}),
    "reward": Job("reward", samples=25),  # the last batch has a sample for one replica alone
    "reward centered": Job("reward", {"center_rewards_coefficient": 0.1, **_ACCUMULATION}),
    "reward lora": Job("reward", adapters=_SCORE_LORA),
    "kto": Job("kto", samples=25),  # so here, whose loss then has no gradient there
    "kto unpaired": Job("kto", {"loss_type": "apo_zero_unpaired"}),
    "kto lora": Job("kto", reference="none", adapters=_LORA),
    "sft prompts": Job("sft", adapters=_PROMPTS),
    "dpo prompts": Job("dpo", reference="none", adapters=_ENCODED_PROMPTS),
    "kto prompts": Job("kto", reference="none", adapters=_PROMPTS),
    "orpo": Job("orpo"),
    "orpo lora": Job("orpo", adapters=_LORA),
    "cpo": Job("cpo", {"loss_type": "simpo", **_ACCUMULATION}),
    "cpo router loss": Job("cpo", family="mixtral", sizes={**_MIXTURE, "output_router_logits": True}),
    "tpo": Job("tpo"),
    "kto precomputed": Job("kto", {"precompute_ref_log_probs": True}),
}
# What the suite has of them, each under one layout.
SAMPLE = {
    "sft": "tp2pp2",
    "sft assistant only": "pp2",
    "sft packed": "dp2",
    "sft dft": "tp2",
    "sft smoothed": "dp2",
    "sft router loss": "pp2",
    "sft lora": "dp2",
    "dpo": "dp2",
    "dpo trained lora": "tp2",
    "dpo precomputed": "dp2",
    "dpo lora": "pp2",
    "dpo losses": "tp2",
    "reward": "dp2",
    "reward lora": "pp2",
    "kto": "dp2",
    "dpo synced, stage 3": "dp2",
    "sft prompts": "pp2",
    "dpo prompts": "tp2",
    "kto prompts": "pp2",  # whose reference has no virtual tokens, also without gradients
    "orpo": "dp2",
    "cpo": "dp2",
    "tpo": "tp2",
}
_LONG = ("sft", "sft lora", "dpo", "dpo lora", "reward", "reward lora", "kto")
_TOLERANCE = 1e-6
# A difference of sums of log-probabilities near 100, which fp32 rounds to 8e-6.
_OF_SUMS = {"kl": 1e-5, "eval_kl": 1e-5, "rewards": 4e-6, "eval_rewards": 4e-6}


def _steps(job: Job, steps: int, eval_steps: int) -> Job:
    given = {"eval_strategy": "steps", "eval_steps": eval_steps, "max_steps": steps, "learning_rate": 5e-4}
    return dataclasses.replace(job, arguments={**given, **job.arguments})


def worst_differences(job: Job, layout: str, folder: Path) -> dict[str, float]:
    """Train plainly and under a layout; the worst difference of each quantity, on any rank."""
    expected = run(job, str(folder / "plain"))
    everywhere = [
        differences(each, expected)
        for each in run_on_ranks(ranks_of(layout), run, job, str(folder / layout), layout, timeout_s=300.0)
    ]
    return {name: max(each[name] for each in everywhere) for name in everywhere[0]}


def _check(found: dict[str, float], tolerance: float = _TOLERANCE) -> None:
    allowed = {name: _OF_SUMS.get(name.partition("/")[0], tolerance) for name in found}
    assert not {name: value for name, value in found.items() if value > allowed[name]}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_few_steps_log_what_one_process_logs(name: str, tmp_path: Path) -> None:
    found = worst_differences(_steps(JOBS[name], 5, 4), SAMPLE[name], tmp_path)
    assert {"loss", "eval_loss", "grad_norm"} <= found.keys()
    _check(found, 2 * _TOLERANCE)


def _all_layouts() -> Iterator[Any]:
    for name in JOBS:
        for layout in LAYOUTS:
            is_refused = layout == "dp2" and "router loss" in name
            is_refused |= "dp2" in layout and JOBS[name].kind == "tpo"
            if not is_refused:
                yield pytest.param(name, layout, id=f"{name}-{layout}")


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "layout"), _all_layouts())
def test_all_jobs_log_what_one_process_logs(name: str, layout: str, tmp_path: Path) -> None:
    _check(worst_differences(_steps(JOBS[name], 5, 4), layout, tmp_path), 4 * _TOLERANCE)


@pytest.mark.campaign
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", _LONG)
def test_fifty_steps_log_what_one_process_logs(name: str, layout: str, tmp_path: Path, capsys: Any) -> None:
    """Within 1e-6, or within what fp32 rounds away: twice the distance of the plain run from its twin in fp64."""
    job = _steps(JOBS[name], 50, 10)
    found = worst_differences(job, layout, tmp_path)
    exact = run(dataclasses.replace(job, dtype="float64"), str(tmp_path / "exact"))
    rounding = differences(run(job, str(tmp_path / "rounded")), exact)
    with capsys.disabled():
        worst = max(found, key=found.__getitem__)
        print(f"\n{name} {layout}: loss {found['loss']:.1e}, {worst} {found[worst]:.1e}", end=" ")
        print(f"(plain fp32 is {rounding[worst]:.1e} from fp64)")
    assert found["loss"] < _TOLERANCE
    assert not {key: value for key, value in found.items() if value > max(_TOLERANCE, 2 * rounding[key])}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [("sft", "pp2"), ("dpo", "dp2")])
def test_bf16_rounds_as_one_process_does(kind: str, layout: str, tmp_path: Path) -> None:
    """Both run in bf16, and differ by its rounding; without it they would differ from plain bf16 by more."""
    job = _steps(Job(kind, {"bf16": True}), 3, 2)
    found = worst_differences(job, layout, tmp_path)
    assert found["loss"] < 2e-2 and found["eval_loss"] < 2e-2
    full = run_on_ranks(2, run, _steps(Job(kind), 3, 2), str(tmp_path / "full"), layout)
    rounded = run_on_ranks(2, run, job, str(tmp_path / "rounded"), layout)
    assert differences(rounded[0], full[0])["loss"] > 1e-5, "bf16=True does something"
