"""Offload of optimizer states and parameters: bit by bit the numbers of the same run without.

What breaks here first: a state that the optimizer makes and that is lost on its way to the file
(`plugins/hybrid_parallel/zero/user_optimizer.py`), and something that a step counts once for every part
(`step.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import RankReport, train_sharded

_HEADS = {"bert": "masked_lm", "llama": "causal_lm", "gpt2": "lm_head"}


def _case(family: str, layout: str, stage: int, **recipe: Any) -> Case:
    options = recipe.pop("options", {})
    loop = recipe.pop("loop", False)
    return Case(
        recipe=Recipe(family=family, head=_HEADS[family], steps=3, **recipe),
        layout=layout,
        zero_stage=stage,
        ordinary_loop=loop,
        options=tuple(options.items()),
    )


def _offloaded(case: Case, directory: Path) -> Case:
    places = {"offload_optimizer": str(directory)}
    if case.zero_stage == 3:
        places["offload_parameters"] = str(directory)
    return case.but(options=(*case.options, *places.items()))


def _cases() -> list:
    fast = [
        _case("llama", "dp2", 3, rows=7, max_norm=0.05, optimizer="adamw", options={"num_microbatches": 3}),
        _case("bert", "single", 3, optimizer="adamw", precision="bf16", max_norm=0.05),
        _case("gpt2", "dp2", 2, optimizer="adamw", precision="bf16", options={"num_microbatches": 3}),
    ]
    slow = [
        _case("bert", "dp2", 0, optimizer="momentum", max_norm=0.05, loop=True),
        _case("bert", "single", 1, optimizer="adamw", precision="fp16", max_norm=0.05),
        _case("llama", "tp2dp2", 1, optimizer="adamw", precision="bf16", max_norm=0.05),
        _case("gpt2", "pp2dp2", 3, optimizer="adamw", precision="bf16", max_norm=0.05),
        _case("gpt2", "pp2dp2", 2, optimizer="momentum", options={"pp_style": "interleaved", "num_microbatches": 4}),
        _case("llama", "tp2dp2", 3, optimizer="lamb", loop=True),
        _case("llama", "dp2", 3, adapters=("q_proj", "v_proj"), optimizer="adamw"),
        _case("bert", "dp4", 3, optimizer="adamw", options={"zero_size": 2}, max_norm=0.05),
    ]
    return [
        *(pytest.param(case, id=str(case)) for case in fast),
        *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in slow),
    ]


def _train(case: Case, directory: Path) -> list[RankReport]:
    directory.mkdir()
    return run_on_ranks(case.sizes.world_size, train_sharded, case, directory)


@pytest.mark.parametrize("case", _cases())
def test_bits_equal_those_without(case: Case, tmp_path: Path) -> None:
    plain = _train(case, tmp_path / "plain")
    offloaded = _train(_offloaded(case, tmp_path / "states"), tmp_path / "offloaded")
    assert [report.losses for report in offloaded] == [report.losses for report in plain]
    assert [report.grad_norms for report in offloaded] == [report.grad_norms for report in plain]
    for file in (tmp_path / "plain" / "model").glob("*.safetensors"):
        expected, found = load_file(file), load_file(tmp_path / "offloaded" / "model" / file.name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not list((tmp_path / "states").iterdir())  # files have no names
