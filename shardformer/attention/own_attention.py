"""Attention that a family computes in its own code, computed by a kernel of the registry instead.

Each class replaces the part of a native attention between projections: it gives the kernel query, key, value and one
additive bias [batch, heads or 1, queries, keys], which holds masks, ALiBi (arXiv 2108.12409) and relative positions.
The model keeps the masks that it builds. A kernel returns no attention weights: where `output_attentions` asks for
them, the native code runs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.attention.registry import uses_registry
from shardformer.utils.derived_modules import derive, replace_modules


class OwnAttention(nn.Module):
    """Base class: an attention that reads the kernel's name from a configuration of its own."""

    attends_by_registry = True
    is_even_where_blind = True  # as a plain softmax in rows without a key; False if the native code calls SDPA
    _supports_sdpa = True  # of a bias; flash kernels take none

    @staticmethod
    def serves(config: Any) -> bool:
        """Return whether the class computes what the native one does under the model's configuration."""
        return True

    def needs_native(self, output_attentions: bool) -> bool:
        """Whether native code must give attention weights; ValueError if it would see a slice of the sequence."""
        if output_attentions and getattr(self, "sequence_exchange", None) is not None:
            raise ValueError(
                "output_attentions=True is not possible under sequence_parallelism_mode='all_to_all', where no rank "
                f"has all weights of {type(self).__name__}; use output_attentions=False"
            )
        return output_attentions

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """Run the kernel; query, key, value: [batch, heads, seq, head_dim] -> [batch, seq, heads * head_dim].

        Args:
            query, key, value: of this rank's heads, or of its slice of the sequence.
            bias: additive or boolean mask; None for plain causal attention.
            options: `dropout` and `scaling` of the kernel.
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if bias is not None and bias.is_floating_point() and bias.dtype != query.dtype:
            bias = bias.clamp(min=torch.finfo(query.dtype).min).to(query.dtype)
        kernel = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        if self.is_even_where_blind:
            options["around"] = uniform_rows_without_keys
        return kernel(self, query, key, value, bias, is_causal=bias is None, **options)[0].flatten(2)

    def drops(self, dropout: nn.Module) -> float:
        """Return the probability of a dropout module, 0.0 outside of training."""
        return dropout.p if self.training else 0.0


def uniform_rows_without_keys(
    kernel: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run a kernel whose numbers are those of a plain softmax also in rows that see no key (left padding).

    Their scores all round to the lowest number, so a softmax weighs all keys equally, and its gradients are those of
    equal weights; kernels differ there. The output of such a row is the mean of the values, plus a term of value 0
    that is linear in query and key and has these gradients. No other row changes.

    Args:
        kernel: a function of the registry.
        module, query, key, value, scaling, options: its arguments; query, key, value: [batch, heads, seq, head_dim].
        bias: additive, [batch, 1 or heads, queries, keys]; the kernel alone runs with a boolean mask or none.
    """
    if bias is None or not bias.is_floating_point() or bias.dim() != 4:
        return kernel(module, query, key, value, bias, scaling=scaling, **options)
    blind = (bias <= torch.finfo(bias.dtype).min / 2).all(-1, keepdim=True)  # [batch, 1 or heads, queries, 1]
    found, _ = kernel(module, query, key, value, bias.masked_fill(blind, 0.0), scaling=scaling, **options)
    mean = value.mean(-2, keepdim=True)
    slope = query @ (key.transpose(-1, -2) @ (value - mean).detach()) * (scaling / key.shape[-2])
    even = mean + (slope - slope.detach())
    return torch.where(blind.transpose(1, 2), even.transpose(1, 2), found), None  # [batch, seq, heads, head_dim]


def route_own_attention(model: nn.Module, classes: Mapping[str, type[OwnAttention]]) -> None:
    """Replace the attentions of `model` that are named in `classes`, so that kernels can be chosen for them."""
    found = {}
    for module in model.modules():
        methods = classes.get(type(module).__name__)
        if methods is None or isinstance(module, OwnAttention) or not methods.serves(model.config):
            continue
        if uses_registry(module):  # in this release of transformers
            continue
        module.config = copy.deepcopy(model.config)  # the model's own name stays: it chooses the model's masks
        module.config._attn_implementation = "sdpa"
        found[module] = derive(module, methods)
    replace_modules(model, found)


class BloomRegistryAttention(OwnAttention):
    """BLOOM: ALiBi is added to the scores."""

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states: [batch, seq, hidden]; alibi: [batch * heads, 1, keys]."""
        if self.needs_native(output_attentions):
            return super().forward(hidden_states, residual, alibi, attention_mask, layer_past, False, True, **kwargs)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        bias = alibi.unflatten(0, (len(hidden_states), -1))
        bias = bias if attention_mask is None else bias + attention_mask
        options = {"dropout": self.drops(self.attention_dropout), "scaling": self.inv_norm_factor}
        found = self.dense(self.attend(query, key, value, bias, **options))
        return residual + F.dropout(found, self.hidden_dropout, self.training), None


class FalconRegistryAttention(OwnAttention):
    """Falcon: rotary positions, or ALiBi, which the model adds to its mask for SDPA."""

    @property
    def is_even_where_blind(self) -> bool:
        """Whether native SDPA gets one key head for all, a plain softmax; not by a rank's `num_kv_heads`."""
        return self.multi_query and not self.new_decoder_architecture

    @staticmethod
    def serves(config: Any) -> bool:
        """Return whether the model was built for SDPA: its eager attention adds ALiBi a second time."""
        return config._attn_implementation == "sdpa"

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """hidden_states: [batch, seq, hidden]; attention_mask: boolean, or with ALiBi."""
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        if self.needs_native(output_attentions):
            rest = (layer_past, use_cache, True, position_embeddings)
            return super().forward(hidden_states, alibi, attention_mask, position_ids, *rest, **kwargs)
        query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        if alibi is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
        dropout = 0.0 if alibi is None else self.drops(self.attention_dropout)  # as the native code
        found = self.attend(query, key, value, attention_mask, dropout=dropout, scaling=self.inv_norm_factor)
        return self.dense(found), None


class GPTJRegistryAttention(OwnAttention):
    """GPT-J. The native forward calls `_attn`."""

    def forward(self, *args: Any, output_attentions: bool = False, **kwargs: Any) -> Any:
        """Run the native forward around a kernel, or around the native `_attn` if it must return weights."""
        self.returns_weights = self.needs_native(bool(output_attentions))
        return super().forward(*args, output_attentions=output_attentions, **kwargs)

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Any:
        if self.returns_weights:
            return super()._attn(query, key, value, attention_mask)
        options = {"dropout": self.drops(self.attn_dropout), "scaling": self.head_dim**-0.5}
        found = self.attend(query, key, value, attention_mask, **options)
        return found.unflatten(-1, (-1, value.shape[-1])).transpose(1, 2), None


class MPNetRegistryAttention(OwnAttention):
    """MPNet: one table of relative positions for all layers."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """hidden_states: [batch, seq, hidden]; position_bias: [1, heads, queries, keys]."""
        if self.needs_native(output_attentions):
            return super().forward(hidden_states, attention_mask, position_bias, True, **kwargs)
        heads_last = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (x(hidden_states).view(heads_last).transpose(1, 2) for x in (self.q, self.k, self.v))
        parts = [bias for bias in (position_bias, attention_mask) if bias is not None]
        bias = sum(parts[1:], parts[0]) if parts else query.new_zeros(())
        options = {"dropout": self.drops(self.dropout), "scaling": self.attention_head_size**-0.5}
        return (self.o(self.attend(query, key, value, bias, **options)),)


class MvpRegistryAttention(OwnAttention):
    """MVP without prompts: the attention of BART, which has the same names."""

    is_causal = False

    def forward(
        self, hidden_states: Tensor, output_attentions: bool = False, attn_prompt: None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [batch, seq, hidden]."""
        from transformers.models.bart.modeling_bart import BartAttention

        if self.needs_native(output_attentions):
            return super().forward(hidden_states, output_attentions=True, attn_prompt=attn_prompt, **kwargs)
        return BartAttention.forward(self, hidden_states, around=uniform_rows_without_keys, **kwargs)


class Swinv2RegistryAttention(OwnAttention):
    """SwinV2: cosines of query and key with a learned scale per head (arXiv 2111.09883), and relative positions."""

    is_even_where_blind = False  # every window has patches

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
    ) -> tuple[Tensor, ...]:
        """hidden_states: [batch * windows, patches, hidden]; attention_mask: [windows, patches, patches]."""
        if self.needs_native(bool(output_attentions)):
            return super().forward(hidden_states, attention_mask, output_attentions)
        heads_last = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        projections = (self.query, self.key, self.value)
        query, key, value = (layer(hidden_states).view(heads_last).transpose(1, 2) for layer in projections)
        scale = torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
        query, key = F.normalize(query, dim=-1) * scale, F.normalize(key, dim=-1)
        table = self.continuous_position_bias_mlp(self.relative_coords_table).view(-1, self.num_attention_heads)
        patches = hidden_states.shape[1]
        bias = table[self.relative_position_index.view(-1)].view(1, patches, patches, -1).permute(0, 3, 1, 2)
        bias = 16 * torch.sigmoid(bias)
        if attention_mask is not None:
            windows = attention_mask.repeat(len(hidden_states) // len(attention_mask), 1, 1)
            bias = bias + 2 * windows.unsqueeze(1)  # the native code adds it twice
        return (self.attend(query, key, value, bias, dropout=self.drops(self.dropout), scaling=1.0),)


class DebertaRegistryAttention(OwnAttention):
    """DeBERTa-v2: disentangled content and position (arXiv 2006.03654), whose cross terms are the bias."""

    is_even_where_blind = False  # nothing reads the rows of padding, which alone see no key

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """hidden_states: [batch, seq, hidden]; attention_mask: [batch, 1, seq, seq]."""
        if self.needs_native(output_attentions):
            rest = (query_states, relative_pos, rel_embeddings)
            return super().forward(hidden_states, attention_mask, output_attentions, *rest)
        heads = self.num_attention_heads
        reads = (hidden_states if query_states is None else query_states, hidden_states, hidden_states)
        layers = (self.query_proj, self.key_proj, self.value_proj)
        flat = [self.transpose_for_scores(layer(x), heads) for layer, x in zip(layers, reads, strict=True)]
        factor = 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)
        mask = attention_mask.bool()
        bias = torch.zeros_like(mask, dtype=flat[0].dtype)
        if self.relative_attention:
            tables = self.pos_dropout(rel_embeddings)
            terms = self.disentangled_attention_bias(*flat[:2], relative_pos, tables, factor)
            bias = terms.view(-1, heads, *terms.shape[-2:])
        bias = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        query, key, value = (x.view(-1, heads, *x.shape[-2:]) for x in flat)
        options = {"dropout": self.drops(self.dropout), "scaling": 1 / _float32_root(query.shape[-1] * factor)}
        return self.attend(query, key, value, bias, **options), None


def _float32_root(number: int) -> float:
    """Return the root of number in fp32, which DeBERTa takes in every precision: 1e-8 of a score in fp64.

    Rounded by arithmetic (Dekker, Numer. Math. 18, 1971, split of a float), which a graph can hold.
    """
    root = math.sqrt(number)
    split = root * (2**29 + 1)  # 53 - 24 bits of the mantissa go
    return split - (split - root)
