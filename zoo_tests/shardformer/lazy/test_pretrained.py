"""`from_pretrained` in `record_module_init` gives the values that it gives outside.

What breaks here first: transformers' loader, which is used as it is. Look in `shardformer/lazy/recording.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from shardformer import record_module_init
from shardformer.lazy import materialize, weight_files
from shardformer.lazy.weight_files import read_piece
from zoo_tests.zoo import FAMILIES


def _check(model_class: Any, directory: Path, drawn: set[str] = frozenset(), **options: Any) -> nn.Module:
    """Compare everything but the names that are drawn."""
    plain, expected_info = model_class.from_pretrained(directory, output_loading_info=True, **options)
    with record_module_init(allow_bin=not list(directory.glob("*.safetensors"))):
        lazy, info = model_class.from_pretrained(directory, output_loading_info=True, **options)
    assert info == expected_info and info["missing_keys"] == drawn
    assert all(parameter.is_meta for parameter in lazy.parameters())
    materialize(lazy, seed=5)
    for found, expected in (
        (lazy.named_parameters(), plain.named_parameters()),
        (lazy.named_buffers(), plain.named_buffers()),
    ):
        for (name, tensor), (other_name, other) in zip(found, expected, strict=True):
            assert name == other_name and tensor.dtype == other.dtype and tensor.requires_grad == other.requires_grad
            assert name in drawn or torch.equal(tensor, other), name
    assert lazy.training == plain.training
    return lazy


def _main_model(family: str) -> nn.Module:
    return FAMILIES[family].build(FAMILIES[family].main_head, torch.float32)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5", "mixtral", "swin", "whisper"])
@pytest.mark.parametrize("size", [pytest.param("5GB", marks=pytest.mark.slow), "60KB"])
def test_the_same_values(family: str, size: str, tmp_path: Path) -> None:
    model = _main_model(family)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "60KB")
    _check(type(model), tmp_path)
    _check(type(model), tmp_path, dtype=torch.bfloat16)


@pytest.mark.slow
def test_a_base_into_a_head_and_back(tmp_path: Path) -> None:
    model = _main_model("bert")
    model.bert.save_pretrained(tmp_path / "base")
    drawn = {f"bert.pooler.dense.{part}" for part in ("weight", "bias")} | {"classifier.weight", "classifier.bias"}
    head = _check(transformers.BertForSequenceClassification, tmp_path / "base", drawn, num_labels=7)
    assert head.classifier.weight.shape == (7, 48) and 0.01 < head.classifier.weight.std() < 0.03
    assert head.classifier.bias.tolist() == [0] * 7
    head.save_pretrained(tmp_path / "head")
    _check(transformers.BertModel, tmp_path / "head")


def test_old_names_and_both_names_of_a_tied_weight(tmp_path: Path) -> None:
    model = _main_model("bert")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    decoder = {"cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone()}
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    save_file(old | decoder, tmp_path / "model.safetensors", metadata={"format": "pt"})
    lazy = _check(type(model), tmp_path)
    assert lazy.cls.predictions.decoder.weight is lazy.bert.embeddings.word_embeddings.weight
    decoder["cls.predictions.decoder.weight"] += 1
    save_file(old | decoder, tmp_path / "model.safetensors", metadata={"format": "pt"})
    lazy = _check(type(model), tmp_path)
    assert lazy.cls.predictions.decoder.weight is not lazy.bert.embeddings.word_embeddings.weight


def test_changes_in_the_context(tmp_path: Path) -> None:
    model = _main_model("gpt2")
    model.save_pretrained(tmp_path)
    with record_module_init():
        lazy = type(model).from_pretrained(tmp_path).double()
        lazy.resize_token_embeddings(1030, mean_resizing=False)
    materialize(lazy, seed=5)
    embedding = lazy.transformer.wte.weight
    assert embedding is lazy.lm_head.weight and embedding.shape[0] == 1030 and embedding.dtype == torch.float64
    assert torch.equal(embedding[:1021], model.transformer.wte.weight.double()) and embedding[1021:].std() > 0.01


def test_files_are_read_once_and_only_when_asked_for(tmp_path: Path) -> None:
    model = _main_model("llama")
    model.save_pretrained(tmp_path)
    with mock.patch.object(weight_files, "read_piece", mock.Mock(side_effect=read_piece)) as reading:
        with record_module_init():
            lazy = type(model).from_pretrained(tmp_path)
        assert reading.call_count == 0
        materialize(lazy)
    assert sorted(call.args[1] for call in reading.call_args_list) == sorted(load_file(tmp_path / "model.safetensors"))


@pytest.mark.slow
def test_bin_files_are_read_where_allowed(tmp_path: Path) -> None:
    model = _main_model("gpt2")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    message = r"pytorch_model.bin is no safetensors file; .* or, where you trust it, use"
    with pytest.raises(ValueError, match=message), record_module_init():
        type(model).from_pretrained(tmp_path)
    _check(type(model), tmp_path)


def test_files_outside_of_the_directory_are_refused(tmp_path: Path) -> None:
    model = _main_model("gpt2")
    directory = tmp_path / "model"
    model.save_pretrained(directory)
    (directory / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    names = load_file(tmp_path / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../elsewhere.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    message = r"names '.*elsewhere.safetensors' outside the directory; do not load it"
    with pytest.raises(ValueError, match=message), record_module_init():
        type(model).from_pretrained(directory)


def test_code_in_a_directory_is_not_run(tmp_path: Path) -> None:
    model = _main_model("gpt2")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('code of the directory was run')")
    with pytest.raises(ValueError, match="trust_remote_code"), record_module_init():
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    model = _main_model("gpt2")
    model.save_pretrained(tmp_path)
    with record_module_init():
        lazy = type(model).from_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match="model.safetensors is not a complete safetensors file"):
        materialize(lazy)
