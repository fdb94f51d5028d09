"""The meter of a boosted Trainer: its figures in the logs, and its line at the end of a run.

What breaks here first: a run that is shorter than `logging_steps`, of which nothing was measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from booster.integrations.accelerate import variables_of_this_rank
from booster.integrations.trainer_checkpoints import MeterCallback
from booster.integrations.transformers import boosted
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.booster.integrations.accelerate_loop import fresh_accelerate
from zoo_tests.harness.ranks import run_on_ranks


def _run(folder: str, logging_steps: int) -> tuple[str, list[dict[str, Any]]]:
    """Train two steps; return the line of the meter, and what was logged."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    samples = [{"input_ids": torch.arange(7) + row, "labels": row % 2} for row in range(6)]
    meter = MeterCallback()
    with fresh_accelerate(), variables_of_this_rank():
        args = TrainingArguments(folder, max_steps=2, logging_steps=logging_steps, report_to="none", use_cpu=True)
        args.per_device_train_batch_size, args.disable_tqdm = 3, True
        trainer = boosted(Trainer)(
            model=BertForSequenceClassification(BertConfig(vocab_size=32, **sizes)),
            args=args,
            train_dataset=samples,
            callbacks=[meter],
            plugin=HybridParallelPlugin(tp_size=2),
        )
        trainer.train()
    return meter.line(), trainer.state.log_history


@pytest.mark.slow
def test_a_run_shorter_than_its_first_log_is_measured(tmp_path: Path) -> None:
    first, second = (line for line, _ in run_on_ranks(2, _run, str(tmp_path), 10))
    assert first == second and all(f"{name} " in first for name in ("tokens/s", "samples/s", "memory"))


@pytest.mark.slow
def test_the_line_has_the_loss_that_was_logged(tmp_path: Path) -> None:
    line, history = run_on_ranks(2, _run, str(tmp_path), 1)[0]
    logged = [each for each in history if "loss" in each]
    assert len(logged) == 2 and all(each["tokens_per_second"] > 0 for each in logged)
    assert f"loss {float(logged[-1]['loss']):.4f}" in line and "learning_rate " in line
