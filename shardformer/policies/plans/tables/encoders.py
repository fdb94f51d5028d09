"""Plans of text and document encoders, most of them with the module names of BERT or Llama."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardformer.loss.heads import own_loss, with_further_entries
from shardformer.loss.text import classes_of_marked, classes_of_tokens, masked_lm, mean_of_marked, replaced_tokens
from shardformer.policies.plans.plan import Plan
from shardformer.policies.plans.tables import GATED, LLAMA
from shardformer.stages.stage import Received


class ReceivedTokens(Received):
    """Placeholder for an embedding whose token table the model calls directly."""

    @property
    def tok_embeddings(self) -> Received:
        """The placeholder itself."""
        return self


class ReceivedUnscaled(Received):
    """Placeholder for an embedding that returns the factor of its quantised values, too."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return a dummy shaped like the hidden state; None, as nothing is quantised."""
        return self.stage_input.dummy(), None


_BERT_STYLES = {
    "self.query": "colwise",
    "self.key": "colwise",
    "self.value": "colwise",
    "self.dropout": "dropout",
    "output.dense": "rowwise",
    "intermediate.dense": "colwise",
}
_BERT_LOCAL = {"self": ("num_attention_heads", "all_head_size")}
_BERT = Plan(_BERT_STYLES, _BERT_LOCAL)
# Attention is replicated if heads are mixed before they are concatenated.
_FEED_FORWARD = Plan(
    {"intermediate.dense": "colwise", "output.dense": "rowwise", "attention.output.dense": "replicate"}
)
_PAGE_BIASES = ("encoder.rel_pos_bias", "encoder.rel_pos_x_bias", "encoder.rel_pos_y_bias")
_MODERN = Plan(
    {"attn.Wqkv": "fused_colwise", "attn.Wo": "rowwise", "mlp.Wi": "packed_colwise", "mlp.Wo": "rowwise"}
    | {"mlp.drop": "dropout"}
)
# Question answering with a beam search over answer spans has a loss of its own.
_XLM = {
    "styles": {
        "q_lin": "colwise",
        "k_lin": "colwise",
        "v_lin": "colwise",
        "out_lin": "rowwise",
        "lin1": "colwise",
        "lin2": "rowwise",
        "attentions.*": "draws_per_rank",
    },
    "local": {"attentions.*": ("n_heads", "dim")},
    "layers": "attentions",
    "sublayer_lists": ("layer_norm1", "ffns", "layer_norm2"),
    "every": ("position_embeddings", "lang_embeddings", "layer_norm_emb"),
    "first": {"embeddings": Received},
}
_LLAMA = Plan(LLAMA)


def _first_block(model: nn.Module) -> dict[str, int]:
    """Return the last layer of Funnel's first block, which the decoder reads, too."""
    config = model.config
    return {f"encoder.blocks.0.{config.block_sizes[0] - 1}": 1}


def _runs_layers_once(model: nn.Module) -> bool:
    """Return whether no block of Funnel runs several times."""
    return all(count == 1 for count in model.config.block_repeats)


PLANS = {
    # All linear layers and embeddings are classes of its own, which could quantise.
    "ibert": Plan(
        {},
        layers="encoder.layer",
        first={"embeddings": ReceivedUnscaled},
        needs={"quant_mode": False},
        cut_vocabulary=False,
    ),
    "big_bird": Plan(_BERT_STYLES, _BERT_LOCAL, needs={"attention_type": "original_full"}),
    # Every head adds products with the embedding of the distances between boxes, so its gradient is partial.
    "bros": Plan(
        {**_BERT_STYLES, "bbox_projection": "replicated_with_grad_allreduce"},
        _BERT_LOCAL,
        every=("bbox_embeddings",),
        head_losses={
            "BrosForTokenClassification": partial(classes_of_marked, "bbox_first_token_mask"),
            "BrosSpadeEEForTokenClassification": own_loss,
            "BrosSpadeELForTokenClassification": partial(mean_of_marked, "bbox_first_token_mask"),
        },
    ),
    "canine": Plan(
        _BERT_STYLES,
        _BERT_LOCAL,
        layers="encoder.layer",
        kept_outputs={"initial_char_encoder": 1},  # characters are read again after the layers
        changes_shapes=True,
    ),
    "convbert": _FEED_FORWARD,
    # Query, key and value of a head are contiguous.
    "deberta": Plan(
        {**_BERT_STYLES, "self.in_proj": "colwise", "self.pos_proj": "colwise", "self.pos_q_proj": "colwise"}
        | {"self.q_bias": "colwise", "self.v_bias": "colwise"}
        | dict.fromkeys(("self.head_logits_proj", "self.head_weights_proj"), "gathered"),
        _BERT_LOCAL,
        every=("encoder.rel_embeddings",),
        # With legacy=False, the head multiplies with the whole weight of the embedding.
        last=lambda model: ("embeddings.word_embeddings",) if hasattr(model, "lm_predictions") else (),
        cut_vocabulary=lambda model: not hasattr(model, "lm_predictions"),
    ),
    "esm": Plan(_BERT_STYLES, _BERT_LOCAL, whole_logits=True),
    "flaubert": Plan(
        **_XLM,
        needs={"pre_norm": False, "layerdrop": 0.0},
        head_losses={"FlaubertWithLMHeadModel": masked_lm, "FlaubertForQuestionAnswering": own_loss},
    ),
    "esmc": Plan(GATED),  # normalises all heads together
    "fnet": _BERT,
    "funnel": Plan(
        {"ffn.linear_1": "colwise", "ffn.linear_2": "rowwise"},
        layers=("encoder.blocks.*", "decoder.layers"),
        carried_inputs=("key", "value"),
        kept_outputs=_first_block,
        pipelined=_runs_layers_once,
        changes_shapes=True,
        head_losses={"FunnelForPreTraining": replaced_tokens},
    ),
    "gte": _LLAMA,
    "jina_embeddings_v3": Plan({**LLAMA, "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}),
    "layoutlmv3": Plan(
        {
            **_BERT_STYLES,
            "attention.self": "local_biases",
            **dict.fromkeys(_PAGE_BIASES, "replicated_with_grad_allreduce"),
        },
        _BERT_LOCAL,
        every=_PAGE_BIASES,
    ),
    "lilt": Plan(
        {**_BERT_STYLES, "self.layout_query": "colwise", "self.layout_key": "colwise", "self.layout_value": "colwise"}
        | {"layout_output.dense": "rowwise", "layout_intermediate.dense": "colwise"},
        _BERT_LOCAL,
        carried_inputs=("layout_inputs",),
        changes_shapes=True,
    ),
    "longformer": _FEED_FORWARD,
    "luke": Plan(
        # Word and entity queries have separate projections for word and entity keys.
        {**_BERT_STYLES, **dict.fromkeys(("self.w2e_query", "self.e2w_query", "self.e2e_query"), "colwise")},
        _BERT_LOCAL,
        first={"entity_embeddings": Received},
        carried_inputs=("entity_hidden_states",),
        head_losses={"LukeForMaskedLM": with_further_entries(masked_lm, "entity_labels")},
    ),
    "markuplm": _BERT,
    "megatron_bert": _BERT,
    # The head concatenates two weights into one product.
    "mobilebert": Plan(_BERT_STYLES, _BERT_LOCAL, cut_vocabulary=False),
    "modernbert": _MODERN,
    "modernvbert": replace(_MODERN, first={"text_model.embeddings": ReceivedTokens}),
    "mra": replace(_BERT, head_losses={"MraForTokenClassification": classes_of_tokens}),
    "nomic_bert": _LLAMA,
    "nystromformer": Plan(
        {**_BERT_STYLES, "self.conv.weight": "first_dim"},
        {**_BERT_LOCAL, "self.conv": ("groups", "in_channels", "out_channels")},
    ),
    "rembert": _BERT,
    "roc_bert": replace(_BERT, head_losses={"RoCBertForPreTraining": own_loss}),
    "roformer": Plan(_BERT_STYLES, _BERT_LOCAL, every=("encoder.embed_positions",)),
    "squeezebert": Plan({}, changes_shapes=True, calls_forward=True),  # its projections are grouped convolutions
    "tapas": replace(_BERT, head_losses={"TapasForQuestionAnswering": own_loss}),
    "visual_bert": replace(
        _BERT,
        head_losses=dict.fromkeys(("VisualBertForPreTraining", "VisualBertForQuestionAnswering"), own_loss),
    ),
    "xlm": Plan(**_XLM, head_losses={"XLMWithLMHeadModel": masked_lm, "XLMForQuestionAnswering": own_loss}),
    "xlm_roberta_xl": replace(_BERT, head_losses={"XLMRobertaXLForTokenClassification": classes_of_tokens}),
    "xlnet": Plan(
        {"ff.layer_1": "colwise", "ff.layer_2": "rowwise"},
        head_losses={"XLNetLMHeadModel": masked_lm, "XLNetForQuestionAnswering": own_loss},
    ),
    "xmod": _BERT,
    "yoso": replace(_BERT, head_losses={"YosoForTokenClassification": classes_of_tokens}),
}
