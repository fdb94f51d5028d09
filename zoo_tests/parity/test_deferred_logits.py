"""Training whose loss never sees all logits, held to plain training: kinds of heads, layouts, precisions, schedules.

Models of tests are so small that their logits are computed at once; here they are not. What breaks here first: a head
that something besides the loss reads. Look in `shardformer/cross_entropy/fused_linear.py` and `layers/embedding.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import shardformer.loss.text as text
from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.loss.step_loss import ScoresAsked, next_tokens
from shardformer.cross_entropy import fused_linear
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import RankReport, train_sharded


@contextmanager
def _always_deferring(taken: list[bool]) -> Iterator[None]:
    """All heads defer, to chunks of five tokens; `taken` gets whether each loss found its logits unread."""
    before = fused_linear.saves_memory, fused_linear.rows_of_chunk, text.loss_of

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor | None:
        loss = before[-1](logits, labels)
        taken.append(loss is not None)
        return loss

    fused_linear.saves_memory, text.loss_of = lambda call: True, loss_of
    fused_linear.rows_of_chunk = lambda columns, device: 5
    try:
        yield
    finally:
        fused_linear.saves_memory, fused_linear.rows_of_chunk, text.loss_of = before


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


# ----- log-probabilities -----

_SIZES: dict[str, Any] = {
    **{"vocab_size": 271, "hidden_size": 24, "intermediate_size": 34, "num_hidden_layers": 2, "head_dim": 6},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0},
}
_TEMPERATURE = 0.7
_SCORED = {
    "tp2, capped logits": ("gemma2", "labels", 2, {"tp_size": 2}),
    "tp2pp2": ("llama", "texts", 4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}),
    "cp2": ("llama", "labels", 2, {"cp_size": 2}),
    "pp2, packed": ("llama", "packed", 2, {"pp_size": 2, "num_microbatches": 2}),
    "dp2, stage 3": ("llama", "labels", 2, {"zero_stage": 3}),
    "reproducible": ("llama", "texts", 2, {"tp_size": 2, "reproducible": True}),
}


def _model_and_batch(family: str, kind: str, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor], Tensor]:
    """Return a model, a batch, and the labels of its next tokens, [batch, seq - 1]."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **_SIZES)).to(dtype)
    if kind == "packed":
        positions = torch.cat([torch.arange(length) for length in (7, 9, 3, 11)])[None]
        ids = torch.randint(2, 271, positions.shape)
        return model, {"input_ids": ids, "position_ids": positions}, ids.masked_fill(positions == 0, -100)[:, 1:]
    ids = torch.randint(2, 271, (6, 13))
    mask = (torch.arange(13) < torch.tensor([13, 4, 9, 12, 2, 7])[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask}
    if kind == "labels":
        labels[:, :3] = -100
        batch["labels"] = labels
    return model, batch, labels[:, 1:]


def _loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
    """Return a sum with other gradients for each token and field."""
    return (log_probs.sin() * 1.3).sum() + (entropy.cos() * 0.9).sum()


def differences_of_scores(family: str, kind: str, options: dict[str, Any]) -> list[float]:
    """Worst differences from plain logits: of log-probabilities, of entropies, and of weights after a step."""
    dtype = torch.float32 if "reproducible" in options else torch.float64
    plain, batch, labels = _model_and_batch(family, kind, dtype)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    scores = (plain(**inputs, use_cache=False).logits[:, :-1] / _TEMPERATURE).log_softmax(-1)
    expected = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0], -(scores.exp() * scores).sum(-1)
    expected = tuple(each * (labels != -100) for each in expected)
    (_loss(*expected) / len(batch["input_ids"])).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    model = _model_and_batch(family, kind, dtype)[0]
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    size, rank = booster.plugin.dp_size, booster.plugin.dp_rank

    def share(value: Tensor) -> Tensor:
        return value.tensor_split(size)[rank]

    with _always_deferring([]):
        found = model.token_log_probs({name: share(value) for name, value in batch.items()}, _TEMPERATURE)
        if "reproducible" not in options:  # which takes the loss of the model alone
            booster.backward((_loss(*found), len(found.log_probs)), optimizer)
            optimizer.step()
    gaps = [(one.cpu() - share(other)).abs().max().item() for one, other in zip(found, expected, strict=True)]
    whole = dict(booster.weights(model))
    trained = plain.state_dict() if "reproducible" not in options else {}
    return [
        *gaps,
        *((each.cpu() - trained[name]).abs().max().item() for name, each in whole.items() if name in trained),
    ]


@pytest.mark.parametrize(
    "name", ["tp2pp2", *(pytest.param(each, marks=pytest.mark.slow) for each in list(_SCORED) if each != "tp2pp2")]
)
def test_log_probabilities_without_logits_are_those_of_logits(name: str) -> None:
    family, kind, ranks, options = _SCORED[name]
    for gaps in run_on_ranks(ranks, differences_of_scores, family, kind, options):
        assert max(gaps) < (1e-5 if "reproducible" in options else 1e-12)


_IDS = torch.arange(8).view(2, 4)


@pytest.mark.parametrize("shape", [(2, 3), (1, 4)])
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_other_tokens_are_refused(name: str, shape: tuple[int, int]) -> None:
    batch = {"input_ids": _IDS, name: torch.ones(shape, dtype=torch.long)}
    with pytest.raises(ConfigurationError, match=r"gets labels of shape .* for input_ids of shape \(2, 4\); give each"):
        next_tokens(batch, None)


@pytest.mark.parametrize("temperature", [0, -0.5, float("nan"), "1", None, torch.ones(2)])
def test_a_temperature_that_is_no_number_above_0_is_refused(temperature: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"temperature=.* divides the logits; use a number above 0"):
        ScoresAsked(temperature=temperature)
