"""What `booster inspect` says that ranks hold is what ranks hold.

What breaks here first: something in the sharder that asks for values, or for a device. Look in
`plugins/hybrid_parallel/shard_report.py`.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from plugins.hybrid_parallel import HybridParallelConfig
from plugins.hybrid_parallel.shard_report import page, shard_report, to_text
from zoo_tests.booster.cli.test_commands import outcome
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import boost

Shapes = dict[str, tuple[tuple[int, ...], str]]


def _held(case: Case) -> Shapes:
    parameters = boost(case).model.unwrap().named_parameters()
    return {name: (tuple(param.shape), str(param.dtype)) for name, param in parameters}


@pytest.mark.parametrize(
    ("family", "head", "layout", "options"),
    [
        ("bert", "masked_lm", "tp2pp2", {}),
        ("gpt2", "lm_head", "tp2pp2", {"pp_style": "zbv", "num_microbatches": 4, "precision": "bf16"}),
        ("llama", "causal_lm", "tp4", {"sharding_dim": -1}),
        pytest.param("t5", "generation", "tp2pp2", {"pp_style": "interleaved"}, marks=pytest.mark.slow),
        pytest.param("llama", "causal_lm", "tp2dp2", {}, marks=pytest.mark.slow),
        pytest.param("vit", "image", "pp4", {}, marks=pytest.mark.slow),
    ],
)
def test_played_ranks_hold_what_real_ones_do(family: str, head: str, layout: str, options: dict[str, Any]) -> None:
    precision = options.get("precision", "fp64")
    case = Case(
        recipe=Recipe(family=family, head=head, precision=precision), layout=layout, options=tuple(options.items())
    )
    real: list[Shapes] = run_on_ranks(case.sizes.world_size, _held, case)
    config = HybridParallelConfig.from_options(**{**case.plugin_options, "dp_size": None})
    played = shard_report(case.recipe.model, config, case.sizes.world_size)
    assert not dist.is_initialized()
    assert len(played) == case.sizes.tp_size * case.sizes.pp_size
    for each in played:
        assert {piece.name: (piece.shape, str(piece.dtype)) for piece in each.pieces} == real[each.rank]
        assert all(piece.full_shape == piece.shape or piece.dim is not None for piece in each.pieces)


def test_layers_that_are_alike_stand_together() -> None:
    case = Case(recipe=Recipe(family="bert", head="masked_lm"), layout="tp2pp2")
    text = to_text(shard_report(case.recipe.model, HybridParallelConfig.from_options(tp_size=2, pp_size=2), 4))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert sum("attention.self.query.weight" in line for line in lines) == 2  # one a stage
    assert any(re.match(r"bert\.encoder\.layer\.\[0-\d\]\.output\.dense\.weight stage 0: ", line) for line in lines)
    assert lines[-1].startswith("rank 3 (stage 1, tp 1): ")


class Cells(HTMLParser):
    """Rows of a table; every tag that is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_the_page_has_a_cell_for_each_rank() -> None:
    case = Case(recipe=Recipe(family="gpt2", head="lm_head"), layout="tp2pp2")
    ranks = shard_report(case.recipe.model, HybridParallelConfig.from_options(tp_size=2, pp_size=2), 4)
    cells = Cells()
    cells.feed(page(ranks, "a < b"))
    assert not cells.open
    assert {len(row) for row in cells.rows} == {6}
    by_name = {row[0]: row[1:] for row in cells.rows}
    assert by_name["transformer.ln_f.weight"][1:3] == ["·", "·"] and "whole" in by_name["transformer.ln_f.weight"][3]
    whole, *shares = by_name["transformer.wte.weight"]
    assert int(whole.split()[0]) <= 2 * int(shares[0].split()[0]) and "dim 0" in shares[0]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = Recipe(family="gpt2", head="lm_head").model()
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(tmp_path)
    code, out, err = outcome(capsys, "inspect", str(tmp_path), "--tp", "2", "--precision", "bf16")
    assert (code, err) == (0, "")
    assert "transformer.wte.weight" in out and "rank 1 (stage 0, tp 1)" in out
    code, _, _ = outcome(capsys, "inspect", str(tmp_path), "--html", str(tmp_path / "page.html"))
    assert code == 0 and (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    code, bare, _ = outcome(capsys, "inspect", str(tmp_path / "config.json"), "--head", "GPT2Model", "--pp", "2")
    assert code == 0 and "\nwte.weight" in bare
    for arguments, sentence in (
        (["--tp", "3"], "tp_size=3 does not divide num_attention_heads="),
        (["--head", "GPT3"], "transformers has no model class 'GPT3'; give one with --head, as BertForMaskedLM"),
        (["--pp", "99"], "pp_size=99 is larger than the model's"),
    ):
        code, _, err = outcome(capsys, "inspect", str(tmp_path), *arguments)
        assert code == 2 and err.startswith(f"error: {sentence}") and err.count("\n") == 1
    for name in ("nowhere", str(tmp_path / "no.json"), str(tmp_path.parent)):
        code, _, err = outcome(capsys, "inspect", name)
        assert code == 2 and err.startswith("error: ") and err.endswith("or a config.json\n") and err.count("\n") == 1
