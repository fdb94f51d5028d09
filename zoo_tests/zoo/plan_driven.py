"""Decoders that are sharded by a plan: Gemma, Phi-3, GLM, OLMo 2, Qwen3-Next, experts; CPM-Ant by one of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import transformers

from zoo_tests.zoo.base import VOCAB_SIZE, Family, Head
from zoo_tests.zoo.labels import of_tokens
from zoo_tests.zoo.llama import _like_llama

_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "intermediate_size": 48,
}


def _rounding(family: Family) -> Family:
    """Gemma's norms and masks round to fp32, and the kernel of experts has no fp64."""
    return replace(family, precision="fp32")


def _gemma3(**config: Any) -> Family:
    family = _like_llama("Gemma3", **config)
    heads = {
        "causal_lm": family.heads["causal_lm"],
        "sequence": replace(family.heads["sequence"], model_class="Gemma3TextForSequenceClassification"),
    }
    return _rounding(replace(family, heads=heads, config_class="Gemma3TextConfig"))


def _plan_driven(prefix: str, **config: Any) -> Family:
    family = _like_llama(prefix, **config)
    heads = {name: head for name, head in family.heads.items() if hasattr(transformers, head.model_class)}
    # Attention is on all heads of every rank (Phi-3, GLM), or soft-capped, which SDPA leaves out (Gemma 2).
    return replace(family, heads=heads, attention_dropout=None)


GEMMA2 = _rounding(_plan_driven("Gemma2", head_dim=16, sliding_window=5))
GEMMA3 = _gemma3(head_dim=16, sliding_window=5)
PHI3 = _plan_driven("Phi3")
GPT_NEOX = _plan_driven("GPTNeoX")
GLM = _plan_driven("Glm", head_dim=16)
GLM4 = _plan_driven("Glm4", head_dim=16)
# Norms over the queries and keys of all heads, which are gathered for them.
OLMO2 = _rounding(_plan_driven("Olmo2"))
MIXTRAL = _rounding(_plan_driven("Mixtral", **_EXPERTS))
QWEN3_MOE = _rounding(_plan_driven("Qwen3Moe", head_dim=16, **_EXPERTS))
# Linear attention in the last layer, too, which has no mask that knows how long the sequences are.
QWEN3_NEXT = _rounding(
    _plan_driven(
        "Qwen3Next",
        head_dim=16,
        full_attention_interval=2,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=24,
        **_EXPERTS,
    )
)
# Position biases of all layers, embeddings that are registered after the layers, a vocabulary with rows for prompts.
CPM_ANT = Family(
    config_class="CpmAntConfig",
    config={
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "dim_head": 12,
        "dim_ff": 83,
        "position_bias_num_buckets": 16,
        "position_bias_max_distance": 32,
        "prompt_types": 4,
        "prompt_length": 3,
        "segment_types": 5,
        "dropout_p": 0.0,
    },
    heads={"causal_lm": Head("CpmAntForCausalLM", of_tokens())},
    attention_output="self_attention.attention_out",
    attention_by_hand=True,
    sequence_parallel=False,
)

FAMILIES = {
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "gpt_neox": GPT_NEOX,
    "glm": GLM,
    "glm4": GLM4,
    "olmo2": OLMO2,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "cpmant": CPM_ANT,
}
