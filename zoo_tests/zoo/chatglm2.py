"""ChatGLM2, with fewer key/value heads than tp4 has ranks."""

from __future__ import annotations

from zoo_tests.zoo.base import NUM_CLASSES, PAD_TOKEN, VOCAB_SIZE, Family, Head
from zoo_tests.zoo.labels import causal_loss, of_samples, of_tokens

CHATGLM2 = Family(
    config_class="ChatGLMConfig",
    config={
        "num_layers": 5,
        "padded_vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "ffn_hidden_size": 83,
        "kv_channels": 16,
        "num_attention_heads": 4,
        "multi_query_group_num": 2,
        "seq_length": 40,
        "pad_token_id": PAD_TOKEN,
    },
    heads={
        "generation": Head("ChatGLMForConditionalGeneration", of_tokens(), reference_loss=causal_loss),
        "sequence": Head("ChatGLMForSequenceClassification", of_samples(), {"num_labels": NUM_CLASSES}),
    },
    attention_dropout="attention_dropout",
    attention_output="self_attention.dense",
    module="shardformer.models.chatglm2",
)

FAMILIES = {"chatglm2": CHATGLM2}
