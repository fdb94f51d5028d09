"""Llama: a decoder with rotary embeddings and fewer key/value heads than query heads."""

from __future__ import annotations

from zoo_tests.zoo.base import NUM_CLASSES, PAD_TOKEN, VOCAB_SIZE, Family, Head
from zoo_tests.zoo.labels import answer_spans, causal_loss, of_samples, of_tokens, token_loss

_CLASSES = {"num_labels": NUM_CLASSES}

LLAMA = Family(
    config_class="LlamaConfig",
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
    },
    heads={
        "causal_lm": Head("LlamaForCausalLM", of_tokens(), reference_loss=causal_loss),
        "sequence": Head("LlamaForSequenceClassification", of_samples(), _CLASSES),
        "token": Head(
            "LlamaForTokenClassification",
            of_tokens(NUM_CLASSES),
            {**_CLASSES, "classifier_dropout": 0.0},
            reference_loss=token_loss,
        ),
        "question_answering": Head("LlamaForQuestionAnswering", answer_spans),
    },
)
