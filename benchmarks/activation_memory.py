"""Bytes that a layer saves for its backward pass, against the formula of arXiv 2205.05198, sections 4 and 5.

The layer is one of GPT-2 in bf16, with dropout and eager attention, which saves its scores. It is the layer of the
paper, which saves s b h (34 + 5 a s / h) bytes. Tensor parallelism shards all but 10 of the 34, sequence parallelism
shards those too; selective recomputation drops 5 a s / h. The paper counts one byte for each element of a dropout
mask, as torch does on GPUs; on CPUs torch saves the factors, two bytes in bf16. With the m bytes of the device, the
formula is s b h (32 + 2 m + (4 + m) a s / h). Fused attention saves no scores, like selective recomputation.
Recomputation of whole layers keeps the input, 2 s b h; recomputation by operators also keeps the results of the six
products with weights (3 before the attention, 1 after it, 4 + 1 of the MLP), 18 s b h.

A dispatch mode counts all storages that are alive once the loss is computed. The difference between models of four and
two layers is the memory of two layers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2ForSequenceClassification

from benchmarks.harness import run_ranks, table
from benchmarks.live_bytes import LiveBytes
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

BATCH, HIDDEN, HEADS = 2, 512, 8
_MASK_BYTES = 1 if torch.cuda.is_available() else 2

# name -> options of the plugin
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tp_size": 2},
    "tp2, sequence parallel": {"tp_size": 2, "enable_sequence_parallelism": True},
    "tp2, sequence parallel, selective": {
        "tp_size": 2,
        "enable_sequence_parallelism": True,
        "gradient_checkpointing": "selective",
    },
    "tp2, sequence parallel, operators": {
        "tp_size": 2,
        "enable_sequence_parallelism": True,
        "gradient_checkpointing": "operators",
    },
    "tp2, sequence parallel, full": {
        "tp_size": 2,
        "enable_sequence_parallelism": True,
        "gradient_checkpointing": "full",
    },
}
_OF_RECOMPUTED = {"operators": 20, "full": 2}


def formula(options: dict[str, Any], length: int) -> float:
    """Return the bytes per layer and rank by the paper's formula."""
    ranks, sequence = options.get("tp_size", 1), options.get("enable_sequence_parallelism", False)
    if (kept := _OF_RECOMPUTED.get(options.get("gradient_checkpointing"))) is not None:
        return BATCH * length * HIDDEN * kept / ranks
    everywhere = 8 + 2 * _MASK_BYTES  # inputs of norms and products, masks of the dropouts after them
    scores = 0.0 if options.get("gradient_checkpointing") else (4 + _MASK_BYTES) * HEADS * length / HIDDEN
    each = (everywhere / ranks if sequence else everywhere) + (24 + scores) / ranks
    return BATCH * length * HIDDEN * each


def measure(options: dict[str, Any], length: int) -> float:
    """Return the bytes per layer that are alive after the forward pass, on rank 0."""
    few, many = (_alive(layers, options, length) for layers in (2, 4))
    return (many - few) / 2


def _alive(layers: int, options: dict[str, Any], length: int) -> int:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=HIDDEN, n_layer=layers, n_head=HEADS, n_positions=length, vocab_size=512, num_labels=2, pad_token_id=0
    )
    config.activation_function, config._attn_implementation = "gelu_pytorch_tanh", "eager"  # one kernel
    model = GPT2ForSequenceClassification(config).train()
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16", **options))
    model = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    device = next(model.parameters()).device
    batch = {"input_ids": torch.randint(1, 512, (BATCH, length), device=device)}
    batch["labels"] = torch.zeros(BATCH, dtype=torch.long, device=device)
    with LiveBytes() as alive:
        loss = model(**batch, use_cache=False).loss  # as in execute_pipeline
    kept = alive.bytes
    del loss  # held until here: its graph holds everything that was saved
    return kept


def report(quick: bool) -> str:
    length = 256 if quick else 1024
    rows: list[list[object]] = []
    for name, options in LAYOUTS.items():
        found = run_ranks(measure, options.get("tp_size", 1), options, length)
        unit = BATCH * length * HIDDEN
        rows.append([name, found / unit, formula(options, length) / unit, found / formula(options, length)])
    columns = ["layout", "bytes kept / sbh", "formula / sbh", "kept, of the formula"]
    title = f"Activations of a layer of GPT-2 (batch {BATCH}, sequence {length}, hidden size {HIDDEN}, {HEADS} heads)"
    note = (
        f"m = {_MASK_BYTES} bytes for each element that dropout is applied to. Under sequence parallelism we keep the "
        "gathered inputs of two products, 4 sbh; the paper keeps a rank's shard of them and gathers again in the "
        "backward pass."
    )
    return table(title, columns, rows, note)
