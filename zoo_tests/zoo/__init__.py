"""The zoo: one small file a family."""

from zoo_tests.zoo.base import Batch, Family, Head
from zoo_tests.zoo.bert import BERT, ROBERTA
from zoo_tests.zoo.gpt2 import GPT2
from zoo_tests.zoo.llama import LLAMA, MISTRAL, QWEN2, QWEN3

FAMILIES: dict[str, Family] = {
    "bert": BERT,
    "roberta": ROBERTA,
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}

__all__ = ["FAMILIES", "Batch", "Family", "Head"]
