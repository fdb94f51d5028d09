"""The zoo: one small file a family."""

from zoo_tests.zoo.base import Batch, Family, Head
from zoo_tests.zoo.bert import BERT
from zoo_tests.zoo.gpt2 import GPT2
from zoo_tests.zoo.llama import LLAMA

FAMILIES: dict[str, Family] = {"bert": BERT, "llama": LLAMA, "gpt2": GPT2}

__all__ = ["FAMILIES", "Batch", "Family", "Head"]
