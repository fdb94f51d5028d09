"""Random numbers: reproducible, shared where activations are replicated, different where they are sharded.

What breaks here first: a dropout after a row-parallel linear that draws other masks on other ranks (replicated weights
drift apart without any error), or attention that drops the same entries in the heads of every rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import RankReport, boost, train_sharded
from zoo_tests.zoo import FAMILIES

_DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "llama": {"attention_dropout": 0.1},
    "beit": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.5},
    "swinv2": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.5},
    "cpmant": {"dropout_p": 0.1},
    "prophetnet": {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
    "electra": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "ernie": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "distilbert": {"dropout": 0.1, "attention_dropout": 0.1},
    "deberta_v2": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "deberta_v2_convolved": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "albert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
}
_ENCODERS = ("electra", "ernie", "distilbert", "deberta_v2", "deberta_v2_convolved", "albert")


def _modes(family: str) -> tuple[bool, ...]:
    """Without and, where the family knows it, with sequence parallelism."""
    return (False, True) if FAMILIES[family].sequence_parallel else (False,)


def _case(family: str, layout: str, *, sp: bool = False, **options: Any) -> Case:
    zoo_family = FAMILIES[family]
    recipe = Recipe(
        family=family,
        head=zoo_family.main_head,
        precision=zoo_family.precision,
        config=tuple(_DROPOUT[family].items()),
    )
    return Case(recipe=recipe, layout=layout, sequence_parallel=sp, options=tuple(options.items())).shallow()


def _train(case: Case, directory: Path, name: str) -> list[RankReport]:
    (directory / name).mkdir()
    return run_on_ranks(LAYOUTS[case.layout].world_size, train_sharded, case, directory / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "sp"),
    [
        ("bert", "tp2pp2", False),
        ("gpt2", "tp2dp2", True),
        ("llama", "pp2dp2", False),
        pytest.param("gpt2", "pp4", False, marks=pytest.mark.slow),
        pytest.param("bert", "tp4", True, marks=pytest.mark.slow),
    ],
)
def test_the_same_seed_gives_the_same_numbers(family: str, layout: str, sp: bool, tmp_path: Path) -> None:
    case = _case(family, layout, sp=sp)
    first, second = (_train(case, tmp_path, name) for name in ("first", "second"))
    other = _train(_case(family, layout, sp=sp, seed=8), tmp_path, "other")
    assert [report.losses for report in first] == [report.losses for report in second]
    assert [report.checksums for report in first] == [report.checksums for report in second]
    assert first[0].losses != other[0].losses


@pytest.mark.parametrize(
    ("family", "sp"),
    [
        ("bert", False),
        ("gpt2", False),
        ("bert", True),
        ("llama", False),
        pytest.param("beit", False, marks=pytest.mark.slow),
        pytest.param("beit", True, marks=pytest.mark.slow),
        pytest.param("swinv2", False, marks=pytest.mark.slow),
        pytest.param("cpmant", False, marks=pytest.mark.slow),
        pytest.param("prophetnet", False, marks=pytest.mark.slow),
        *[pytest.param(family, sp, marks=pytest.mark.slow) for family in _ENCODERS for sp in _modes(family)],
    ],
)
def test_replicated_activations_are_dropped_alike_on_all_ranks(family: str, sp: bool, tmp_path: Path) -> None:
    """Norms and biases of a row-parallel layer get the same gradient on both ranks, and so does the loss."""
    reports = _train(_case(family, "tp2", sp=sp), tmp_path, "run")
    assert reports[0].losses == reports[1].losses
    for name, value in reports[0].checksums.items():
        assert reports[1].checksums[name] == pytest.approx(value, rel=1e-12), name


def _heads_of_two_ranks(dropout: float) -> tuple[Tensor, Tensor]:
    """[batch, seq, heads * size] of the first attention, on ranks whose heads have equal weights."""
    recipe = Recipe(
        family="bert",
        head="masked_lm",
        config=(("attention_probs_dropout_prob", dropout), ("hidden_dropout_prob", 0.5)),
    )
    case = Case(recipe=recipe, layout="tp2")
    boosted = boost(case)
    attention = boosted.model.unwrap().bert.encoder.layer[0].attention.self
    for projection in (attention.query, attention.key, attention.value):
        for param in projection.parameters():
            dist.broadcast(param.data, 0)
    seen: list[Tensor] = []
    attention.register_forward_hook(lambda module, inputs, output: seen.append(output[0].detach()))
    boosted.booster.execute_pipeline(iter([case.recipe.batch(0)]), boosted.model)
    heads = [torch.empty_like(seen[0]) for _ in range(2)]
    dist.all_gather(heads, seen[0].contiguous())
    return heads[0], heads[1]


def test_heads_are_dropped_differently_on_every_rank() -> None:
    """The same weights and inputs on both ranks: without attention dropout the same heads, with it other ones."""
    for first, second in run_on_ranks(2, _heads_of_two_ranks, 0.0):
        assert torch.equal(first, second), "hidden dropout before the attention is not shared"
    for first, second in run_on_ranks(2, _heads_of_two_ranks, 0.5):
        assert not torch.allclose(first, second)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "sp", "choice"),
    [("tp2", False, "full"), ("tp2", True, "full"), ("tp2pp2", False, "full")]
    + [("tp2", True, "selective"), ("tp2", True, "operators")],
)
def test_recomputation_draws_the_same_masks(layout: str, sp: bool, choice: str, tmp_path: Path) -> None:
    kept = _train(_case("bert", layout, sp=sp), tmp_path, "kept")
    recomputed = _train(_case("bert", layout, sp=sp, gradient_checkpointing=choice), tmp_path, "recomputed")
    assert kept[0].losses == pytest.approx(recomputed[0].losses, rel=1e-12)
    for one, other in zip(kept, recomputed, strict=True):
        assert one.checksums == pytest.approx(other.checksums, rel=1e-9)
