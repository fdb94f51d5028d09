"""GPT-2, GPT-Neo and GPT-J."""

from __future__ import annotations

from shardformer.attention.own_attention import GPTJRegistryAttention
from shardformer.policies.table import GATHERS, HEADS, TablePolicy, local, rules
from shardformer.stages.stage import IdentityPlaceholder, Received, StageLayout, ZeroEmbedding

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
    """Policy for GPT-J. Attention and feed-forward read the same norm, and the head has a bias.

    Since transformers 5.24 its attention uses the registry, and has no module of dropout.
    """

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
