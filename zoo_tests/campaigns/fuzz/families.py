"""The families that are drawn: the zoo's, and others of transformers that share their sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import transformers

from zoo_tests.zoo import FAMILIES as ZOO
from zoo_tests.zoo import Family
from zoo_tests.zoo.llama import _like_llama


def _decoder(prefix: str, precision: str = "fp64", **config: Any) -> Family:
    family = _like_llama(prefix, **config)
    heads = {name: head for name, head in family.heads.items() if hasattr(transformers, head.model_class)}
    return replace(family, heads=heads, precision=precision)


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_OTHERS = {
    "arcee": _decoder("Arcee"),
    "cohere": _decoder("Cohere", precision="fp32", logit_scale=0.5),
    "ernie4_5": _decoder("Ernie4_5", precision="fp32", use_bias=True),
    "exaone4": _decoder("Exaone4", precision="fp32"),
    "gemma": _decoder("Gemma", precision="fp32", head_dim=16),
    "granite": _decoder("Granite", residual_multiplier=0.5, logits_scaling=2.0),
    "helium": _decoder("Helium", precision="fp32", head_dim=12),
    "nemotron": _decoder("Nemotron"),
    "olmo": _decoder("Olmo"),
    "olmo2": _decoder("Olmo2", precision="fp32"),
    "olmoe": _decoder("Olmoe", precision="fp32", **_EXPERTS, intermediate_size=84),
    "phi": _decoder("Phi", resid_pdrop=0.0, embd_pdrop=0.0),
    "qwen2_moe": _decoder("Qwen2Moe", precision="fp32", shared_expert_intermediate_size=30, **_EXPERTS),
    "seed_oss": _decoder("SeedOss", head_dim=12, attention_dropout=0.0, residual_dropout=0.0),
    "smollm3": _decoder("SmolLM3", no_rope_layer_interval=2),
    "stablelm": _decoder("StableLm", use_qkv_bias=True, partial_rotary_factor=0.5),
    "starcoder2": _decoder("Starcoder2", residual_dropout=0.0, embedding_dropout=0.0),
}

# Left out are models of several towers, whose batches leave little to draw, and the one that this package brings along.
_LEFT_OUT = ("chatglm2", "sam", "blip_2", "blip_2_t5", "clip", "clip_towers")

FAMILIES: dict[str, Family] = {name: family for name, family in (ZOO | _OTHERS).items() if name not in _LEFT_OUT}

MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "qwen2_moe")
# Of them plain transformers takes no other numbers of heads, no 16 bit, and no row without labels.
FIXED_HEADS = ("helium", "clip_text")
NOT_IN_16_BIT = ("glm4", "m2m_100")
LAST_LABEL = ("mbart", "plbart")
UNEVEN_HEADS = ("llama", "mistral", "qwen2", "vit")
SHARE_SEQUENCES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "glm", "mixtral", "gpt2", "opt", "bert", "roberta"),
    *("electra", "olmo", "olmo2", "granite", "starcoder2", "arcee", "qwen3_moe"),
)
EXCHANGE_HEADS = (
    *("bert", "bert_generation", "camembert", "data2vec_text", "deit", "distilbert", "electra", "ernie", "gemma3"),
    *("glm", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "roberta", "splinter", "vit"),
)
