"""The model and the layouts of `links.py`, for four ranks on two machines."""

from __future__ import annotations

import torch

from plugins.hybrid_parallel.planner.kernel_timing import Case
from plugins.hybrid_parallel.planner.layout import Layout

LENGTH, BATCH, VOCABULARY = 64, 8, 1000
CASES = tuple(Case(tp, False, rows) for tp in (1, 2, 4) for rows in (1, 4))
ROWS = (1, 4)


def layouts() -> tuple[Layout, ...]:
    """The layouts that are predicted and measured."""
    return (
        Layout(4, 1, 1, rows=2, precision="fp32"),
        Layout(2, 2, 1, rows=4, precision="fp32"),
        Layout(1, 2, 2, rows=2, num_microbatches=4, precision="fp32"),
        Layout(1, 1, 4, rows=1, num_microbatches=8, precision="fp32"),
        Layout(2, 1, 2, rows=1, num_microbatches=4, precision="fp32"),
        Layout(1, 4, 1, rows=8, precision="fp32"),
    )


def build() -> torch.nn.Module:
    """Return the model: 4 layers of Llama, 5.3 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)
