"""What TRL's trainers write under a layout: plain peft opens adapters, and a checkpoint goes on in another layout.

What breaks here first: names of an adapter's tensors, or a state of the optimizer that belongs to another shard. Look
in `booster/integrations/trainer_checkpoints.py`, and in `shardformer/peft` for the names.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from zoo_tests.booster.integrations.trl_jobs import Job, differences, logits_of, model_of, ranks_of, run
from zoo_tests.harness.ranks import run_on_ranks

_LORA: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
_SCORE_LORA = {**_LORA, "task_type": "SEQ_CLS"}
_HEAD_TOO = {**_LORA, "modules_to_save": ["lm_head"]}
_IDS = [[5, 9, 17, 40, 3], [7, 2, 30], [11, 12, 13, 14]]
# Adam makes steps of one size out of the rounding of gradients that are nearly zero.
_EXACT: dict[str, Any] = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.3}
_SAVED = {
    "sft": Job("sft", _EXACT, adapters=_LORA),
    "dpo, head too": Job("dpo", _EXACT, adapters=_HEAD_TOO),
    "reward": Job("reward", _EXACT, adapters=_SCORE_LORA),
}
# 29 samples are 4 batches an epoch: the third step leaves the first epoch in its middle.
_RESUMED: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "cosine"}
_KEPT_STEP = 3
_GOING_ON = {
    "sft lora": Job("sft", _RESUMED, adapters=_LORA),
    "dpo": Job("dpo", _RESUMED),
    "reward": Job("reward", {**_RESUMED, "gradient_accumulation_steps": 2}),
    "kto lora": Job("kto", _RESUMED, reference="none", adapters=_LORA),
}
_CAMPAIGN = pytest.mark.campaign
_LIMIT_S = 300.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("sft", "tp2pp2"),
        ("dpo, head too", "tp2"),
        pytest.param("sft", "dp2", marks=_CAMPAIGN),
        pytest.param("dpo, head too", "pp2", marks=_CAMPAIGN),
        pytest.param("reward", "tp2pp2", marks=_CAMPAIGN),
        pytest.param("reward", "pp2", marks=_CAMPAIGN),
    ],
)
def test_plain_peft_opens_saved_adapters(name: str, layout: str, tmp_path: Path) -> None:
    job = dataclasses.replace(_SAVED[name], dtype="float64")
    run(job, str(tmp_path / "plain"))
    run_on_ranks(ranks_of(layout), run, job, str(tmp_path / layout), layout, timeout_s=_LIMIT_S)
    found, expected = (
        logits_of(PeftModel.from_pretrained(model_of(job), tmp_path / each / "saved"), _IDS)
        for each in (layout, "plain")
    )
    learnt = (expected - logits_of(model_of(job), _IDS)).abs().max()
    assert learnt > 1e-3
    assert (found - expected).abs().max() < 1e-4 * learnt, "TRL takes log-probabilities in single precision"


def _compared(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what Trainer and TRL count from the checkpoint on: the mean loss, and tokens."""
    return [{name: each[name] for name in each if name not in ("train_loss", "num_tokens")} for each in history]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("sft lora", "tp2", "pp2"),
        pytest.param("dpo", "tp2", "pp2", marks=_CAMPAIGN),
        pytest.param("dpo", "pp2dp2", "tp2", marks=_CAMPAIGN),
        pytest.param("reward", "dp2", "tp2pp2", marks=_CAMPAIGN),
        pytest.param("kto lora", "pp2", "dp2", marks=_CAMPAIGN),
    ],
)
def test_training_goes_on_in_another_layout(name: str, first: str, then: str, tmp_path: Path) -> None:
    job, folder = _GOING_ON[name], str(tmp_path / "boosted")
    expected = run(job, str(tmp_path / "plain"))
    run_on_ranks(ranks_of(first), run, job, folder, first, timeout_s=_LIMIT_S)
    checkpoint = f"{folder}/checkpoint-{_KEPT_STEP}"
    for found in run_on_ranks(ranks_of(then), run, job, folder, then, checkpoint, timeout_s=_LIMIT_S):
        assert found[-1]["step"] == 6
        worst = differences(_compared(found), _compared(expected))
        assert max(worst.values()) < (1e-5 if job.kind == "kto" else 2e-6), worst
