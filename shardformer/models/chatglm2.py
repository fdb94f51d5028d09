"""ChatGLM2, implemented from its published description (GLM, arXiv 2103.10360, and the ChatGLM2-6B model card).

Its configuration has the field names, and its modules the names, of the original checkpoints. Attention and masks go
through transformers' registries.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class ChatGLMConfig(PretrainedConfig):
    """Configuration of a ChatGLM2 model; the defaults are those of the 6B model.

    Args:
        padded_vocab_size: rows of the embedding and of the head.
        hidden_size, ffn_hidden_size: widths; the feed-forward's first projection is twice as wide (SwiGLU).
        kv_channels: size of an attention head; half of it is rotated.
        multi_query_attention, multi_query_group_num: whether there are fewer key/value heads than query heads, and
            how many.
        seq_length: longest sequence.
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


_IGNORED = -100
_CACHE = dataclasses.fields(BaseModelOutputWithPast)[1].name  # of a cache: "past_key_values", "cache" since 5.24


class ChatGLMRMSNorm(nn.Module):
    """RMS norm over the last dim (arXiv 1910.07467), computed in at least fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim of `x`, [batch, seq, hidden], in fp32 or wider."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def _norm(config: ChatGLMConfig) -> nn.Module:
    make = ChatGLMRMSNorm if config.rmsnorm else nn.LayerNorm
    return make(config.hidden_size, eps=config.layernorm_epsilon)


class ChatGLMRotary(nn.Module):
    """Rotary embedding (arXiv 2104.09864) of half of a head's features, in adjacent pairs."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        rotated = head_dim // 2
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, rotated, 2).float() / rotated), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [batch, 1, seq, pairs], in fp32, for position_ids [batch, seq]."""
        angles = position_ids[:, None, :, None].float() * self.inv_freq.float()
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first features of x, [batch, heads, seq, head_dim], in adjacent pairs."""
    size = 2 * cos.shape[-1]
    even, odd = x[..., :size].unflatten(-1, (-1, 2)).unbind(-1)  # [batch, heads, seq, pairs]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([turned, x[..., size:]], dim=-1)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attend with query [batch, heads, seq, head_dim] and key, value of fewer heads -> [batch, seq, heads, dim]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]]
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class ChatGLMSelfAttention(nn.Module):
    """Attention with one fused projection: all query heads, then all keys, then all values."""

    def __init__(self, config: ChatGLMConfig, layer_index: int) -> None:
        super().__init__()
        self.config, self.layer_index = config, layer_index
        self.head_dim, self.is_causal = config.kv_channels, True
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_groups
        fused = (self.num_heads + 2 * self.num_groups) * self.head_dim
        has_bias = config.add_bias_linear or config.add_qkv_bias
        self.query_key_value = nn.Linear(config.hidden_size, fused, bias=has_bias)
        self.dense = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.add_bias_linear)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states: [batch, seq, hidden]; output: the same."""
        cache = kwargs.pop(_CACHE, None)
        query, key, value = self._heads(self.query_key_value(hidden_states))
        query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_index)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        scaling = self.head_dim**-0.5
        found, _ = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        return self.dense(found.flatten(2).contiguous())

    def _heads(self, fused: Tensor) -> list[Tensor]:
        """[batch, seq, fused] -> query, key, value, each [batch, heads, seq, head_dim]."""
        if not self.config.multi_query_attention:  # query, key and value of a head are adjacent
            return [x.transpose(1, 2) for x in fused.unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(3)]
        heads = fused.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return list(heads.split([self.num_heads, self.num_groups, self.num_groups], dim=1))


class ChatGLMMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202) with gate and value in one projection."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=config.add_bias_linear)
        self.dense_4h_to_h = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=config.add_bias_linear)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute [batch, seq, hidden] -> [batch, seq, hidden]."""
        gate, value = self.dense_h_to_4h(hidden_states).chunk(2, dim=-1)
        return self.dense_4h_to_h(F.silu(gate) * value)


class ChatGLMBlock(GradientCheckpointingLayer):
    """One transformer layer."""

    def __init__(self, config: ChatGLMConfig, layer_index: int) -> None:
        super().__init__()
        self.residual_behind_norm = config.apply_residual_connection_post_layernorm
        self.input_layernorm = _norm(config)
        self.self_attention = ChatGLMSelfAttention(config, layer_index)
        self.post_attention_layernorm = _norm(config)
        self.mlp = ChatGLMMLP(config)
        self.attention_dropout = nn.Dropout(config.hidden_dropout)
        self.mlp_dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        normed = self.input_layernorm(hidden_states)
        residual = normed if self.residual_behind_norm else hidden_states
        hidden_states = residual + self.attention_dropout(self.self_attention(normed, **kwargs))
        normed = self.post_attention_layernorm(hidden_states)
        residual = normed if self.residual_behind_norm else hidden_states
        return residual + self.mlp_dropout(self.mlp(normed))


class ChatGLMEmbedding(nn.Module):
    """Token embedding, under the original's name."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look up ids [batch, seq]: [batch, seq, hidden]."""
        return self.word_embeddings(input_ids)


class ChatGLMTransformer(nn.Module):
    """Stack of layers, and the final norm."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ChatGLMBlock(config, index) for index in range(config.num_layers))
        self.final_layernorm = _norm(config) if config.post_layer_norm else None

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run all layers on [batch, seq, hidden]."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        return hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)


class ChatGLMPreTrainedModel(PreTrainedModel):
    """Base class of the models: initialization and loading."""

    config_class = ChatGLMConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ChatGLMBlock"]
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True
    _keys_to_ignore_on_load_unexpected = [r"rotary_pos_emb\.inv_freq"]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ChatGLMRotary):  # not in checkpoints
            rotated = 2 * module.inv_freq.numel()
            frequencies = 10000.0 ** -(torch.arange(0, rotated, 2).float() / rotated)
            module.inv_freq.data = frequencies.to(module.inv_freq.device)


class ChatGLMModel(ChatGLMPreTrainedModel):
    """Model without a head. It owns the head's weight, `output_layer`, as in the original."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        for name, plain in (("rope_ratio", 1), ("original_rope", True), ("pre_seq_len", None)):
            if (value := getattr(config, name, plain)) != plain:  # of later checkpoints with these class names
                raise ValueError(
                    f"{name}={value} is not computed by this ChatGLM2; use a checkpoint with {name}={plain}"
                )
        self.embedding = ChatGLMEmbedding(config)
        self.rotary_pos_emb = ChatGLMRotary(config.kv_channels)
        self.encoder = ChatGLMTransformer(config)
        self.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of the vocabulary."""
        return self.embedding.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of the vocabulary."""
        self.embedding.word_embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids, attention_mask, position_ids: [batch, seq]; last_hidden_state: [batch, seq, hidden]."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        embeds = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(embeds.shape[1], device=embeds.device) + seen)[None]
        hidden_states = self.encoder(
            embeds,
            position_embeddings=self.rotary_pos_emb(position_ids),
            attention_mask=create_causal_mask(self.config, embeds, attention_mask, cache, position_ids=position_ids),
            **{_CACHE: cache if use_cache else None},
        )
        return BaseModelOutputWithPast(hidden_states, cache)


class ChatGLMForConditionalGeneration(ChatGLMPreTrainedModel, GenerationMixin):
    """Causal language model: token t predicts token t + 1."""

    _tied_weights_keys = {"transformer.output_layer.weight": "transformer.embedding.word_embeddings.weight"}

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.transformer = ChatGLMModel(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.transformer.output_layer

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.transformer.output_layer = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        cache: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """logits: [batch, seq, padded vocabulary]; labels: [batch, seq], not shifted (this method shifts them)."""
        outputs = self.transformer(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, cache, **kwargs
        )
        logits = self.transformer.output_layer(outputs.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            wide = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(wide.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        return CausalLMOutputWithPast(loss, logits, getattr(outputs, _CACHE))


class ChatGLMForSequenceClassification(ChatGLMPreTrainedModel):
    """Classifier of a sequence by its last token that is not padding."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ChatGLMModel(config)
        self.classifier_head = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """logits: [batch, classes]; labels: [batch]."""
        outputs = self.transformer(input_ids, attention_mask, **kwargs)
        hidden = outputs.last_hidden_state
        last = torch.full((len(hidden),), hidden.shape[1] - 1, device=hidden.device)
        if attention_mask is not None:  # also correct for padding on the left
            last = (attention_mask * torch.arange(hidden.shape[1], device=hidden.device)).argmax(1)
        logits = self.classifier_head(hidden[torch.arange(len(hidden), device=hidden.device), last])
        loss = None if labels is None else F.cross_entropy(logits, labels, ignore_index=_IGNORED)
        return SequenceClassifierOutputWithPast(loss, logits, getattr(outputs, _CACHE))
