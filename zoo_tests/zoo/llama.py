"""Decoders with rotary embeddings and fewer key/value heads than query heads: Llama, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from typing import Any

from zoo_tests.zoo.base import NUM_CLASSES, PAD_TOKEN, VOCAB_SIZE, Family, Head
from zoo_tests.zoo.labels import answer_spans, causal_loss, of_samples, of_tokens, token_loss

_CLASSES = {"num_labels": NUM_CLASSES}


def _like_llama(prefix: str, **config: Any) -> Family:
    """A family whose modules and heads have Llama's names."""
    return Family(
        config_class=f"{prefix}Config",
        config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,  # fewer than tp4
            "intermediate_size": 83,
            "max_position_embeddings": 40,
            "pad_token_id": PAD_TOKEN,
            "tie_word_embeddings": False,
            **config,
        },
        heads={
            "causal_lm": Head(f"{prefix}ForCausalLM", of_tokens(), reference_loss=causal_loss),
            "sequence": Head(f"{prefix}ForSequenceClassification", of_samples(), _CLASSES),
            "token": Head(
                f"{prefix}ForTokenClassification",
                of_tokens(NUM_CLASSES),
                {**_CLASSES, "classifier_dropout": 0.0},
                reference_loss=token_loss,
            ),
            "question_answering": Head(f"{prefix}ForQuestionAnswering", answer_spans),
        },
        attention_dropout="attention_dropout",
        attention_output="self_attn.o_proj",
    )


LLAMA = _like_llama("Llama")
# The windows are shorter than the sequences, and Qwen's layers differ in whether they have one.
MISTRAL = _like_llama("Mistral", sliding_window=5, head_dim=16)
QWEN2 = _like_llama("Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=2)
# As many key/value heads as tp4: copies would send partial gradients through its norms, which round them to fp32.
QWEN3 = _like_llama("Qwen3", head_dim=16, num_attention_heads=8, num_key_value_heads=4, attention_bias=True)

FAMILIES = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}
