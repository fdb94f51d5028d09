"""Every layout opens every other's checkpoint: 56 ordered pairs, compared bit by bit, and trained on; a sample here.

What breaks here first: pieces of fused, padded or tied parameters under ZeRO. Look in
`plugins/hybrid_parallel/checkpoint/global_tensor.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plugins.hybrid_parallel.checkpoint.tensor_file import Manifest
from shardformer.lazy.weight_files import open_tensors
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import Boosted, boost

_LAYOUTS = ("single", "dp2", "tp2", "pp2", "tp2pp2", "tp2dp2", "pp2dp2", "dp4")
_STEPS, _MORE = 2, 2
# A vocabulary that tp has to pad; a fused projection and a weight tied over stages; two stacks and a shared embedding.
_FAMILIES = {"bert": "masked_lm", "gpt2": "lm_head", "t5": "generation"}


def _recipe(family: str, precision: str) -> Recipe:
    return Recipe(family=family, head=_FAMILIES[family], optimizer="adamw", precision=precision)


def _state(boosted: Boosted) -> dict[str, Any]:
    return {"model": boosted.model, "optimizer": boosted.optimizer, "lr_scheduler": boosted.scheduler}


def _steps(boosted: Boosted, recipe: Recipe, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(boosted.pipeline_backward(boosted.share(recipe.batch(step))).item())
        boosted.finish_step()
    return losses


def _save(case: Case, folder: Path) -> list[float]:
    """Train, save, train on; the losses behind the checkpoint."""
    boosted = boost(case)
    _steps(boosted, case.recipe, range(_STEPS))
    boosted.booster.save_checkpoint(folder / case.layout, **_state(boosted), layout=case.layout)
    return _steps(boosted, case.recipe, range(_STEPS, _STEPS + _MORE))


def _open_all(case: Case, folder: Path, sources: tuple[str, ...]) -> dict[str, list[float]]:
    """Open the checkpoints of other layouts here, save them again, train on; source -> the losses behind it."""
    boosted, losses = boost(case), {}
    for source in sources:
        extra = boosted.booster.load_checkpoint(folder / source, **_state(boosted))
        assert extra == {"layout": source} and boosted.optimizer.num_steps == _STEPS
        boosted.booster.save_checkpoint(folder / f"{source}-{case.layout}", **_state(boosted))
        losses[source] = _steps(boosted, case.recipe, range(_STEPS, _STEPS + _MORE))
    return losses


def reassembled(directory: Path) -> dict[str, Tensor]:
    """The whole tensors of model and optimizer, put together chunk by chunk; every element is in exactly one."""
    manifest, whole = Manifest.read(directory / "manifest.json"), {}
    for name, saved in manifest.tensors.items():
        if name.startswith("random/"):
            continue
        whole[name] = torch.zeros(saved.shape, dtype=saved.torch_dtype)
        assert sum(math.prod(chunk.sizes) for chunk in saved.chunks) == whole[name].numel(), name
        for chunk in saved.chunks:
            with open_tensors(directory / chunk.file) as file:
                place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
                whole[name][place] = file.get_tensor(chunk.key(name))
    return whole


def _numbers(directory: Path) -> dict[str, Any]:
    return Manifest.read(directory / "manifest.json").state["optimizer"]


_SAVED: dict[Case, list[float]] = {}
_folder: dict[tuple[str, str], Path] = {}


def _saved(cases: list[Case], factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """A folder with the checkpoints of the cases, and the losses of the runs that went on."""
    recipe = cases[0].recipe
    name = (recipe.family, recipe.precision)
    if name not in _folder:
        _folder[name] = factory.mktemp("-".join(name))
    for case in cases:
        if case not in _SAVED:
            _SAVED[case] = run_on_ranks(case.sizes.world_size, _save, case, _folder[name])[0]
    return _folder[name], {case.layout: _SAVED[case] for case in cases}


def _marked() -> list[Any]:
    """All layouts open all others in the campaign; in the suite two of them open those of other axes."""
    runs = [("bert", "fp32"), ("gpt2", "fp32"), ("t5", "fp32"), ("gpt2", "bf16")]
    everything = [
        pytest.param(*run, layout, _LAYOUTS, marks=pytest.mark.campaign) for run in runs for layout in _LAYOUTS
    ]
    sample = [
        ("bert", "fp32", "tp2pp2", ("single", "tp2dp2", "tp2pp2")),
        ("gpt2", "bf16", "tp2dp2", ("pp2", "dp4", "tp2dp2")),
    ]
    return [pytest.param(*each, marks=pytest.mark.slow) for each in sample] + everything


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision", "layout", "sources"), _marked())
def test_all_layouts_open_all_others(
    family: str, precision: str, layout: str, sources: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    recipe = _recipe(family, precision)
    cases = {source: Case(recipe=recipe, layout=source) for source in sources}
    folder, uninterrupted = _saved(list(cases.values()), tmp_path_factory)
    case = cases[layout]
    losses = run_on_ranks(case.sizes.world_size, _open_all, case, folder, sources)[0]
    assert losses[layout] == uninterrupted[layout], "the very same bits"
    for source in sources:
        before, after = reassembled(folder / source), reassembled(folder / f"{source}-{layout}")
        assert before.keys() == after.keys(), source
        for name, value in before.items():
            assert torch.equal(value, after[name]), (source, name)
        assert _numbers(folder / source) == _numbers(folder / f"{source}-{layout}"), source
        if precision == "fp32":
            assert losses[source] == pytest.approx(uninterrupted[source], rel=1e-6), source
        else:
            assert any("/master" in name for name in before)
            assert losses[source] == pytest.approx(uninterrupted[source], rel=2e-2), source


def _save_and_open(case: Case, folder: Path) -> None:
    boosted = boost(case)
    boosted.booster.save_checkpoint(folder, **_state(boosted))
    boosted.booster.load_checkpoint(folder, **_state(boosted))


@pytest.mark.slow
def test_a_buffer_of_every_rank_is_saved_once(tmp_path: Path) -> None:
    """BART's bias on logits belongs to the model itself, which every stage and every tensor-parallel rank has."""
    case = Case(recipe=Recipe(family="bart", head="generation"), layout="tp2pp2")
    run_on_ranks(4, _save_and_open, case, tmp_path / "state")
    assert "model/final_logits_bias" in reassembled(tmp_path / "state")
