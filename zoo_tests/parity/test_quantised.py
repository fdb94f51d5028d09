"""Adapters on quantised bases (QLoRA) train like on the unsharded quantised model, whose weights stay what they were.

What breaks here first: a scale that belongs to another block, a gradient that does not pass a packed layer, a sum over
ranks that is missing around the library's product.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.matmul.quantised import packed_layers
from zoo_tests.harness.adapters import with_adapters
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.quantised import quantise
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.train_sharded import boost
from zoo_tests.zoo import FAMILIES

pytest.importorskip("bitsandbytes")

# Rows of two blocks of 64 values, and of five: tp2 cuts one of them in halves.
_SIZES = (("hidden_size", 128), ("intermediate_size", 320), ("num_hidden_layers", 3))
_TARGETS = ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "lm_head")
_NF4 = (("load_in_4bit", True), ("bnb_4bit_quant_type", "nf4"))
_NESTED = (*_NF4, ("bnb_4bit_use_double_quant", True))
_FP4 = (("load_in_4bit", True), ("bnb_4bit_quant_type", "fp4"))
_INT8 = (("load_in_8bit", True),)
_FILES = (("through_files", True),)
_HEAD_TOO = (("llm_int8_skip_modules", ()),)
_DORA = (("use_dora", True),)
_IA3 = (("kind", "IA3"), ("feedforward_modules", ("up_proj", "down_proj")))


def _case(layout: str, quantisation: tuple, **options: Any) -> Case:
    recipe = {name: options.pop(name) for name in ("adapters", "adapter_options", "steps") if name in options}
    recipe = Recipe(
        family="llama",
        head="causal_lm",
        precision="fp32",
        config=_SIZES,
        quantisation=quantisation,
        **{"adapters": _TARGETS, "steps": 1, **recipe},
    )
    return Case(recipe=recipe, layout=layout, **options)


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("layout", "quantisation"),
    [
        ("tp2", _NESTED),
        ("tp2", _INT8),
        ("tp2pp2", _NESTED),
        _slow("tp2", (*_NF4, *_FILES)),
        _slow("tp2", (*_INT8, *_FILES)),
        _slow("tp2", (*_FP4, *_HEAD_TOO)),
        _slow("tp2", (*_INT8, *_HEAD_TOO)),
        _slow("pp2", _NF4),
        _slow("pp2", _INT8),
        _slow("tp2pp2", _INT8),
        _slow("tp4", _NESTED),  # two key and value heads: pairs of ranks hold the same one
    ],
)
def test_adapters_on_quantised_bases_train_like_plain_ones(layout: str, quantisation: tuple, tmp_path: Path) -> None:
    check_case(_case(layout, quantisation), tmp_path)


@pytest.mark.parametrize(
    ("layout", "quantisation", "zero_stage"),
    [
        ("dp2", _NESTED, 3),
        _slow("dp2", _NESTED, 0),
        _slow("dp2", _NESTED, 1),
        _slow("dp2", _INT8, 3),
        _slow("tp2dp2", _NF4, 3),
        _slow("tp2dp2", _INT8, 3),
        _slow("pp2dp2", (*_NF4, *_FILES), 3),
    ],
)
def test_replicas_of_quantised_bases(layout: str, quantisation: tuple, zero_stage: int, tmp_path: Path) -> None:
    check_case(_case(layout, quantisation, steps=2, zero_stage=zero_stage), tmp_path)


def _shard_packed_weights(case: Case, folder: Path) -> None:
    plain = dict(packed_layers(case.recipe.model()))
    model, booster = (boosted := boost(case)).model, boosted.booster
    layers = dict(packed_layers(model.module))
    held = [each for layer, kind in layers.items() for each in kind.packed(layer) if each.numel() >= 512]
    assert len(held) >= len(layers) == len(plain)
    held += [layer.weight.CB for layer in layers if getattr(layer.weight, "CB", None) is not None]
    assert sum(each.untyped_storage().nbytes() for each in held) == 0
    with model.summon_full_params(writeback=False):
        for (layer, kind), whole in zip(layers.items(), plain, strict=True):
            assert all(map(torch.equal, kind.packed(layer), kind.packed(whole)))
    booster.save_model(model, folder / "3")
    assert sum(each.untyped_storage().nbytes() for each in held) == 0
    boosted = boost(case.but(zero_stage=1))
    boosted.booster.save_model(boosted.model, folder / "1")


@pytest.mark.parametrize("quantisation", [_NF4, pytest.param(_INT8, marks=pytest.mark.slow)])
def test_replicas_keep_shards_of_packed_weights_under_stage_3(quantisation: tuple, tmp_path: Path) -> None:
    run_on_ranks(2, _shard_packed_weights, _case("dp2", quantisation, zero_stage=3), tmp_path)
    files = [(tmp_path / stage / "adapter_model.safetensors").read_bytes() for stage in ("1", "3")]
    assert files[0] == files[1]


@pytest.mark.slow
@pytest.mark.parametrize("quantisation", [_NESTED, _INT8])
@pytest.mark.parametrize("mode", ["split_gather", "all_to_all"])
def test_sequence_parallelism(mode: str, quantisation: tuple, tmp_path: Path) -> None:
    options = (("sequence_parallelism_mode", mode),)
    check_case(_case("tp2", quantisation, sequence_parallel=True, options=options), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantisation", "adapter_options", "targets"),
    [
        (_NF4, _DORA, _TARGETS[:-1]),
        (_NF4, _IA3, ("k_proj", "o_proj", "up_proj", "down_proj")),
        (_INT8, (("kind", "IA3"), ("feedforward_modules", ("up_proj",))), ("k_proj", "up_proj")),
        (_NESTED, (("use_rslora", True), ("modules_to_save", ("embed_tokens", "lm_head"))), _TARGETS[:-1]),
    ],
)
def test_other_adapters(quantisation: tuple, adapter_options: tuple, targets: tuple[str, ...], tmp_path: Path) -> None:
    check_case(_case("tp2", quantisation, adapters=targets, adapter_options=adapter_options), tmp_path)


@pytest.mark.slow
def test_fused_projections_with_biases(tmp_path: Path) -> None:
    recipe = Recipe(
        family="gpt2",
        head="lm_head",
        precision="fp32",
        steps=1,
        config=(("n_embd", 128), ("n_inner", 320), ("n_layer", 3)),
        quantisation=_NESTED,
        adapters=("c_attn", "c_proj", "c_fc"),
        adapter_options=(("bias", "all"),),
    )
    check_case(Case(recipe=recipe, layout="tp2"), tmp_path)


@pytest.mark.slow
def test_sixteen_bit_with_recomputation(tmp_path: Path) -> None:
    options = (("gradient_checkpointing", "full"),)
    recipe = Recipe(
        family="llama",
        head="causal_lm",
        precision="bf16",
        steps=1,
        config=_SIZES,
        quantisation=_NESTED,
        adapters=_TARGETS,
    )
    check_case(Case(recipe=recipe, layout="tp2", options=options), tmp_path, weights=False)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "zero_stage"), [("tp2", 1), ("pp2", 1), ("dp2", 1), ("tp2dp2", 3)])
def test_torchao(layout: str, zero_stage: int, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    check_case(_case(layout, (("torchao", "Int8WeightOnlyConfig"),), zero_stage=zero_stage), tmp_path)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@distributed(2)
def test_torchao_that_rounds_inputs_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="int8 weights of torchao that have no scale for each row or that"):
        _boost(_model((("torchao", "Int8DynamicActivationInt8WeightConfig"),)), tp_size=2)


def _model(quantisation: tuple, targets: tuple[str, ...] = ("q_proj", "o_proj"), **options: Any) -> nn.Module:
    base = FAMILIES["llama"].build("causal_lm", torch.float32, **dict(_SIZES))
    return with_adapters(quantise(base, dict(quantisation)), targets, tuple(options.items()))


def _boost(model: nn.Module, **options: Any) -> nn.Module:
    return Booster(plugin=HybridParallelPlugin(**options)).boost(model)


@torch.no_grad()
def _logits(model: nn.Module) -> torch.Tensor:
    batch = FAMILIES["llama"].batch("causal_lm", 0, 3)
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


@pytest.mark.slow
@distributed(2)
def test_evaluation_between_training_steps() -> None:
    """In evaluation 8-bit layers round their inputs by the values of all features, which no rank must miss."""
    for layout in ({"tp_size": 2}, {"dp_size": 2}):
        for quantisation in (_NF4, _INT8):
            native = _model(quantisation)
            booster = Booster(plugin=HybridParallelPlugin(**layout))
            model, optimizer = booster.boost(native, torch.optim.SGD(native.parameters(), lr=0.1))
            expected = _model(quantisation)
            for module in expected.modules():
                if hasattr(module, "support_avx512bf16_for_cpu"):
                    module.support_avx512bf16_for_cpu = False  # of CPUs that round scales to bf16 in evaluation
            torch.testing.assert_close(_logits(model.train()), _logits(expected.train()), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(_logits(model.eval()), _logits(expected.eval()), rtol=1e-3, atol=1e-3)
            booster.execute_pipeline(
                iter([FAMILIES["llama"].batch("causal_lm", 0, 3)]), model.train(), optimizer=optimizer
            )
            optimizer.step()


@pytest.mark.slow
@distributed(2)
def test_a_checkpoint_opens_under_another_layout_and_the_model_generates(tmp_path: Path) -> None:
    """It holds no quantised weights, which layouts cut in different ways: they come with the base."""
    batches = [FAMILIES["llama"].batch("causal_lm", step, 4) for step in range(3)]
    prompt = {"input_ids": batches[0]["input_ids"], "attention_mask": batches[0]["attention_mask"]}
    losses, tokens = {}, []
    for layout in ("first", "resumed"):
        native = _model(_NESTED)
        booster = Booster(plugin=HybridParallelPlugin(**({"tp_size": 2} if layout == "first" else {"pp_size": 2})))
        model, optimizer = booster.boost(native, torch.optim.AdamW(native.parameters(), lr=0.01))
        if layout == "resumed":
            booster.load_checkpoint(tmp_path / "state", model=model, optimizer=optimizer)
        for batch in batches[1:] if layout == "resumed" else batches:
            loss = booster.execute_pipeline(iter([batch]), model.train(), optimizer=optimizer).loss
            optimizer.step()
            optimizer.zero_grad()
            losses.setdefault(layout, []).append(loss.item())
            if layout == "first" and batch is batches[0]:
                booster.save_checkpoint(tmp_path / "state", model=model, optimizer=optimizer)
        tokens.append(model.eval().generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist())
    assert losses["resumed"] == pytest.approx(losses["first"][1:], rel=1e-5)
    assert tokens[0] == tokens[1]
    saved = sum(file.stat().st_size for file in (tmp_path / "state").rglob("*") if file.is_file())
    whole = 2 * FAMILIES["llama"].build("causal_lm", torch.float32, **dict(_SIZES)).lm_head.weight.nbytes
    assert saved < 1.5 * whole  # embedding, head and adapters alone


@pytest.mark.slow
@distributed(2)
def test_merging_into_shards() -> None:
    for quantisation, targets in ((_NF4, ("q_proj", "o_proj")), (_INT8, ("q_proj", "up_proj"))):
        model, plain = _boost(_model(quantisation, targets), tp_size=2), _model(quantisation, targets)
        for each in (model, plain):
            each.train().merge_adapter()
        torch.testing.assert_close(_logits(model), _logits(plain), rtol=1e-4, atol=1e-4)
    for quantisation, target in ((_NESTED, "q_proj"), (_NF4, "down_proj"), (_INT8, "o_proj")):
        model = _boost(_model(quantisation, (target,)), tp_size=2)
        with pytest.raises(ValueError, match="cannot be merged into a weight that tp_size cuts, because the whole"):
            model.merge_adapter()


@distributed(2)
def test_scales_are_those_of_the_first_rank() -> None:
    """A rank whose base was quantised from other weights has the same codes where only scales differ."""
    model, plain = _model(_NF4), _model(_NF4)
    if torch.distributed.get_rank() == 1:
        for module in model.modules():
            if hasattr(module, "quant_state"):
                module.weight.quant_state.absmax.mul_(2)
    torch.testing.assert_close(_logits(_boost(model, tp_size=2)), _logits(plain), rtol=1e-4, atol=1e-4)


@distributed(2)
def test_what_cannot_be_quantised_and_cut_is_refused_before_anything_is_changed() -> None:
    narrow = FAMILIES["llama"].build("causal_lm", torch.float32)
    narrow = with_adapters(quantise(narrow, dict(_NF4)), ("q_proj",))
    bare = quantise(FAMILIES["llama"].build("causal_lm", torch.float32), dict(_INT8))
    evaluated = _model(_NF4)
    evaluated.model.model.layers[0].self_attn.q_proj.weight.quant_state.packing_format_for_cpu = True
    unknown = _model(_NF4)
    unknown.model.model.norm.weight = nn.Parameter(torch.zeros(128, dtype=torch.uint8), requires_grad=False)
    for model, options, message in (
        (bare, {"dp_size": 2}, r"a quantised LlamaForCausalLM \(model.layers.0.self_attn.q_proj.weight is packed\) has "
         "no weights that can be trained; wrap it by peft's get_peft_model"),
        (narrow, {"tp_size": 2}, r"model.layers.0.self_attn.q_proj \(and 34 more\) has 4-bit weights in rows of 48 "
         "values, which blocks of 64 do not divide"),
        (_model(_NF4), {"tp_size": 2, "precision": "fp8"}, "precision='fp8' cannot multiply the quantised weights"),
        (evaluated, {"dp_size": 2}, "has a weight that bitsandbytes has packed for evaluation on this CPU"),
        (unknown, {"tp_size": 2}, "cannot shard a quantised LlamaForCausalLM: model.norm.weight is of a kind that is"),
    ):  # fmt: skip
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(ConfigurationError, match=message):
            _boost(model, **options)
        assert {name: type(module) for name, module in model.named_modules()} == before
