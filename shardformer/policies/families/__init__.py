"""Policies of model families, one file for a family or for some with the same modules."""

from __future__ import annotations

# File -> its families, so that a family is found without importing the others.
FILES = {
    "albert": "albert",
    "bart": "bart blenderbot blenderbot_small m2m_100 marian mbart mvp pegasus plbart whisper",
    "bert": (
        "bert bert_generation camembert data2vec_text distilbert electra ernie layoutlm mpnet roberta "
        "roberta_prelayernorm splinter xlm_roberta"
    ),
    "blip_2": "blip_2",
    "bloom": "bloom falcon",
    "chatglm2": "chatglm2",
    "clip": "clip",
    "deberta_v2": "deberta_v2",
    "gpt2": "gpt2 gpt_neo gptj",
    "llama": "llama mistral qwen2 qwen3",
    "opt": "opt",
    "sam": "sam",
    "swin": "swin swinv2",
    "t5": "mt5 t5 umt5",
    "vit": "beit deit vit",
}
