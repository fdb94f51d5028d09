"""Decoders with attention of their own: OPT, GPT-Neo, GPT-J, BLOOM and Falcon."""

from __future__ import annotations

from typing import Any

from zoo_tests.zoo.base import NUM_CLASSES, PAD_TOKEN, VOCAB_SIZE, Family, Head
from zoo_tests.zoo.labels import answer_spans, causal_loss, of_samples, of_tokens

_CLASSES = {"num_labels": NUM_CLASSES}


def _decoder(prefix: str, *heads: str, precision: str = "fp64", sp: bool = True, **config: Any) -> Family:
    dropout = {} if prefix in ("OPT", "GPTJ") else {"classifier_dropout": 0.0}
    known = {
        "causal_lm": Head(f"{prefix}ForCausalLM", of_tokens(), reference_loss=causal_loss),
        "sequence": Head(f"{prefix}ForSequenceClassification", of_samples(), _CLASSES),
        "token": Head(f"{prefix}ForTokenClassification", of_tokens(NUM_CLASSES), {**_CLASSES, **dropout}),
        "question_answering": Head(f"{prefix}ForQuestionAnswering", answer_spans),
    }
    return Family(
        config_class=f"{prefix}Config",
        config={"vocab_size": VOCAB_SIZE, "pad_token_id": PAD_TOKEN, "bos_token_id": 1, "eos_token_id": 1, **config},
        heads={name: known[name] for name in heads},
        precision=precision,
        sequence_parallel=sp,
    )


_OPT = {
    "hidden_size": 48,
    "word_embed_proj_dim": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "ffn_dim": 83,
    "max_position_embeddings": 40,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_FALCON = {
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "ffn_hidden_size": 86,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "max_position_embeddings": 40,
}
_ALL = ("causal_lm", "sequence", "token", "question_answering")
_WITHOUT_TOKEN = ("causal_lm", "sequence", "question_answering")

# BLOOM, GPT-Neo and GPT-J compute attention in fp32 whatever the dtype.
FAMILIES = {
    "opt": _decoder("OPT", *_WITHOUT_TOKEN, **_OPT),
    "opt_projected": _decoder("OPT", "causal_lm", **{**_OPT, "word_embed_proj_dim": 30, "do_layer_norm_before": False}),
    "gpt_neo": _decoder(
        "GPTNeo",
        *_ALL,
        precision="fp32",
        hidden_size=48,
        num_layers=5,
        attention_types=[[["global", "local"], 2], [["global"], 1]],
        num_heads=4,
        intermediate_size=83,
        window_size=5,
        max_position_embeddings=40,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
    ),
    "gptj": _decoder(
        "GPTJ",
        *_WITHOUT_TOKEN,
        precision="fp32",
        n_embd=48,
        n_layer=5,
        n_head=4,
        n_inner=83,
        rotary_dim=4,
        n_positions=40,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "bloom": _decoder(
        "Bloom",
        *_ALL,
        precision="fp32",
        hidden_size=48,
        n_layer=5,
        n_head=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    "falcon": _decoder("Falcon", *_ALL, **_FALCON, new_decoder_architecture=True, num_kv_heads=4),
    "falcon_multi_query": _decoder("Falcon", "causal_lm", **_FALCON, multi_query=True),
    "falcon_alibi": _decoder(
        "Falcon", "causal_lm", **_FALCON, multi_query=False, alibi=True, parallel_attn=False, bias=True
    ),
}
