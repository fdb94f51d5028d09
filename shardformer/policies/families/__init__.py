"""Policies of model families, in one file for each kind of architecture."""

from __future__ import annotations

# File -> its families, so that a family is found without importing the others.
FILES = {
    "decoders": "bloom chatglm2 falcon gpt2 gpt_neo gptj llama mistral opt qwen2 qwen3",
    "encoders": (
        "albert bert bert_generation camembert data2vec_text deberta_v2 distilbert electra ernie layoutlm mpnet "
        "roberta roberta_prelayernorm splinter xlm_roberta"
    ),
    "encoder_decoders": (
        "bart blenderbot blenderbot_small m2m_100 marian mbart mt5 mvp pegasus plbart t5 umt5 whisper"
    ),
    "vision": "beit blip_2 clip deit sam swin swinv2 vit",
}
