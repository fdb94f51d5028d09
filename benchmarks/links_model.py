"""The model and the layouts of `links.py`, for two and four ranks on two machines."""

from __future__ import annotations

import torch

from plugins.hybrid_parallel.planner.calibrate import Case
from plugins.hybrid_parallel.planner.layout import Layout

LENGTH, BATCH, VOCABULARY = 64, 8, 1000
ROWS = (1, 4)


def cases(ranks: int) -> tuple[Case, ...]:
    """What is measured of the model for the predictions."""
    return tuple(Case(tp, False, rows) for tp in (1, 2, 4) if tp <= ranks for rows in ROWS)


def layouts(ranks: int) -> tuple[Layout, ...]:
    """The layouts that are predicted and measured."""
    if ranks == 2:
        return (
            Layout(2, 1, 1, rows=4, precision="fp32"),
            Layout(2, 1, 1, rows=1, num_microbatches=4, precision="fp32"),
            Layout(1, 2, 1, rows=8, precision="fp32"),
            Layout(1, 1, 2, rows=2, num_microbatches=4, precision="fp32"),
            Layout(1, 1, 2, rows=4, num_microbatches=2, precision="fp32"),
            Layout(1, 1, 2, rows=1, num_microbatches=8, precision="fp32"),
        )
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
