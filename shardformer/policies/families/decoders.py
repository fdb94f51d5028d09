"""Decoders: Llama and its likes, GPT-2 and its likes, OPT, BLOOM, Falcon and ChatGLM2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardformer.attention.own_attention import (
    BloomRegistryAttention,
    FalconRegistryAttention,
    GPTJRegistryAttention,
    OwnAttention,
)
from shardformer.context_parallel.zigzag import Positions
from shardformer.policies.module_edits import use_local_biases
from shardformer.policies.rules import GATHERS, HEADS, Entry, TablePolicy, local, own, rules, variant
from shardformer.shard_spec import Part
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout, ZeroEmbedding


class LlamaPolicy(TablePolicy):
    """Policy for Llama. If there are fewer key/value heads than ranks, they are copied.

    If the number of ranks does not divide the heads, they are distributed in groups, each with one key/value head:
    6 groups over 4 ranks as 2, 2, 1, 1.
    """

    family, prefix = "llama", "Llama"
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    stages = StageLayout(layers="layers", first={"embed_tokens": Received}, every=("rotary_emb",), last=("norm",))
    supports_sequence_parallel = True
    shared_heads = "num_key_value_heads"

    @property
    def uneven_heads(self) -> bool:
        """Whether every rank has a key/value head of its own."""
        return self.model.config.num_key_value_heads >= self.tp_size

    def _query_units(self) -> int:
        """Return the number of units of query heads that are not split: those of a key/value head stay with it."""
        config = self.model.config
        return config.num_key_value_heads if self.uneven_heads else config.num_attention_heads

    def _heads_of_all_groups(self) -> int:
        """Return the query heads per key/value head, times the ranks if each has a key/value head of its own."""
        config = self.model.config
        heads = config.num_attention_heads
        return heads // config.num_key_value_heads * self.tp_size if self.uneven_heads else heads

    table = {
        "{}Model": [rules.vocab("embed_tokens")],
        "{}Attention": [
            GATHERS,
            local(num_key_value_groups=_heads_of_all_groups),
            rules.column("q_proj", num_heads=_query_units, reads="hidden_states"),
            rules.column("k_proj", "v_proj", num_heads="num_key_value_heads", reads="hidden_states"),
            rules.row("o_proj", num_heads=_query_units),
        ],
        "{}MLP": [GATHERS, rules.column("gate_proj", "up_proj"), rules.row("down_proj")],
        "{}DecoderLayer": [rules.rms_norm("input_layernorm", "post_attention_layernorm")],
        "{}ForCausalLM": [rules.head("lm_head")],
    }


class Qwen3Policy(LlamaPolicy):
    """Policy for Qwen3, which normalises the queries and keys of each head with weights shared by all heads."""

    family, prefix = "qwen3", "Qwen3"
    table = {
        **LlamaPolicy.table,
        # Gradients are partial: a rank sees its own heads only.
        "{}Attention": [*LlamaPolicy.table["{}Attention"], rules.head_norm("q_norm", "k_norm")],
    }


MistralPolicy = variant(LlamaPolicy, "mistral", "Mistral")  # its sliding window is in masks, the same on every rank
Qwen2Policy = variant(LlamaPolicy, "qwen2", "Qwen2")


_EMBEDDINGS = {"wte": Received, "wpe": ZeroEmbedding, "drop": IdentityPlaceholder}
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class GPT2Policy(TablePolicy):
    """Policy for GPT-2, with a fused `Conv1D` for query, key and value, each sharded independently."""

    family, prefix = "gpt2", "GPT2"
    heads = ("Model", "LMHeadModel", "DoubleHeadsModel", *_CLASSIFIERS)
    stages = StageLayout(layers="h", first=_EMBEDDINGS, last=("ln_f",))
    supports_sequence_parallel = True
    table = {
        "GPT2Model": [rules.vocab("wte")],
        "GPT2Attention": [
            GATHERS,
            local(num_heads=HEADS, split_size="hidden_size", embed_dim="hidden_size"),
            rules.column("c_attn", num_heads=HEADS, part_size="hidden_size"),
            rules.column("q_attn?", num_heads=HEADS),
            rules.row("c_proj", num_heads=HEADS),
            rules.residual_dropout("resid_dropout"),
        ],
        "GPT2MLP": [GATHERS, rules.column("c_fc"), rules.row("c_proj"), rules.residual_dropout("dropout")],
        "GPT2Block": [rules.layer_norm("ln_1", "ln_2", "ln_cross_attn?")],
        "GPT2LMHeadModel": [rules.head("lm_head")],
        "GPT2DoubleHeadsModel": [rules.head("lm_head")],
    }


class GPTNeoPolicy(TablePolicy):
    """Policy for GPT-Neo."""

    supports_ulysses = False  # attention does not use the registry
    family, prefix = "gpt_neo", "GPTNeo"
    heads = ("Model", "ForCausalLM", *_CLASSIFIERS)
    stages = StageLayout(layers="h", first=_EMBEDDINGS, last=("ln_f",), tuple_output=2)
    supports_sequence_parallel = True
    head_fields = ("num_heads",)
    table = {
        "GPTNeoModel": [rules.vocab("wte")],
        "GPTNeoSelfAttention": [
            GATHERS,
            local("num_heads"),
            rules.column("q_proj", "k_proj", "v_proj", num_heads="num_heads"),
            rules.row("out_proj", num_heads="num_heads"),
            rules.region_dropout("attn_dropout?"),
            rules.residual_dropout("resid_dropout"),
        ],
        "GPTNeoMLP": [GATHERS, rules.column("c_fc"), rules.row("c_proj"), rules.residual_dropout("dropout")],
        "GPTNeoBlock": [rules.layer_norm("ln_1", "ln_2")],
        "GPTNeoForCausalLM": [rules.head("lm_head")],
    }


class GPTJPolicy(TablePolicy):
    """Policy for GPT-J: one norm for both parts, a head with bias, no dropout module since transformers 5.24."""

    family, prefix = "gptj", "GPTJ"
    own_attention = {"GPTJAttention": GPTJRegistryAttention}
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering")
    stages = StageLayout(
        layers="h", first={"wte": Received, "drop": IdentityPlaceholder}, last=("ln_f",), tuple_output=2
    )
    supports_sequence_parallel = True
    table = {
        "GPTJModel": [rules.vocab("wte")],
        "GPTJAttention": [
            GATHERS,
            local(HEADS),
            rules.column("q_proj", "k_proj", "v_proj", num_heads=HEADS),
            rules.row("out_proj", num_heads=HEADS),
            rules.region_dropout("attn_dropout?"),
            rules.residual_dropout("resid_dropout"),
        ],
        "GPTJMLP": [GATHERS, rules.column("fc_in"), rules.row("fc_out"), rules.residual_dropout("dropout")],
        "GPTJBlock": [rules.layer_norm("ln_1")],
        "GPTJForCausalLM": [rules.head("lm_head")],
    }


class OPTPolicy(TablePolicy):
    """Policy for OPT. Its layers flatten batch and sequence before the feed-forward."""

    family, prefix = "opt", "OPT"
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering")
    supports_sequence_parallel = True
    stages = StageLayout(
        layers="decoder.layers",
        first={
            "decoder.embed_tokens": Received,
            "decoder.project_in": IdentityPlaceholder,
            "decoder.embed_positions": ZeroEmbedding,
        },
        last=("decoder.final_layer_norm", "decoder.project_out"),
    )
    table = {
        "OPTDecoder": [rules.vocab("embed_tokens")],
        "OPTAttention": [
            GATHERS,
            local(num_heads=HEADS),
            rules.column("q_proj", "k_proj", "v_proj", num_heads=HEADS),
            rules.row("out_proj", num_heads=HEADS),
        ],
        "OPTDecoderLayer": [
            rules.draw_own_slice(),
            rules.column("fc1", gathers_sequence=True),
            rules.row("fc2"),
            rules.layer_norm("self_attn_layer_norm", "final_layer_norm"),
        ],
        "OPTForCausalLM": [rules.head("lm_head")],
    }

    def position_counter(self) -> Positions:
        """Return a function that counts positions from the attention mask."""

        def of_real_tokens(inputs: Mapping[str, Any]) -> Tensor | None:
            mask = inputs.get("attention_mask")
            return None if mask is None else (mask.cumsum(dim=1) * mask - 1).long()

        return of_real_tokens


_BLOOM_MLP = [GATHERS, rules.column("dense_h_to_4h"), rules.row("dense_4h_to_h")]


class BloomPolicy(TablePolicy):
    """Policy for BLOOM. Every rank builds the biases of all heads and uses those of its own heads."""

    family, prefix = "bloom", "Bloom"
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    supports_sequence_parallel = True
    head_fields: tuple[str, ...] = ("n_head",)
    own_attention: Mapping[str, type[OwnAttention]] = {"BloomAttention": BloomRegistryAttention}
    stages = StageLayout(
        layers="h",
        first={"word_embeddings": Received, "word_embeddings_layernorm": IdentityPlaceholder},
        last=("ln_f",),
        tuple_output=2,
    )

    @property
    def needs(self) -> Mapping[str, Any]:
        """`slow_but_exact` slices whole weights."""
        slices = self.tp_size > 1 and getattr(self.model.config, "pretraining_tp", 1) > 1
        return {"slow_but_exact": False} if slices else {}

    table: Mapping[str, Sequence[Entry]] = {
        "BloomModel": [rules.vocab("word_embeddings")],
        "BloomAttention": [
            GATHERS,
            local(num_heads="n_head"),
            own("_use_local_biases"),
            rules.column("query_key_value", num_heads="n_head"),
            rules.row("dense", num_heads="n_head"),
            rules.region_dropout("attention_dropout"),
        ],
        "BloomMLP": _BLOOM_MLP,
        "BloomBlock": [rules.draw_own_slice(), rules.layer_norm("input_layernorm", "post_attention_layernorm")],
        "BloomForCausalLM": [rules.head("lm_head")],
    }

    def _use_local_biases(self, attention: nn.Module) -> None:
        if self.tp_size > 1:
            use_local_biases(attention, self.model.config.num_attention_heads, self.shard_config.group)


class FalconPolicy(BloomPolicy):
    """Policy for Falcon: one key/value head for all query heads, one per group, or one per query head."""

    family, prefix = "falcon", "Falcon"
    needs: Mapping[str, Any] = {}
    supports_sequence_parallel = True
    own_attention = {"FalconAttention": FalconRegistryAttention}
    stages = StageLayout(
        layers="h", first={"word_embeddings": Received}, every=("rotary_emb",), last=("ln_f",), tuple_output=2
    )

    def head_counts(self) -> Mapping[str, int]:
        """Return the head counts, with key/value heads in the new architecture only."""
        config = self.model.config
        counts = {"num_attention_heads": config.num_attention_heads}
        return counts | ({"num_kv_heads": config.num_kv_heads} if config.new_decoder_architecture else {})

    @property
    def table(self) -> Mapping[str, list[Entry]]:
        """The table; which heads the fused projection has, and what counts them, is in the configuration."""
        config = self.model.config
        heads = config.num_attention_heads
        counts = [local(num_heads=HEADS)]
        if config.new_decoder_architecture:
            fused = rules.column("query_key_value", num_heads="num_kv_heads")
            counts.append(local("num_kv_heads"))
        elif config.multi_query:
            fused = rules.multi_query("query_key_value", num_heads=heads, head_dim=config.hidden_size // heads)
        else:
            fused = rules.column("query_key_value", num_heads=HEADS)
            counts.append(local(num_kv_heads=HEADS))
        return {
            "FalconModel": [rules.vocab("word_embeddings")],
            "FalconAttention": [
                GATHERS,
                *counts,
                own("_use_local_biases"),
                rules.draw_per_rank(),  # SDPA takes the dropout probability of the module and draws the mask itself
                fused,
                rules.row("dense", num_heads=HEADS),
                rules.region_dropout("attention_dropout"),
            ],
            "FalconMLP": _BLOOM_MLP,
            "FalconDecoderLayer": [
                rules.draw_own_slice(),
                rules.layer_norm("input_layernorm?", "post_attention_layernorm?", "ln_attn?", "ln_mlp?"),
            ],
            "FalconForCausalLM": [rules.head("lm_head")],
        }


class ChatGLM2Policy(TablePolicy):
    """Policy for ChatGLM2: fused query, key and value with fewer key/value heads, and fused gate and up projections."""

    family, prefix = "chatglm2", "ChatGLM"
    module = "shardformer.models.chatglm2"
    heads = ("Model", "ForConditionalGeneration", "ForSequenceClassification")
    stages = StageLayout(
        layers="encoder.layers",
        first={"embedding": Received},
        every=("rotary_pos_emb",),
        last=("encoder.final_layernorm", "output_layer"),
    )
    supports_sequence_parallel = True
    shared_heads = "multi_query_group_num"

    @property
    def table(self) -> Mapping[str, list[Entry]]:
        """The table; the kind of norms and of the fused projection is in the configuration."""
        config = self.model.config
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        local_groups = max(1, groups // self.tp_size)
        norms = rules.rms_norm if config.rmsnorm else rules.layer_norm
        return {
            "ChatGLMEmbedding": [rules.vocab("word_embeddings")],
            "ChatGLMSelfAttention": [
                GATHERS,
                local(
                    num_heads=HEADS,
                    num_groups=lambda _: local_groups * self.tp_size,
                    num_key_value_groups=lambda _: heads // local_groups,
                ),
                self._fused_projection(),
                rules.row("dense", num_heads=HEADS),
            ],
            "ChatGLMMLP": [
                GATHERS,
                rules.column("dense_h_to_4h", part_size="ffn_hidden_size"),
                rules.row("dense_4h_to_h"),
            ],
            "ChatGLMBlock": [
                norms("input_layernorm", "post_attention_layernorm"),
                rules.residual_dropout("attention_dropout", "mlp_dropout"),
            ],
            "ChatGLMModel": [rules.head("output_layer")],
        }

    def _fused_projection(self) -> Entry:
        config = self.model.config
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.kv_channels
        if not config.multi_query_attention:
            return rules.column("query_key_value", num_heads=HEADS)
        if groups % self.tp_size == 0:
            return rules.column(
                "query_key_value", parts=tuple(Part(count * size, size) for count in (heads, groups, groups))
            )
        return rules.multi_query("query_key_value", num_heads=heads, num_groups=groups, head_dim=size)
