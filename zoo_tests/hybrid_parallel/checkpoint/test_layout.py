"""What `save_model` writes, family by family, against what transformers' own `save_pretrained` writes.

What breaks here first: a family whose names in files differ from those in memory, and a tensor that one layout forgets.
Look in `save.py` of `plugins/hybrid_parallel/checkpoint`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from shardformer.shard_spec import spec_of
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.families import third_of_families
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import boost
from zoo_tests.zoo import FAMILIES

OTHER = {"tp2": "dp2", "pp2": "tp2", "tp2pp2": "tp2"}  # saved by the first, loaded by the second
ONE_STAGE = ("swin", "swinv2", "sam")  # their stages are not cut
QUICK = [("bert", "tp2"), ("t5", "pp2"), ("vit", "tp2"), ("mixtral", "pp2"), ("blip_2", "tp2"), ("llama", "tp2pp2")]


def _save(case: Case, directory: Path) -> None:
    boosted = boost(case)
    boosted.booster.save_model(boosted.model, directory, size_per_shard="200KB")


def _load(case: Case, directory: Path) -> None:
    """Into a model with other weights: every piece is that of the model that was saved."""
    boosted = boost(case)
    pieces = dict(boosted.model.unwrap().named_parameters())
    with torch.no_grad():
        for param in pieces.values():
            param.add_(1)
    boosted.booster.load_model(boosted.model, directory)
    plain = case.recipe.model()
    computed = set(plain._keys_to_ignore_on_save or ())  # by the model's constructor, and not in the files
    wrong = [
        name
        for name, param in pieces.items()
        if name not in computed and not torch.equal(_unpadded(param), spec_of(param).shard(plain.get_parameter(name)))
    ]
    assert not wrong


def _unpadded(piece: Tensor) -> Tensor:
    """The values of padding are nobody's concern."""
    spec, piece = spec_of(piece), piece.detach().clone()
    position = 0
    for start, stop, padding in spec.pieces() if spec.dim is not None else ():
        position += stop - start
        piece.narrow(spec.dim, position, padding).zero_()
        position += padding
    return piece


def _open(model_class: type[nn.Module], directory: Path) -> tuple[Any, dict[str, Any]]:
    return model_class.from_pretrained(directory, output_loading_info=True)


def _shapes(directory: Path) -> dict[str, tuple[list[int], str]]:
    shapes = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                shapes[name] = (file.get_slice(name).get_shape(), file.get_slice(name).get_dtype())
    return shapes


def _check(family: str, layout: str, directory: Path) -> None:
    recipe = Recipe(family=family, head=next(iter(FAMILIES[family].heads)), stages=2)
    plain: Any = recipe.model()
    run_on_ranks(LAYOUTS[layout].world_size, _save, Case(recipe=recipe, layout=layout), directory / "ours")
    plain.save_pretrained(directory / "theirs")
    for side in ("ours", "theirs"):
        run_on_ranks(2, _load, Case(recipe=recipe, layout=OTHER[layout]), directory / side)
    ours, info = _open(type(plain), directory / "ours")
    theirs, their_info = _open(type(plain), directory / "theirs")
    assert info == their_info
    assert _shapes(directory / "ours") == _shapes(directory / "theirs")
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert not [name for name, tensor in ours.state_dict().items() if not torch.equal(tensor, expected[name])]
    values = plain.state_dict()
    assert not [name for name in expected if not torch.equal(expected[name], values[name])]
    for config in ("config.json", "generation_config.json"):
        texts = [directory / side / config for side in ("ours", "theirs")]
        assert [text.exists() and text.read_text() for text in texts][0] == (texts[1].exists() and texts[1].read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), QUICK)
def test_like_save_pretrained(family: str, layout: str, tmp_path: Path) -> None:
    _check(family, layout, tmp_path)


def _save_trained_positions(case: Case, directory: Path) -> None:
    boosted = boost(case)
    for name, param in boosted.model.unwrap().named_parameters():
        if "embed_positions" in name:
            param.requires_grad_(True).data.add_(1)
    boosted.booster.save_model(boosted.model, directory)


def test_computed_positions_are_saved_once_they_are_trained(tmp_path: Path) -> None:
    """transformers leaves Marian's out of every file; what somebody has trained would be lost without a word."""
    recipe = Recipe(family="marian", head="translation")
    plain = recipe.model()
    run_on_ranks(2, _save_trained_positions, Case(recipe=recipe, layout="tp2"), tmp_path)
    opened, _ = _open(type(plain), tmp_path)
    for name in ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"):
        assert torch.equal(opened.state_dict()[name], plain.state_dict()[name] + 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", third_of_families(2))
def test_every_family_is_like_save_pretrained(family: str, tmp_path: Path) -> None:
    _check(family, "tp2" if family in ONE_STAGE else "tp2pp2", tmp_path)
