"""LoRA adapters in directories of the peft package's format.

The models are those of a replica of peft (`zoo_tests.peft_like`); the names and keys checked here are those that peft
0.21 documents and writes. What breaks here first: a name in the file. Look in
`plugins/hybrid_parallel/checkpoint/adapters.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.adapters import file_name
from zoo_tests.case import LAYOUTS, Case, Recipe
from zoo_tests.peft_like import ADAPTER, load_adapters
from zoo_tests.ranks import distributed, run_on_ranks
from zoo_tests.sharded import Boosted, boost

_TARGETS = {
    "llama": ("causal_lm", ("q_proj", "o_proj", "lm_head")),
    "gpt2": ("lm_head", ("c_attn", "c_proj")),
    "bert": ("sequence", ("query", "output.dense", "classifier")),
    "t5": ("generation", ("q", "o", "wi_0", "wo")),
}


def _case(family: str, layout: str) -> Case:
    head, targets = _TARGETS[family]
    return Case(recipe=Recipe(family=family, head=head, adapters=targets), layout=layout)


def _is_adapter(name: str) -> bool:
    return ".lora_" in name


def _save(case: Case, directory: Path, dtype: torch.dtype | None = None) -> None:
    boosted = boost(case)
    boosted.booster.save_model(boosted.model, directory, dtype=dtype)


def _load(case: Case, directory: Path) -> None:
    """Every piece of every adapter is back, and nothing else has changed."""
    boosted = boost(case)
    before = _pieces(boosted)
    with torch.no_grad():
        for name, param in boosted.model.unwrap().named_parameters():
            if _is_adapter(name):
                param.add_(1)
    boosted.booster.load_model(boosted.model, directory)
    after = _pieces(boosted)
    assert all(torch.equal(after[name], piece) for name, piece in before.items())


def _pieces(boosted: Boosted) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in boosted.model.unwrap().named_parameters()}


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [("llama", "tp2pp2", "tp2"), ("gpt2", "tp2", "pp2"), ("bert", "pp2", "tp2"), ("t5", "tp2", "dp2")],
)
def test_round_trip(family: str, saved: str, loaded: str, tmp_path: Path) -> None:
    case = _case(family, saved)
    run_on_ranks(LAYOUTS[saved].world_size, _save, case, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    plain = case.recipe.model()
    expected = {name.replace(f".{ADAPTER}", ""): param for name, param in plain.named_parameters() if _is_adapter(name)}
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(name.startswith("base_model.model.") and name.endswith(".weight") for name in tensors)
    assert all(torch.equal(tensors[name], param) for name, param in expected.items())
    run_on_ranks(2, _load, case.but(layout=loaded), tmp_path)


def test_configuration(tmp_path: Path) -> None:
    case = _case("llama", "tp2")
    run_on_ranks(2, _save, case, tmp_path, torch.bfloat16)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == 3 and config["inference_mode"] is True
    assert config["target_modules"] == sorted(_TARGETS["llama"][1])
    assert config["auto_mapping"]["base_model_class"] == "LlamaForCausalLM"
    dtypes = {tensor.dtype for tensor in load_file(tmp_path / "adapter_model.safetensors").values()}
    assert dtypes == {torch.bfloat16}
    load_adapters(case.recipe.model(), tmp_path)


@pytest.mark.parametrize(
    ("name", "in_file"),
    [
        ("base_model.model.h.0.c_attn.lora_A.default.weight", "base_model.model.h.0.c_attn.lora_A.weight"),
        ("base_model.model.default.q.lora_B.default.weight", "base_model.model.default.q.lora_B.weight"),
        ("base_model.model.wte.lora_embedding_A.default", "base_model.model.wte.lora_embedding_A"),
        ("base_model.model.q.lora_magnitude_vector.default.weight", "base_model.model.q.lora_magnitude_vector"),
        ("base_model.model.classifier.modules_to_save.default.bias", "base_model.model.classifier.bias"),
        ("base_model.model.classifier.original_module.bias", None),
        ("base_model.model.h.0.c_attn.lora_A.other.weight", None),
        ("base_model.model.h.0.c_attn.base_layer.weight", None),
        ("base_model.model.h.0.c_attn.base_layer.bias", None),
    ],
)
def test_names(name: str, in_file: str | None) -> None:
    assert file_name(name, "default") == in_file


def test_biases_that_are_trained_are_saved() -> None:
    assert file_name("base_model.model.ln_f.bias", "default", bias="all") == "base_model.model.ln_f.bias"
    assert file_name("base_model.model.classifier.original_module.bias", "default", bias="all") is None


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
    boosted.model.unwrap().peft_config[ADAPTER].peft_type = "IA3"
    with pytest.raises(ConfigurationError, match=r"peft_type='IA3'; save_model knows 'LORA' alone"):
        boosted.booster.save_model(boosted.model, tmp_path / "other")


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
