"""DeepSpeed3DParallelConfig: what it becomes, which head a base model gets, which modules a patch means.

What fails here first: a base model whose family's head is more than its embedding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    GPTJConfig,
    GPTJModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
)

from booster.errors import ConfigurationError
from plugins.hybrid_parallel import (
    DeepSpeed3DParallelConfig,
    HybridParallelConfig,
    HybridParallelPlugin,
    vocab_parallel_cross_entropy,
)
from plugins.hybrid_parallel.compat.deepspeed_3d.patches import ForwardPatches, find_patched
from plugins.hybrid_parallel.compat.deepspeed_3d.plugin import adapted, names_of_inputs, with_tied_head
from shardformer import TPInfo
from shardformer.utils.module_paths import ends_in

GROUPS = ([("tensor", 2), ("data", 3), ("pipeline", 4)], None)
GPT2 = GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=8)
_SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
LLAMA = LlamaConfig(vocab_size=11, tie_word_embeddings=False, **_SMALL)


def _plugin(groups: Any = GROUPS, overrides: Any = None, **options: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin.from_3d_config(DeepSpeed3DParallelConfig(**options), groups, **(overrides or {}))


def test_it_becomes_options_of_the_plugin() -> None:
    rules = TPInfo().shard_vocab("wte")
    expected: dict[str, Any] = {"tp_size": 2, "dp_size": 3, "pp_size": 4, "seed": 5, "tp_info": rules}
    assert _plugin(tpinfo=rules, base_seed=5).config == HybridParallelConfig.from_options(**expected)
    assert _plugin(tpinfo=TPInfo()).config.policy.tp_info is None and _plugin().config.debugging.seed == 1234
    sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": True}}
    options = _plugin(ds_config=sizes, overrides={"pp_style": "zero_bubble", "max_norm": 2.0}).config.options()
    expected = {"num_microbatches": 2, "precision": "fp16", "zero_stage": 0}
    assert options.items() >= (expected | {"pp_style": "zero_bubble", "max_norm": 2.0}).items()
    assert _plugin(ds_config=sizes, overrides={"microbatch_size": 1}).config.pipeline.num_microbatches is None
    sizes = _plugin(([("pipe", 2), ("expert", 1)], [1, 0])).config.parallel
    assert (sizes.tp_size, sizes.dp_size, sizes.pp_size) == (1, 1, 2)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: DeepSpeed3DParallelConfig(base_seed=-1), "base_seed=-1 is not an integer of 0 or more; use one such as"),
    (lambda: DeepSpeed3DParallelConfig(tpinfo={}), r"tpinfo is a dict; use shardformer.TPInfo\(\)"),
    (lambda: DeepSpeed3DParallelConfig(custom_patcher=["h"]), r"custom_patcher=\['h'\] is no mapping of paths to func"),
    (lambda: DeepSpeed3DParallelConfig(custom_patcher={"h": 1}), "custom_patcher={'h': 1} is no mapping of paths to"),
    (lambda: DeepSpeed3DParallelConfig(batch_fn=1), "batch_fn=1 is no function; use one, or None"),
    (lambda: DeepSpeed3DParallelConfig(logit_helper=print, tie_first=False), "tie_first=False ties none; use True"),
    (lambda: DeepSpeed3DParallelConfig(ds_config={"zero": 1}), "the key 'zero' is not known"),
    (lambda: HybridParallelPlugin.from_3d_config({}, GROUPS), r"is a dict; use DeepSpeed3DParallelConfig\(\)"),
    (
        lambda: _plugin(overrides={"tp_size": 2}),
        "tp_size conflicts with parallel_config; use the size of 'tensor' there",
    ),
    (lambda: _plugin(overrides={"tp": 2}), "HybridParallelPlugin has no option 'tp'"),
    (lambda: _plugin(3), r"parallel_config=3: is none; use \(\[\(\"tensor\", 2\)"),
    (lambda: _plugin(([("tensors", 2)], None)), "the parallel group 'tensors' is not known; use each of tensor, data"),
    (lambda: _plugin(([("tensor", 2)], [0, 0])), r"the order of ranks \[0, 0\] is no permutation of 0 to 1"),
    (lambda: _plugin(([("expert", 2)], None)), "'expert' of size 2 is not a 3D-parallel axis; use tensor, data and"),
    (
        lambda: _plugin(custom_patcher={"h": print}, overrides={"enable_jit_fused": True}),
        "custom_patcher patches layers that fused operators take apart; use enable_jit_fused=False",
    ),
    (
        lambda: _plugin(logit_helper=print, overrides={"enable_sequence_parallelism": True}),
        "logit_helper needs whole sequences; use enable_sequence_parallelism=False",
    ),
    (
        lambda: _plugin(ds_config={"train_batch_size": 8}),
        "train_batch_size=8 is no multiple of gradient_accumulation_steps=1 times 3 replicas; use 9",
    ),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED)
def test_a_mistake_is_one_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        make()


# ----- tie_first -----


@pytest.mark.parametrize(
    ("config", "head"), [(GPT2, GPT2LMHeadModel), (LLAMA, LlamaForCausalLM)], ids=["gpt2", "llama"]
)
def test_a_bare_base_model_gets_the_head_of_its_family(config: Any, head: type[nn.Module]) -> None:
    base = AutoModel.from_config(config).eval()
    weights = dict(base.named_parameters())
    model = with_tied_head(base, None)
    assert type(model) is head and model.base_model is base
    assert model.lm_head.weight is base.get_input_embeddings().weight
    prefix = f"{head.base_model_prefix}."
    assert {name.removeprefix(prefix): param for name, param in model.named_parameters()}.keys() == weights.keys()
    assert all(module.config is model.config for module in model.modules() if hasattr(module, "config"))
    assert model.config.tie_word_embeddings and config.tie_word_embeddings is (config is GPT2)
    x = torch.arange(8).view(1, 8)
    expected = nn.functional.linear(base(x)[0], base.get_input_embeddings().weight)
    torch.testing.assert_close(model(x).logits, expected)


@pytest.mark.parametrize("build", [lambda: LlamaForCausalLM(LLAMA), lambda: GPT2ForSequenceClassification(GPT2)])
def test_a_model_with_a_head_keeps_it(build: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    """Defect 4 of ATorch."""
    model = build()
    names = list(dict(model.named_parameters()))
    with caplog.at_level(logging.INFO):
        assert with_tied_head(model, None) is model
    assert list(dict(model.named_parameters())) == names
    assert "tie_first changes nothing" in caplog.text
    with pytest.raises(ConfigurationError, match="logit_helper computes logits from the input embedding, and .*; use"):
        with_tied_head(model, lambda hidden, embedding: hidden)


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        (
            lambda: BertModel(BertConfig(vocab_size=11, **_SMALL)),
            "the logits of BertLMHeadModel need more than the embedding of BertModel, cls.predictions.bias",
        ),
        (
            lambda: GPTJModel(GPTJConfig(vocab_size=11, n_embd=8, n_layer=1, n_head=2, rotary_dim=2)),
            "the logits of GPTJForCausalLM need more than the embedding of GPTJModel, lm_head.bias; boost a GPTJFor",
        ),
        (
            lambda: T5Model(T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)),
            "tie_first=True finds no causal language model of the family of T5Model; use tie_first=False",
        ),
        (
            lambda: ViTModel(ViTConfig(image_size=8, patch_size=4, **_SMALL)),
            "tie_first=True finds no causal language model of the family of ViTModel; use tie_first=False",
        ),
    ],
    ids=["bert", "gptj", "t5", "vit"],
)
def test_a_family_without_such_a_head_is_refused(base: Callable[[], nn.Module], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        with_tied_head(base(), None)


# ----- custom_patcher -----


def _found(*names: str) -> list[str]:
    model = GPT2Model(GPT2)
    found = find_patched(model, dict.fromkeys(names, lambda forward, module: forward))
    return [path for path, module in model.named_modules() if module in found]


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("h.0", ["h.0"]),
        ("h.*", ["h.0", "h.1"]),
        ("wte", ["wte"]),
        ("mlp.c_fc", ["h.0.mlp.c_fc", "h.1.mlp.c_fc"]),
        ("h.*.mlp.c_fc", ["h.0.mlp.c_fc", "h.1.mlp.c_fc"]),
        ("1.ln_1", ["h.1.ln_1"]),
    ],
)
def test_a_name_means(name: str, paths: list[str]) -> None:
    assert _found(name) == paths


def test_a_name_that_means_nothing() -> None:
    with pytest.raises(ConfigurationError) as error:
        _found("h.i", "wpe", "mlp.fc")
    assert str(error.value) == (
        "custom_patcher names 'h.i', which matches no module of GPT2Model; use one of ['h.1', 'h.0', 'h'], or * for "
        "the number of a layer; custom_patcher names 'mlp.fc', which matches no module of GPT2Model; use one of "
        "['mlp.c_fc', 'mlp.act', 'mlp'], or * for the number of a layer"
    )


def test_patches_of_one_module_are_put_around_each_other() -> None:
    model = nn.ModuleDict({"a": nn.Identity()})
    plus, times = lambda f, m: lambda x: f(x) + 1, lambda f, m: lambda x: f(x) * 3
    patches = ForwardPatches(model, find_patched(model, {"a": plus}))
    patches.apply(model)
    patches.apply(model)  # once is enough
    assert model["a"](2) == 3
    patches.remove(model)
    assert model["a"](2) == 2
    both = nn.ModuleDict({"b": nn.ModuleDict({"a": nn.Identity()})})
    ForwardPatches(both, find_patched(both, {"b.a": plus, "a": times})).apply(both)
    assert both["b"]["a"](2) == 9


@pytest.mark.parametrize(
    ("path", "name", "ends"),
    [
        ("h.0.attn", "attn", True),
        ("h.0.attn", ".attn", True),
        ("h.0.attn", "h.*.attn", True),
        ("h.0.attn", "ttn", False),
        ("h.0.attn", "x.h.0.attn", False),
        ("h.x.attn", "h.*.attn", False),
        ("h.0", "", False),
        ("", "a", False),
    ],
)
def test_ends_of_paths(path: str, name: str, ends: bool) -> None:
    assert ends_in(path, name) is ends


# ----- batches -----


def test_inputs_get_the_names_that_they_have_in_the_forward() -> None:
    names = names_of_inputs(LlamaForCausalLM(LLAMA))
    assert names[:3] == ("input_ids", "attention_mask", "position_ids")
    x, y = torch.zeros(2, 3), torch.ones(2)
    model = nn.Identity()
    batch, criterion = adapted(((x, None, x), (y, x)), names, model, lambda logits, labels: (logits, labels), True)
    assert list(batch) == ["input_ids", "position_ids", "labels[0]", "labels[1]"]
    logits, labels = criterion({"loss": None, "logits": x}, batch)
    assert logits is x and isinstance(labels, tuple) and labels[0] is y and labels[1] is x
    batch, criterion = adapted([x, y], names, model, lambda logits, labels: labels, True)
    assert list(batch) == ["input_ids", "labels[0]"] and criterion((x,), batch) is y
    assert adapted(({"input_ids": x}, y), names, model, None, False) == ({"input_ids": x}, None)
    mapping = {"input_ids": x}
    assert adapted(mapping, names, model, max, True) == (mapping, max)


def test_whole_logits_have_the_plain_cross_entropy() -> None:
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[0, 1, -100], [4, 3, 2]])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(vocab_parallel_cross_entropy(logits, labels), expected)
    assert vocab_parallel_cross_entropy(logits.half(), labels).dtype == torch.float32
