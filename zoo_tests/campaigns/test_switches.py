"""Switches of configurations that once gave other numbers, or failed, under an axis.

What breaks here first: a part of a layer that the tiny model of a family does not have by default. Look in the plan of
the family. `python -m zoo_tests.campaigns.switches` turns every switch of every family.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plugins.hybrid_parallel.setup import model as setup
from zoo_tests.campaigns.census.classes import HeadClass
from zoo_tests.campaigns.census.trained import PlainRun, plain_run, sharded_verdict
from zoo_tests.campaigns.census.verdict import EXACT, kind_of
from zoo_tests.campaigns.switches import Switch, judge, source_of, subject_of, switches_of
from zoo_tests.campaigns.switches_page import page, read_kept, with_rows
from zoo_tests.harness.ranks import run_on_ranks

_CASES = [
    ("olmoe", "OlmoeForCausalLM", Switch(("clip_qkv",), 0.1), "tp2"),  # in place
    ("axk1", "AXK1ForCausalLM", Switch(("n_shared_experts",), 0), "tp2"),  # layers of no features
    ("deberta", "DebertaForMaskedLM", Switch(("talking_head",), True), "tp2"),
    ("deberta", "DebertaForMaskedLM", Switch(("legacy",), False), "tp2pp2"),  # the head reads the embedding
    ("diffllama", "DiffLlamaForCausalLM", Switch(("num_key_value_heads",), 2), "tp2"),  # in pairs
    ("lfm2_moe", "Lfm2MoeForCausalLM", Switch(("conv_bias",), False), "tp2"),
    ("inkling", "InklingForCausalLM", Switch(("swa_num_key_value_heads",), 1), "tp2"),  # keys that are convolved
    ("detr", "DetrForObjectDetection", Switch(("position_embedding_type",), "learned"), "pp2"),
    ("falcon", "FalconForCausalLM", Switch(("alibi",), True), "sp2-ulysses"),  # rows that see no key, of one key head
    ("gemma4", "Gemma4ForCausalLM", Switch(("enable_moe_block",), True), "sp2"),  # rounds: judged in fp64
    ("idefics", "IdeficsForVisionText2Text", Switch(("use_resampler",), True), "pp2"),  # a part in front of the layers
    ("molmo2", "Molmo2ForConditionalGeneration", Switch(("text_config", "qk_norm_type"), "olmo"), "tp2"),
    ("neomme", "NeoMMEForMaskedLM", Switch(("num_key_value_heads",), 1), "tp2"),  # copied, also for the values' table
    ("wav2vec2_bert", "Wav2Vec2BertForCTC", Switch(("position_embeddings_type",), "rotary"), "tp2"),  # whole states
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "switch", "layout"), [pytest.param(*each, id=f"{each[1]}-{each[2]}") for each in _CASES]
)
def test_a_switch_trains_like_plain_training(family: str, name: str, switch: Switch, layout: str) -> None:
    found = subject_of(family, [HeadClass(family, name)])
    assert found is not None and switch in switches_of(found[1].case.tiny_model.config, source_of(found[0]))
    assert judge(found[1], found[0], switch, [layout]) == {layout: EXACT}


_CUT, _MEET = "cannot be cut into pipeline stages", "does not tell where its tokens meet"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "switch", "layout", "said"),
    [
        ("dpt", "DPTForDepthEstimation", Switch(("readout_type",), "add"), "pp2", _CUT),  # lacks a list of layers
        ("detr", "DetrForObjectDetection", Switch(("auxiliary_loss",), True), "sp2", _MEET),  # stacks outputs of layers
        ("hubert", "HubertForSequenceClassification", Switch(("use_weighted_layer_sum",), True), "pp2", _CUT),
        ("moshi", "MoshiForCausalLM", Switch(("num_key_value_heads",), 1), "tp2", "does not divide the 1 heads"),
    ],
)
def test_what_another_configuration_cannot_do_is_refused(
    family: str, name: str, switch: Switch, layout: str, said: str
) -> None:
    found = subject_of(family, [HeadClass(family, name)])
    assert found is not None
    assert said in (judge(found[1], found[0], switch, [layout]) or {})[layout]


def test_the_page_counts_what_was_kept_and_a_family_that_is_tried_again_once() -> None:
    reason = "booster.errors.ConfigurationError: {0} has one head; use 1; and more of…"
    rows = [("a/A", f"x={x}", {"tp2": EXACT, "cp2": reason.format("A")}) for x in "12"]
    rows += [("a/A", "y=1", {"plain": "ValueError: y"}), ("a/A", "z=1", None), ("a/A", "", {}), ("b/B", "x=1", {})]
    kept = with_rows(with_rows({}, rows, together=False), rows, together=False)
    kept = with_rows(kept, [("a/A", "x=1 & y=2", {"tp2": "loss differs"}), ("a/A", "together", {})], together=True)
    text = page(kept)
    assert "2 switches of 1 families; 1 others do not train plainly." in text
    assert "| a | A | 2 of 3, 1 other | 0 of 2 |" in text
    assert "- the class has one head; use 1 (2 under cp2): A\n" in text


def test_the_page_is_that_of_what_is_kept() -> None:
    assert page(read_kept()) == (Path(__file__).parents[2] / "docs/results/switches.md").read_text(encoding="utf-8")


def test_threads_tell_what_processes_tell_and_a_refusal_ends_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    head = HeadClass("codegen", "CodeGenForCausalLM")
    plain = plain_run(head)
    assert isinstance(plain, PlainRun)
    processes = run_on_ranks(2, os.getpid)
    verdicts = [
        [sharded_verdict(head, layout, plain, on_threads=on_threads) for layout in ("cp2", "sp2")]
        for on_threads in (False, True)
    ]
    assert verdicts[0] == verdicts[1] and [kind_of(each) for each in verdicts[0]] == ["refused", EXACT]
    assert run_on_ranks(2, os.getpid) == processes
    # What fails, or trains otherwise, is told of threads too.
    monkeypatch.setattr(setup, "count_own_targets", lambda model: 1 / 0)
    assert sharded_verdict(head, "sp2", plain, on_threads=True) == "ZeroDivisionError: division by zero"
