"""Configuration of ChatGLM2, with the field names of the original checkpoints."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class ChatGLMConfig(PretrainedConfig):
    """Configuration of a ChatGLM2 model; the defaults are those of the 6B model.

    Args:
        num_layers: number of layers.
        padded_vocab_size: rows of the embedding and of the head.
        hidden_size, ffn_hidden_size: widths; the feed-forward's first projection is twice as wide (SwiGLU).
        kv_channels: size of an attention head; half of it is rotated.
        num_attention_heads: query heads.
        multi_query_attention, multi_query_group_num: whether there are fewer key/value heads than query heads, and
            how many.
        seq_length: longest sequence.
        hidden_dropout, attention_dropout: dropout probabilities.
        layernorm_epsilon, rmsnorm, post_layer_norm: epsilon of the norms, RMS norm instead of layer norm, and whether
            a norm follows the last layer.
        apply_residual_connection_post_layernorm: take the residual after the norm.
        add_bias_linear, add_qkv_bias: which projections have biases.
    """

    model_type = "chatglm"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {"num_hidden_layers": "num_layers", "vocab_size": "padded_vocab_size", "head_dim": "kv_channels"}

    def __init__(
        self,
        num_layers: int = 28,
        padded_vocab_size: int = 65024,
        hidden_size: int = 4096,
        ffn_hidden_size: int = 13696,
        kv_channels: int = 128,
        num_attention_heads: int = 32,
        seq_length: int = 32768,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        rmsnorm: bool = True,
        apply_residual_connection_post_layernorm: bool = False,
        post_layer_norm: bool = True,
        add_bias_linear: bool = False,
        add_qkv_bias: bool = True,
        multi_query_attention: bool = True,
        multi_query_group_num: int = 2,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.num_layers, self.padded_vocab_size = num_layers, padded_vocab_size
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.kv_channels, self.num_attention_heads = kv_channels, num_attention_heads
        self.seq_length = seq_length
        self.hidden_dropout, self.attention_dropout = hidden_dropout, attention_dropout
        self.layernorm_epsilon, self.rmsnorm = layernorm_epsilon, rmsnorm
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.post_layer_norm = post_layer_norm
        self.add_bias_linear, self.add_qkv_bias = add_bias_linear, add_qkv_bias
        self.multi_query_attention = multi_query_attention
        self.multi_query_group_num = multi_query_group_num
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    @property
    def num_key_value_heads(self) -> int:
        """Number of key/value heads."""
        return self.multi_query_group_num if self.multi_query_attention else self.num_attention_heads
