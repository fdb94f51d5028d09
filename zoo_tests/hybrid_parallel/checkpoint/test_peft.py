"""Adapters in directories of the peft package's format: the same files that peft writes of the unsharded model.

What breaks here first: a name in the file. Look in `shardformer/peft/kinds.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from booster.errors import ConfigurationError
from zoo_tests.harness.adapters import ADAPTER, load_adapters
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.train_sharded import Boosted, boost

_RECIPES = {
    "llama": ("causal_lm", ("q_proj", "o_proj", "lm_head"), (("modules_to_save", ("norm", "mlp")),)),
    "gpt2": ("lm_head", ("c_attn", "c_proj"), (("use_dora", True), ("fan_in_fan_out", True))),
    "bert": ("sequence", ("query", "output.dense"), (("bias", "lora_only"), ("task_type", "SEQ_CLS"))),
    "t5": ("generation", ("q", "o", "wi_0", "wo"), ()),
    # The base's embedding is in the file, under both of its names.
    "tied llama": ("causal_lm", ("q_proj", "embed_tokens", "lm_head"), ()),
}


_WRITTEN = ("ours", "ours, given")


def _case(family: str, layout: str) -> Case:
    head, targets, options = _RECIPES[family]
    config = (("tie_word_embeddings", True),) if "tied" in family else ()
    recipe = Recipe(
        family=family.removeprefix("tied "), head=head, config=config, adapters=targets, adapter_options=options
    )
    return Case(recipe=recipe, layout=layout)


def _save(case: Case, directory: Path, dtype: torch.dtype | None = None) -> None:
    boosted = boost(case)
    boosted.booster.save_model(boosted.model, directory, dtype=dtype)
    if dtype is None:  # as scripts of accelerate do
        whole = boosted.plugin.checkpoint_io.whole_state_dict(boosted.model)
        boosted.model.unwrap().save_pretrained(f"{directory}, given", state_dict=whole)


def _load(case: Case, directory: Path) -> None:
    """Every piece of every adapter is back, and nothing else has changed."""
    boosted = boost(case)
    before = _pieces(boosted)
    with torch.no_grad():
        for param in boosted.model.unwrap().parameters():
            if param.requires_grad:
                param.add_(1)
    boosted.booster.load_model(boosted.model, directory)
    after = _pieces(boosted)
    assert all(torch.equal(after[name], piece) for name, piece in before.items())


def _pieces(boosted: Boosted) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in boosted.model.unwrap().named_parameters()}


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [
        ("tied llama", "pp2", "tp2"),  # peft looks for adapters among the modules of a stage
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("llama", "tp2pp2", "tp2"),
                ("gpt2", "tp2", "pp2"),
                ("bert", "pp2", "tp2"),
                ("t5", "tp2", "dp2"),
            ]
        ),
    ],
)
def test_round_trip(family: str, saved: str, loaded: str, tmp_path: Path) -> None:
    case = _case(family, saved)
    run_on_ranks(LAYOUTS[saved].world_size, _save, case, tmp_path / "ours")
    ours = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert ours == ["adapter_config.json", "adapter_model.safetensors"]
    plain = case.recipe.model()
    plain.save_pretrained(tmp_path / "plain")
    expected, *written = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("plain", *_WRITTEN))
    for found in written:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    configs = [json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("plain", "ours")]
    for config in configs:
        config["target_modules"].sort()  # a set in peft, in an order of its own
    assert configs[0] == configs[1]
    run_on_ranks(2, _load, case.but(layout=loaded), tmp_path / "plain")


def test_precision_of_the_file(tmp_path: Path) -> None:
    case = _case("llama", "tp2")
    run_on_ranks(2, _save, case, tmp_path, torch.bfloat16)
    dtypes = {tensor.dtype for tensor in load_file(tmp_path / "adapter_model.safetensors").values()}
    assert dtypes == {torch.bfloat16}
    assert load_adapters(case.recipe.base_model(), tmp_path).peft_config[ADAPTER].r == 3


@distributed(2)
def test_what_is_refused(tmp_path: Path) -> None:
    boosted = boost(_case("bert", "tp2"))
    with pytest.raises(ConfigurationError, match=r"has no adapter_config.json; give a directory of save_model, or of"):
        boosted.booster.load_model(boosted.model, tmp_path)
    boosted.booster.save_model(boosted.model, tmp_path / "good")
    if boosted.plugin.tp_rank == 0:
        path = tmp_path / "good" / "adapter_model.safetensors"
        tensors = load_file(path)
        lost = next(iter(tensors))
        del tensors[lost]
        save_file({**tensors, "another": torch.ones(1)}, path)
    torch.distributed.barrier()
    before = _pieces(boosted)
    with pytest.raises(
        ConfigurationError, match=r"adapter 'default': missing \['base_model.* unexpected \['another'\]"
    ):
        boosted.booster.load_model(boosted.model, tmp_path / "good")
    assert all(torch.equal(piece, before[name]) for name, piece in _pieces(boosted).items())
    boosted.booster.load_model(boosted.model, tmp_path / "good", strict=False)
    boosted.model.unwrap().merge_and_unload()
    with pytest.raises(ConfigurationError, match="the model has no adapters: merge_and_unload or unload removed them"):
        boosted.booster.save_model(boosted.model, tmp_path / "other")


@distributed(2)
def test_what_peft_would_read_of_one_stage_is_refused(tmp_path: Path) -> None:
    model = boost(_case("llama", "pp2")).model.unwrap()
    with pytest.raises(ConfigurationError, match=r"writes the adapters of rank 0's modules.* on all ranks"):
        model.save_pretrained(tmp_path, selected_adapters=["default"])


@distributed(2)
def test_an_error_leaves_the_earlier_adapter(tmp_path: Path) -> None:
    boosted = boost(_case("bert", "tp2"))
    boosted.booster.save_model(boosted.model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    torch.distributed.barrier()
    boosted.model.unwrap().peft_config[ADAPTER].task_type = object()  # no JSON
    with pytest.raises(ConfigurationError, match="not JSON serializable"):
        boosted.booster.save_model(boosted.model, tmp_path)
    torch.distributed.barrier()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
