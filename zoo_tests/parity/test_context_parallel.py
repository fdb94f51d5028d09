"""Ranks that share every sequence train like plain training: by ring attention, and by exchanging heads.

What breaks here first: a chunk that meets the wrong chunk, padding that real tokens see, positions counted from the
start of a part, labels beside the wrong token, and a loss that every rank of the axis counts once more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import RankError
from zoo_tests.zoo import FAMILIES

_EXCHANGE = {"sequence_parallelism_mode": "all_to_all"}


def _case(
    family: str,
    layout: str,
    head: str | None = None,
    config: dict[str, Any] | None = None,
    ordinary_loop: bool = False,
    precision: str | None = None,
    **options: Any,
) -> Case:
    members = FAMILIES[family]
    recipe = Recipe(
        family=family,
        head=head or members.main_head,
        precision=precision or members.precision,
        config=tuple((config or {}).items()),
        max_norm=0.05,
        optimizer="momentum",
    )
    return Case(recipe=recipe, layout=layout, options=tuple(options.items()), ordinary_loop=ordinary_loop)


FAST = [
    _case("llama", "cp2"),
    _case("llama", "cp2tp2", enable_sequence_parallelism=True),
    _case("gpt2", "cp2pp2"),
    _case("olmo2", "cp2tp2", config={"num_hidden_layers": 2}),
    # Linear attention on whole sequences, whose layers are computed again with the mask of their own micro-batch.
    _case("qwen3_next", "cp2pp2", head="sequence", gradient_checkpointing="full"),
    # A name of a kernel that is registered twice, and of a kernel of this package.
    _case("llama", "cp2tp2", enable_flash_attention=True),
    # Inside of layers alone: two sequences that meet in cross-attention, and a bias of the whole ones.
    _case("t5", "cp2tp2", **_EXCHANGE),
]
SLOW = [
    _case("bert", "cp2", head="sequence"),
    _case("bert", "cp2dp2", **_EXCHANGE),
    _case("llama", "cp4"),
    _case("llama", "cp3"),
    _case("llama", "cp2", ordinary_loop=True),
    _case("llama", "cp2dp2", zero_stage=0),
    _case("llama", "cp2pp2", gradient_checkpointing="full"),
    _case("llama", "cp2", gradient_checkpointing="selective"),
    _case("llama", "cp2pp2", head="sequence", gradient_checkpointing="full"),
    _case("llama", "cp2pp2", pp_style="zero_bubble"),
    _case("llama", "cp2pp2", pp_style="interleaved"),
    _case("llama", "cp2pp2", **_EXCHANGE),
    _case("llama", "cp4", **_EXCHANGE),
    _case("llama", "cp2tp2", head="question_answering"),
    # In fp32: eager attention computes its softmax in fp32, where the mask's value for fp64 is infinite.
    _case("llama", "cp2tp2", config={"attn_implementation": "eager"}, precision="fp32", **_EXCHANGE),
    _case("llama", "cp2", enable_flash_attention=True, **_EXCHANGE),
    # Its rows of padding, which see nothing, read all tokens with equal weights.
    _case("llama", "cp2tp2", config={"attn_implementation": "eager"}, precision="fp32"),
    _case("llama", "cp2", precision="bf16"),
    _case("mistral", "cp2"),
    _case("mistral", "cp2", **_EXCHANGE),
    _case("qwen2", "cp2tp2"),
    _case("qwen3", "cp2tp2"),
    _case("gpt2", "cp2tp2"),
    _case("gpt2", "cp2pp2", head="sequence"),
    _case("gpt2", "cp2", head="question_answering"),
    _case("opt", "cp2"),
    _case("opt", "cp2pp2", head="sequence"),
    _case("bert", "cp3"),
    _case("bert", "cp2", head="pretraining"),
    _case("bert", "cp2pp2", head="token"),
    _case("roberta", "cp2"),
    _case("roberta", "cp2pp2"),
    _case("electra", "cp2tp2"),
    _case("albert", "cp2pp2"),
    _case("albert", "cp2", head="sequence"),
    _case("distilbert", "cp2"),
    _case("chatglm2", "cp2"),
    _case("gemma3", "cp2"),
    _case("phi3", "cp2tp2"),
    _case("glm4", "cp2"),
    _case("mixtral", "cp2"),
    _case("qwen3_moe", "cp2tp2"),
    _case("qwen3_next", "cp2tp2"),
    _case("qwen3_next", "cp3", head="token"),
    _case("qwen3_next", "cp2", ordinary_loop=True, **_EXCHANGE),
    _case("bart", "cp2pp2", **_EXCHANGE),
    _case("bart", "cp2", gradient_checkpointing="full", **_EXCHANGE),
    _case("umt5", "cp2", head="sequence", **_EXCHANGE),
    _case("mt5", "cp2", ordinary_loop=True, **_EXCHANGE),
    _case("mvp", "cp2dp2", **_EXCHANGE),
    _case("whisper", "cp2pp2", **_EXCHANGE),
    _case("bloom", "cp2tp2", **_EXCHANGE),
    _case("gemma2", "cp2", **_EXCHANGE),
    _case("clip_towers", "cp2", **_EXCHANGE),
    _case("blip_2_t5", "cp2", **_EXCHANGE),
    _case("beit", "cp2tp2", **_EXCHANGE),
    _case("vit", "cp4", **_EXCHANGE),
    _case("layoutlm", "cp2pp2", **_EXCHANGE),
]


def _parameters() -> list:
    fast = [pytest.param(case, id=str(case)) for case in FAST]
    return fast + [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize("case", _parameters())
def test_shared_sequences_train_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("t5", "has other layers than one list of them"),
        pytest.param("vit", "takes no position_ids", marks=pytest.mark.slow),
        ("bloom", "attention does not go through transformers' registry alone"),
        pytest.param("gemma2", "attention scores are soft-capped", marks=pytest.mark.slow),
        pytest.param("clip_text", "tokens meet outside of attention", marks=pytest.mark.slow),
        pytest.param("layoutlm", "does not make its masks by transformers' functions", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_share_sequences_is_refused(family: str, reason: str, tmp_path: Path) -> None:
    sentence = f"cp_size=2 cannot share the sequences of .*{reason}; use sequence_parallelism_mode='all_to_all', or"
    with pytest.raises(RankError, match=sentence):
        check_case(_case(family, "cp2"), tmp_path)


def test_slices_of_token_mixers_are_not_shared_once_more(tmp_path: Path) -> None:
    sentence = "cp_size=2 and enable_sequence_parallelism=True both share the layers of Qwen3NextForCausalLM"
    with pytest.raises(RankError, match=sentence):
        check_case(_case("qwen3_next", "cp2tp2", enable_sequence_parallelism=True), tmp_path)


def test_windows_are_refused_however_sequences_are_shared(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="has other layers than one list of them; use cp_size=1"):
        check_case(_case("swin", "cp2", **_EXCHANGE), tmp_path)


@pytest.mark.parametrize(("family", "way_out"), [("llama", "'ring_attn'"), ("t5", "cp_size=1")])
def test_heads_that_cannot_be_exchanged_are_refused(family: str, way_out: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=f"shares 4 heads .* out over cp_size=3 ranks, .*; use {way_out}, or"):
        check_case(_case(family, "cp3", **_EXCHANGE), tmp_path)


def test_layers_that_are_skipped_at_random_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="decoder_layerdrop=0.1 skips layers at random, other ones on each rank of"):
        check_case(_case("bart", "cp2", config={"decoder_layerdrop": 0.1}, **_EXCHANGE), tmp_path)
