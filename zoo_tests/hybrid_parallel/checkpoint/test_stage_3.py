"""Saves and loads under ZeRO stage 3: the same files as those of stage 1, and no rank gathers parameters for them.

What breaks here first: a slice that goes to another writer, or one that a rank takes from another place of a tensor.
Look in `checkpoint/global_tensor.py`, and `ShardedParameters.slice_on`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from plugins.hybrid_parallel.zero.stage3 import ShardedParameters
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import boost

_SMALL = "200KB"  # so that each replica writes some of the files


def _case(family: str, head: str, layout: str, **recipe: Any) -> Case:
    options = tuple(recipe.pop("options", {}).items())
    return Case(recipe=Recipe(family=family, head=head, optimizer="adamw", **recipe), layout=layout, options=options)


def _gathering_is_refused() -> Any:
    return mock.patch.object(ShardedParameters, "gather", side_effect=AssertionError("gathered"))


def _save_and_load(case: Case, folder: Path) -> None:
    for stage in (1, 3):
        boosted = boost(case.but(zero_stage=stage))
        for dtype in (None, torch.bfloat16):
            boosted.booster.save_model(boosted.model, folder / f"{stage} {dtype}", size_per_shard=_SMALL, dtype=dtype)
    booster, state = boosted.booster, {"model": boosted.model, "optimizer": boosted.optimizer}
    with _gathering_is_refused():
        booster.save_checkpoint(folder / "checkpoint", **state)
        booster.load_model(boosted.model, _changed(folder / "3 None", folder / "other"))
        booster.save_model(boosted.model, folder / "loaded", size_per_shard=_SMALL)
        booster.load_checkpoint(folder / "checkpoint", **state)
        booster.save_model(boosted.model, folder / "restored", size_per_shard=_SMALL)


def _changed(source: Path, target: Path) -> Path:
    """Return a directory of other values under the same names."""
    if dist.get_rank() == 0:
        shutil.copytree(source, target)
        for path in target.glob("*.safetensors"):
            save_file({name: value + 1 for name, value in load_file(path).items()}, path, {"format": "pt"})
    dist.barrier()
    return target


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def _files(folder: Path) -> dict[str, Any]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}


@pytest.mark.parametrize(
    "case",
    [
        _case("llama", "causal_lm", "tp2dp2", config=(("tie_word_embeddings", True),)),
        pytest.param(_case("gpt2", "lm_head", "pp2dp2", precision="bf16"), marks=pytest.mark.slow),
        pytest.param(_case("bert", "masked_lm", "dp4", options={"zero_size": 2}), marks=pytest.mark.slow),
        pytest.param(
            _case("mixtral", "causal_lm", "tp2dp2", precision="fp32", options={"ep_size": 2}), marks=pytest.mark.slow
        ),
        pytest.param(
            _case("qwen3_moe", "causal_lm", "dp4", precision="fp32", options={"ep_size": 2}), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_files_are_those_of_stage_1(case: Case, tmp_path: Path) -> None:
    run_on_ranks(LAYOUTS[case.layout].world_size, _save_and_load, case, tmp_path)
    for dtype in (None, torch.bfloat16):
        files = [_files(tmp_path / f"{stage} {dtype}") for stage in (1, 3)]
        assert len(files[0]) > 1
        assert files[0] == files[1]
    assert _files(tmp_path / "restored") == _files(tmp_path / "3 None")
    expected, found = _tensors(tmp_path / "other"), _tensors(tmp_path / "loaded")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
