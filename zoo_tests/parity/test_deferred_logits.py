"""Training whose loss never sees all logits, held to plain training: kinds of heads, layouts, precisions, schedules.

Models of tests are so small that their logits are computed at once; here they are not. What breaks here first: a head
that something besides the loss reads. Look in `shardformer/cross_entropy/deferred_logits.py` and `layers/lm_head.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import shardformer.cross_entropy.deferred_logits as deferred_logits
import shardformer.loss.text as text
from shardformer.cross_entropy import chunking
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.train_sharded import RankReport, train_sharded


@contextmanager
def _always_deferring(taken: list[bool]) -> Iterator[None]:
    """All heads defer, to chunks of five tokens; `taken` gets whether each loss found its logits unread."""
    before = deferred_logits.saves_memory, chunking.chunk_rows, text.loss_of

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor | None:
        loss = before[-1](logits, labels)
        taken.append(loss is not None)
        return loss

    deferred_logits.saves_memory, text.loss_of = lambda call: True, loss_of
    chunking.chunk_rows = lambda columns, device: 5
    try:
        yield
    finally:
        deferred_logits.saves_memory, chunking.chunk_rows, text.loss_of = before


def train_deferring(case: Case, directory: Path) -> RankReport:
    """All losses come from hidden states."""
    taken: list[bool] = []
    with _always_deferring(taken):
        report = train_sharded(case, directory)
    assert all(taken)
    return report


def train_reading(case: Case, directory: Path) -> RankReport:
    """The model reads its logits, so that no loss does."""
    taken: list[bool] = []
    with _always_deferring(taken):
        report = train_sharded(case, directory)
    assert not any(taken)
    return report


def _case(family: str, head: str, layout: str, **options: Any) -> Case:
    named = {
        key: options.pop(key) for key in ("precision", "steps", "frozen", "adapters", "optimizer") if key in options
    }
    config = tuple(options.pop("config", {}).items())
    sequence_parallel = options.pop("sp", False)
    recipe = Recipe(family=family, head=head, config=config, **named)
    return Case(recipe=recipe, layout=layout, options=tuple(options.items()), sequence_parallel=sequence_parallel)


_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}

DEFERRING = [
    _case("bert", "masked_lm", "tp2"),
    _case("llama", "causal_lm", "tp2pp2", sp=True, config=_TIED),
]
SLOW = [
    _case("gpt2", "lm_head", "pp2dp2"),
    _case("llama", "causal_lm", "tp2", precision="fp16", steps=3),
    _case("llama", "causal_lm", "pp2", pp_style="zero_bubble", num_microbatches=4, config=_UNTIED),
    _case("bert", "masked_lm", "single"),
    _case("bert", "pretraining", "tp2pp2"),
    _case("llama", "causal_lm", "tp4", sp=True, config=_UNTIED),
    _case("llama", "causal_lm", "tp2", precision="bf16"),
    _case("llama", "causal_lm", "pp2", pp_style="gpipe", config=_TIED),
    _case("gpt2", "lm_head", "tp2pp2", pp_style="interleaved", num_microbatches=4),
    _case("gpt2", "lm_head", "tp2", frozen=("transformer.wte",)),
    _case("llama", "causal_lm", "tp2", adapters=("q_proj", "v_proj")),
    _case("t5", "generation", "tp2pp2"),
    _case("opt", "causal_lm", "tp2"),
    _case("llama", "causal_lm", "cp2tp2"),
]
READING = [
    _case("gemma2", "causal_lm", "tp2", precision="fp32"),
    _case("llama", "causal_lm", "tp2", debug=True),
]


@pytest.mark.parametrize("case", [*DEFERRING, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_the_loss_is_that_of_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path, train=train_deferring)


@pytest.mark.slow
@pytest.mark.parametrize("case", READING, ids=str)
def test_logits_that_are_read_are_those_of_plain_training(case: Case, tmp_path: Path) -> None:
    """Gemma2 caps its logits, and debug mode looks at what each module returns."""
    check_case(case, tmp_path, train=train_reading)
