"""Experts on several ranks are saved whole, and layouts with and without expert parallelism open each other's files.

What breaks here first: who of the ranks with copies writes a piece. Look at `axis` of `shardformer/shard_spec.py`, and
at `replicate_axis` of `plugins/hybrid_parallel/distributed/mesh.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import Boosted, boost
from zoo_tests.hybrid_parallel.checkpoint.test_resharding import reassembled

# layout, ep_size
_FAST = [("dp2", 2), ("dp2", 1), ("tp2", 1)]
_SLOW = [("single", 1), ("tp2dp2", 2), ("dp4", 2), ("dp4", 4), ("pp2dp2", 2)]
_STEPS, _MORE = 2, 2


def _case(layout: str, ep_size: int, precision: str = "fp32", zero_stage: int = 1) -> Case:
    recipe = Recipe(family="mixtral", head="causal_lm", optimizer="adamw", precision=precision)
    return Case(recipe=recipe, layout=layout, zero_stage=zero_stage, options=(("ep_size", ep_size),))


def _state(boosted: Boosted) -> dict[str, Any]:
    return {"model": boosted.model, "optimizer": boosted.optimizer, "lr_scheduler": boosted.scheduler}


def _steps(boosted: Boosted, case: Case, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(boosted.pipeline_backward(boosted.share(case.recipe.batch(step))).item())
        boosted.finish_step()
    return losses


def _save(case: Case, directory: Path) -> list[float]:
    """Train, save, train on; the losses behind the checkpoint."""
    boosted = boost(case)
    _steps(boosted, case, range(_STEPS))
    boosted.booster.save_checkpoint(directory, **_state(boosted))
    return _steps(boosted, case, range(_STEPS, _STEPS + _MORE))


def _open(case: Case, source: Path, target: Path) -> list[float]:
    """Open a checkpoint, save it again, train on; the losses behind it."""
    boosted = boost(case)
    _steps(boosted, case, range(1))  # so that nothing is in its place by chance
    boosted.booster.load_checkpoint(source, **_state(boosted))
    boosted.booster.save_checkpoint(target, **_state(boosted))
    return _steps(boosted, case, range(_STEPS, _STEPS + _MORE))


def _check(source: Case, target: Case, folder: Path) -> None:
    expected = run_on_ranks(source.sizes.world_size, _save, source, folder / "first")[0]
    found = run_on_ranks(target.sizes.world_size, _open, target, folder / "first", folder / "second")[0]
    before, after = reassembled(folder / "first"), reassembled(folder / "second")
    assert before.keys() == after.keys()
    different = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert not different
    assert any(".experts." in name and name.endswith("exp_avg") for name in before)
    assert found == pytest.approx(expected, rel=1e-5 if source.recipe.precision == "fp32" else 2e-2)


def _pairs() -> list:
    fast = [(_FAST[0], _FAST[1]), (_FAST[1], _FAST[0]), (_FAST[2], _FAST[0])]
    # Each layout is a source or a target, in turn; the campaign has both ways.
    slow = [(source, _FAST[0]) for source in _SLOW[::2]] + [(_FAST[0], target) for target in _SLOW[1::2]]
    rest = [(target, source) for source, target in slow]
    marked = [(pair, pytest.mark.slow) for pair in fast + slow] + [(pair, pytest.mark.campaign) for pair in rest]
    return [
        pytest.param(*pair, id="-".join(f"{layout}ep{ep}" for layout, ep in pair), marks=mark) for pair, mark in marked
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), _pairs())
def test_layouts_open_each_others_checkpoints(source: tuple[str, int], target: tuple[str, int], tmp_path: Path) -> None:
    _check(_case(*source), _case(*target), tmp_path)


@pytest.mark.parametrize(
    "zero_stage", [pytest.param(0, marks=pytest.mark.campaign), pytest.param(1, marks=pytest.mark.slow)]
)
def test_masters_travel_too(zero_stage: int, tmp_path: Path) -> None:
    source, target = ("tp2dp2", 2), ("dp2", 2)
    _check(_case(*source, "bf16", zero_stage), _case(*target, "bf16", 1 - zero_stage), tmp_path)
    assert any(name.endswith("experts.down_proj/master") for name in reassembled(tmp_path / "second"))


def _load_files(case: Case, directory: Path) -> None:
    """What was saved comes back piece by piece, also where other values are in its place."""
    boosted = boost(case)
    boosted.booster.save_model(boosted.model, directory)
    saved = {name: param.detach().clone() for name, param in boosted.model.unwrap().named_parameters()}
    for param in boosted.model.unwrap().parameters():
        param.data.zero_()
    boosted.booster.load_model(boosted.model, directory)
    for name, param in boosted.model.unwrap().named_parameters():
        assert torch.equal(param, saved[name]), name


@pytest.mark.parametrize(
    ("layout", "ep_size"),
    [("dp2", 2), pytest.param("tp2dp2", 2, marks=pytest.mark.slow), pytest.param("dp4", 2, marks=pytest.mark.slow)],
)
def test_model_files_come_back(layout: str, ep_size: int, tmp_path: Path) -> None:
    case = _case(layout, ep_size)
    run_on_ranks(case.sizes.world_size, _load_files, case, tmp_path)


def _save_and_open(options: dict[str, Any], folder: Path) -> list[str]:
    """Names of tensors that are not what they were, after each form of the files was opened."""
    booster = Booster(plugin=HybridParallelPlugin(**options))
    whole = dict(_mixture().state_dict())
    model = booster.boost(_mixture())
    booster.save_model(model, folder / "ours")
    wrong = []
    for form in ("experts", "stacked", "ours"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        booster.load_model(model, folder / form)
        booster.save_model(model, folder / f"again-{form}")
        again = MixtralForCausalLM.from_pretrained(folder / f"again-{form}").state_dict()
        wrong += [f"{form}: {name}" for name, value in again.items() if not torch.equal(value, whole[name])]
    return wrong


def _mixture() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_hidden_layers=2, vocab_size=67))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"ep_size": 2}, {"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_files_have_the_names_of_transformers_and_both_forms_open(options: dict[str, Any], tmp_path: Path) -> None:
    """An expert each, which `save_pretrained` writes, or all of a layer stacked, as they are in memory."""
    _mixture().save_pretrained(tmp_path / "experts")
    _mixture().save_pretrained(tmp_path / "stacked", save_original_format=False)
    for wrong in run_on_ranks(2, _save_and_open, options, tmp_path):
        assert not wrong
    names = {
        form: {name for path in (tmp_path / form).glob("*.safetensors") for name in load_file(path)}
        for form in ("experts", "stacked", "ours")
    }
    assert names["ours"] == names["experts"] != names["stacked"]
