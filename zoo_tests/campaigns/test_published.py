"""Published configurations: a sample trains exactly, and the page of the documentation has all.

What breaks here first: a twin that loses what a checkpoint has. Look at `small_config`, which `booster verify` uses.
"""

from __future__ import annotations

import re

import pytest

from zoo_tests.campaigns.census.verdict import EXACT, kind_of
from zoo_tests.campaigns.published import LAYOUTS, judge, judge_on_eight, plain_of, published
from zoo_tests.docs.pages import REPOSITORY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        *[(each, "tp2 pp2 dp2") for each in ("Phi-4-mini", "GPT-OSS 20B", "OPT 350m", "Kimi K2")],
        ("Granite 4.0-H Tiny", "tp2 pp2 dp2"),
        ("Gemma 4 26B-A4B", "sp2"),  # a layer calls its router and experts with flattened tokens
        ("DINOv3 ViT-L", "tp2 dp2"),  # it has no loss, and draws numbers
        ("Qwen3.5 9B", "cp2"),  # its recurrence is in fp32, also in fp64
        ("ResNet 50", "dp2"),  # its batch norms see a replica's rows
    ],
)
def test_a_published_configuration_trains_like_plain_training(name: str, layouts: str) -> None:
    wanted = {layout: LAYOUTS[layout] for layout in layouts.split()}
    assert set(judge(published()[name], wanted).values()) == {EXACT}


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["GPT-OSS 20B", "Wav2Vec2 base"])
def test_a_published_configuration_trains_on_eight_ranks(name: str) -> None:
    assert {EXACT} <= {kind_of(verdict) for verdict in judge_on_eight(name).values()} <= {EXACT, "refused"}


def test_a_twin_keeps_what_is_published() -> None:
    _, plain = plain_of(published()["Gemma 2 27B"])
    config = plain.case.tiny_model.config
    assert config.final_logit_softcapping == 30.0 and config.query_pre_attn_scalar == 144
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert config.intermediate_size == 8 * config.hidden_size and config.sliding_window < 11


def test_the_page_names_each_checkpoint() -> None:
    page = (REPOSITORY / "docs" / "results" / "published.md").read_text("utf-8")
    rows = set(re.findall(r"^\| (.+?) \| `", page, re.MULTILINE))
    untried = re.findall(r"not trained yet: (.*)\.$", page, re.MULTILINE)
    assert rows | set(", ".join(untried).split(", ")) - {""} == published().keys()
