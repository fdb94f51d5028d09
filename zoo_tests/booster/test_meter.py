"""The meter counts what the ranks of all layouts have processed, and sends it to trackers.

What breaks here first: a count of this rank alone. Look in `booster/meter.py`.
"""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import distributed, run_on_ranks

_LAYERS, _HIDDEN, _INNER, _WORDS = 3, 32, 48, 96
_PEAK = 1e9
_LAYOUTS = {"dp2": {}, "tp2pp2": {"tp_size": 2, "pp_size": 2}}


def _boosted(**options: Any) -> tuple[Booster, Any]:
    booster = Booster(HybridParallelPlugin(**options))
    sizes = {"hidden_size": _HIDDEN, "intermediate_size": _INNER, "num_hidden_layers": _LAYERS}
    config = LlamaConfig(vocab_size=_WORDS, num_attention_heads=4, num_key_value_heads=4, **sizes)
    return booster, booster.boost(LlamaForCausalLM(config))


def _batch(rows: int, length: int = 8, padded: int = 0) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[:, length - padded :] = 0
    return {"input_ids": torch.ones(rows, length, dtype=torch.long), "attention_mask": mask}


def _forward_flops(rows: int, length: int) -> float:
    """By hand: projections, scores and values with a causal mask, and the head."""
    a_layer = 4 * 2 * _HIDDEN * _HIDDEN + 3 * 2 * _HIDDEN * _INNER
    attention = 4 * length * _HIDDEN
    return rows * length * (_LAYERS * (a_layer + attention) + 2 * _HIDDEN * _WORDS)


def _measure(layout: str) -> dict[str, float]:
    booster, model = _boosted(**_LAYOUTS[layout])
    meter = booster.meter(model, total_steps=4, every=2, peak_flops=_PEAK, bar=False)
    rows = 2 + 2 * booster.plugin.dp_rank  # of each replica
    meter._since -= 1.0  # a second has passed
    meter._began -= 1.0
    with meter.generating() as count:
        count(_batch(rows, padded=5)["attention_mask"])
    meter._generating += 0.4
    meter.step(torch.tensor(2.5), _batch(rows, padded=3))
    assert meter.figures() == {}
    meter.step(torch.tensor(1.5), _batch(rows), lr=0.25)
    return meter.figures()


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2"])
def test_figures_are_those_of_all_ranks(layout: str) -> None:
    began = time.monotonic()
    figures = run_on_ranks(4 if layout == "tp2pp2" else 2, _measure, layout)
    took = time.monotonic() - began
    assert all(each["memory_mib"] == figures[0]["memory_mib"] for each in figures)
    found, rows = figures[0], 6 if layout == "dp2" else 2
    assert (found["loss"], found["learning_rate"]) == (1.5, 0.25)
    seconds = 2 * rows / found["samples_per_second"]
    assert 1.0 <= seconds <= 1.0 + took
    assert found["tokens_per_second"] * seconds == pytest.approx(rows * (5 + 8))
    assert found["generated_tokens_per_second"] * seconds == pytest.approx(rows * 3)
    assert 0.4 <= found["generating_share"] * seconds <= 0.4 + took
    promised = _PEAK * len(figures)
    assert found["mfu"] * seconds * promised == pytest.approx(3 * 2 * _forward_flops(rows, 8), rel=0.05)
    assert found["memory_mib"] > 50
    assert found["eta_s"] == pytest.approx(seconds, rel=0.5)


@distributed(1)
def test_a_line_says_what_nothing_knows() -> None:
    booster, model = _boosted()
    meter = booster.meter(model, every=1, bar=False)
    meter.step(0.5, _batch(2), lr=0.1)
    assert meter.line().startswith("loss 0.5000 · learning_rate 1.00e-01 · tokens/s") and "MFU -" in meter.line()


@distributed(1)
def test_shares_of_the_time() -> None:
    booster, model = _boosted()
    now = 0.0
    with patch.object(time, "perf_counter", lambda: now):
        meter = booster.meter(model, bar=False)
        with meter.training():
            now += 3.0
            with meter.generating() as count:
                now += 2.0
                count(20)
        now += 5.0
        figures = meter.measure()
        assert (figures["generating_share"], figures["training_share"]) == (0.2, 0.3)
        assert figures["generated_tokens_per_second"] == 2.0
        now += 1.0
        assert not {"generating_share", "training_share"} & meter.measure().keys()
    with pytest.raises(AttributeError, match=r"Meter has no update; use step\(loss, batch\)"):
        meter.update(1)


@distributed(1)
def test_a_model_that_cannot_be_counted_has_no_utilization() -> None:
    booster = Booster(HybridParallelPlugin())
    meter = booster.meter(booster.boost(torch.nn.Linear(3, 3)), every=1, peak_flops=_PEAK, bar=False)
    meter.step(1.0, {"input": torch.ones(2, 3)})
    assert "mfu" not in meter.figures() and meter.figures()["samples_per_second"] > 0
