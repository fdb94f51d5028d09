"""The stream of weights: names, shapes and values of what `save_model` writes, under every kind of layout.

What breaks here first: weights that files hold in another form, and an order of gathers that differs between ranks.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.zoo import FAMILIES

_LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tied in a pipeline": ("gpt2", 2, {"pp_size": 2}),
    "padded vocabulary": ("gpt2", 2, {"tp_size": 2, "make_vocab_size_divisible_by": 64}),
    "copies of key heads": ("llama", 4, {"tp_size": 4}),
    "all axes": ("gpt2", 4, {"tp_size": 2, "pp_size": 2}),
    "experts in another form": ("mixtral", 2, {"ep_size": 2}),
    "slices": ("llama", 2, {"zero_stage": 3}),
    "slices of shards": ("llama", 4, {"zero_stage": 3, "tp_size": 2}),
    "slices in a pipeline": ("bert", 4, {"zero_stage": 3, "pp_size": 2}),
    "slices of experts": ("mixtral", 4, {"zero_stage": 3, "ep_size": 2}),
    "offloaded": ("bert", 2, {"zero_stage": 3, "offload_parameters": "cpu"}),
}


def _model(family: str, adapted: dict[str, Any] | None = None) -> nn.Module:
    model = FAMILIES[family].build(FAMILIES[family].main_head, torch.float32)
    if adapted is None:
        return model
    import peft

    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, init_lora_weights=False, **adapted))
    model.add_adapter("other", peft.LoraConfig(r=2, init_lora_weights=False, **adapted))  # as a reference is
    return model


def _boosted(family: str, options: dict[str, Any], adapted: dict[str, Any] | None = None) -> tuple[Booster, nn.Module]:
    model = _model(family, adapted)
    booster = Booster(HybridParallelPlugin(**options))
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    return booster, booster.boost(model, optimizer)[0]


def _saved(folder: Path) -> dict[str, Tensor]:
    files = {file: file.parent.relative_to(folder) for file in folder.rglob("*.safetensors")}
    return {str(place / name): each for file, place in files.items() for name, each in load_file(file).items()}


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def _check(family: str, options: dict[str, Any], folder: Path) -> None:
    booster, model = _boosted(family, options)
    for dtype in (None, torch.bfloat16):
        booster.save_model(model, folder / str(dtype), dtype=dtype)
        expected = _saved(folder / str(dtype))
        for size in (512, 0.01):
            _equal(dict(booster.weights(model, dtype=dtype, bucket_size_in_mb=size)), expected)
        last = dist.get_world_size() - 1
        with patch.object(dist, "broadcast", None):  # shards travel to one rank
            found = dict(booster.weights(model, dtype=dtype, bucket_size_in_mb=0.01, to_rank=last))
        _equal(found, expected if dist.get_rank() == last else {})
        _check_shards(dict(booster.weights(model, dtype=dtype, shards=True)), expected)
    # While a bucket is on its way, another stream sends over the same groups.
    two = zip(booster.weights(model, bucket_size_in_mb=0.01), booster.weights(model, dtype), strict=True)
    assert all(name == other and torch.equal(one.to(dtype), two) for (name, one), (other, two) in two)
    for name, _ in booster.weights(model, bucket_size_in_mb=0.01, to_rank=0):
        assert name
        break  # the other ranks go on
    dist.barrier()


def _check_shards(mine: dict[str, Any], expected: dict[str, Tensor]) -> None:
    """The pieces of all ranks are equal to those of the whole, and nothing of it is missing."""
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in expected.items()}
    for name, piece in mine.items():
        assert piece.shape == tuple(expected[name].shape)
        for part in piece.rectangles:
            place = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
            assert torch.equal(part.values, expected[name][place])
            covered[name][place] += 1
    for tensor in covered.values():
        assert (tensor <= 1).all()
        dist.all_reduce(tensor)
        assert tensor.all()


@pytest.mark.slow
@pytest.mark.parametrize("name", _LAYOUTS)
def test_what_save_model_writes(name: str, tmp_path: Path) -> None:
    family, world_size, options = _LAYOUTS[name]
    run_on_ranks(world_size, _check, family, options, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("options", [{"tp_size": 2, "pp_size": 2}, {"zero_stage": 3}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_save_model_writes_of_every_family(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    run_on_ranks(4 if "pp_size" in options else 2, _check, family, options, tmp_path)


_ADAPTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "columns and rows": ("llama", {"tp_size": 2}, {"target_modules": ["q_proj", "o_proj", "embed_tokens"]}),
    "transposed": ("gpt2", {"tp_size": 2}, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "copies in a pipeline": ("bert", {"pp_size": 2}, {"target_modules": ["query"], "modules_to_save": ["classifier"]}),
    "slices": ("llama", {"zero_stage": 3}, {"target_modules": ["q_proj", "down_proj"]}),
}


def _check_adapters(family: str, options: dict[str, Any], adapted: dict[str, Any], folder: Path) -> None:
    plain = _saved(folder / "plain")
    booster, model = _boosted(family, options, adapted)
    booster.save_model(model, folder / "ours")
    _equal(dict(booster.weights(model)), _saved(folder / "ours"))
    merged = dict(booster.weights(model, merge_adapters=True, bucket_size_in_mb=0.01))
    assert merged.keys() == plain.keys()
    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, plain[key], rtol=1e-6, atol=1e-6)
    _check_shards(dict(booster.weights(model, merge_adapters=True, shards=True)), merged)


@pytest.mark.slow
@pytest.mark.parametrize("name", _ADAPTED)
def test_adapters_alone_and_merged(name: str, tmp_path: Path) -> None:
    family, options, adapted = _ADAPTED[name]
    _model(family, adapted).merge_and_unload().save_pretrained(tmp_path / "plain")
    run_on_ranks(2, _check_adapters, family, options, adapted, tmp_path)


def _check_steps_meanwhile(options: dict[str, Any]) -> None:
    """A stream that training overtakes has the weights of its beginning, and the next one those of the last step."""
    model = _model("llama")
    model.model.norm.register_buffer("calls", torch.zeros(()))  # as running statistics are, changed by a forward
    model.model.norm.register_forward_pre_hook(lambda norm, args: norm.calls.add_(1) and None)
    booster = Booster(HybridParallelPlugin(**options))
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.randint(3, 60, (4, 6), generator=torch.Generator().manual_seed(2))
    before = {name: each.clone() for name, each in booster.weights(model)}
    stream, pieces, found = booster.weights(model, bucket_size_in_mb=0.01), booster.weights(model, shards=True), {}
    next(pieces)
    for turn, (name, tensor) in enumerate(stream):
        found[name] = tensor.clone()
        if turn in {0, 3}:
            booster.execute_pipeline({"input_ids": ids, "labels": ids}, model, optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()
    _equal(found, before)
    changing = ("proj", "calls")
    after = {name: each for name, each in booster.weights(model) if any(part in name for part in changing)}
    assert any("calls" in name for name in after)
    assert not any(torch.equal(each, before[name]) for name, each in after.items())
    with pytest.raises(ConfigurationError, match="pieces of a step, and the optimizer has stepped since; take"):
        next(pieces)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"tp_size": 2}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(2, {"pp_size": 2}), (2, {"zero_stage": 3}), (4, {"tp_size": 2, "zero_stage": 3})]
        ),
    ],
    ids=str,
)
def test_training_overtakes_a_stream(ranks: int, options: dict[str, Any]) -> None:
    run_on_ranks(ranks, _check_steps_meanwhile, options)


@distributed(2)
def test_memory_beyond_the_model() -> None:
    """What is alive at any turn of the loop, beyond what was before, is less than the size that was asked for."""
    config = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 128}
    booster = Booster(HybridParallelPlugin(tp_size=2))
    model = booster.boost(LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, **config)))
    sizes = [tensor.nbytes for _, tensor in booster.weights(model)]
    limit = 4 * max(sizes)
    assert sum(sizes) > 2 * limit
    before = _bytes_alive()
    for _ in booster.weights(model, bucket_size_in_mb=limit / 2**20):
        assert _bytes_alive() - before <= limit


def _bytes_alive() -> int:
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) is Tensor
    }
    return sum(storages.values())


@distributed(2)
def test_what_is_refused() -> None:
    booster, model = _boosted("bert", {"tp_size": 2})
    for options, sentence in (
        ({"dtype": torch.int8}, "dtype=torch.int8 is no floating-point dtype"),
        ({"bucket_size_in_mb": 0}, "bucket_size_in_mb=0 is not a size; use for example 512"),
        ({"to_rank": 2}, "to_rank=2 is no rank of 2; use 0, or None for all"),
        ({"to_rank": 0, "shards": True}, "shards=True gives each rank its own pieces; leave out to_rank"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            booster.weights(model, **options)
    alone = booster.weights(model, to_rank=0)
    if next(alone, None) is not None:  # on rank 0
        with pytest.raises(ConfigurationError, match="another stream of weights are read in turns, and"):
            next(booster.weights(model))
    alone.close()
    together = booster.weights(model)
    next(together)
    with pytest.raises(ConfigurationError, match="read them one after the other, or leave out to_rank"):
        next(booster.weights(model, to_rank=1))
    together.close()
    assert dict(booster.weights(model))
    booster, model = _boosted("bert", {"tp_size": 2}, {"target_modules": ["query"], "use_dora": True})
    with pytest.raises(ConfigurationError, match="merge_adapters=True cannot merge .* it merges LoRA without DoRA"):
        booster.weights(model, merge_adapters=True)
