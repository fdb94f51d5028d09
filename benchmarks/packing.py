"""Tokens a second of packed documents over those of padded ones, on documents of two distributions of lengths.

All ways train on the same documents, an epoch each turn: in batches that are padded to their longest document, in
packed rows of as many tokens as such a batch has on average, and in such rows that are cut into micro-batches between
documents. Padding is not counted as tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import ratio, run_ranks, table, turns
from booster import Booster
from booster.data import pack
from plugins.hybrid_parallel import HybridParallelPlugin

VOCABULARY, PARTS = 8192, 4
_SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1024}


def mrpc_length(source: random.Random) -> int:
    """Draw tokens of a pair of sentences as in MRPC: about 53, from 19 to 103."""
    return min(max(round(source.gauss(53, 15)), 19), 103)


def long_tailed_length(source: random.Random) -> int:
    """Draw tokens of a document of a log-normal distribution: a median of 90, few of up to 1024."""
    return min(max(round(source.lognormvariate(4.5, 1.0)), 8), 1024)


# distribution -> (draw, documents, documents of a padded batch of one replica)
_DISTRIBUTIONS: dict[str, tuple[Callable[[random.Random], int], int, int]] = {
    "MRPC-like": (mrpc_length, 128, 16),
    "long-tailed": (long_tailed_length, 64, 8),
}


def padded(documents: list[list[int]]) -> dict[str, Tensor]:
    """Return a batch [documents, longest] with an attention mask; labels of padding are -100."""
    longest = max(map(len, documents))

    def rows(fill: int, values: list[Tensor]) -> Tensor:
        return torch.stack([F.pad(each, (0, longest - len(each)), value=fill) for each in values])

    ids = [torch.tensor(document) for document in documents]
    ones = [torch.ones_like(each) for each in ids]
    return {"input_ids": rows(0, ids), "labels": rows(-100, ids), "attention_mask": rows(0, ones)}


def measure(name: str, quick: bool) -> tuple[float, float, float, float]:
    """Return the speed of packing over padding, of cut rows too, and the filled part of padded batches and of rows."""
    draw, number, batch_size = _DISTRIBUTIONS[name]
    source = random.Random(0)
    lengths = [draw(source) for _ in range(number // 2 if quick else number)]
    documents = [[source.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]
    budget = max(round(batch_size * sum(lengths) / len(lengths)), max(lengths))
    rows = pack(documents, budget, rows_per_step=dist.get_world_size(), attention_length=12 * _SIZES["hidden_size"])
    work = {
        "padded": _epoch(DataLoader(documents, batch_size, shuffle=True, collate_fn=padded)),
        "packed": _epoch(rows.loader()),
        "cut": _epoch(rows.loader(), num_microbatches=PARTS),
    }
    times = turns(work, 2 if quick else 7)
    batches = [documents[start : start + batch_size] for start in range(0, len(documents), batch_size)]
    filled = sum(lengths) / sum(padded(each)["input_ids"].numel() for each in batches)
    return ratio(times, "packed", "padded"), ratio(times, "cut", "padded"), filled, rows.fill


def _epoch(loader: DataLoader, num_microbatches: int = 1) -> Callable[[], None]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **_SIZES))
    booster = Booster(plugin=HybridParallelPlugin(num_microbatches=num_microbatches))
    model, optimizer, loader = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader)

    def epoch() -> None:
        batches = iter(loader)
        for _ in range(len(loader)):
            booster.execute_pipeline(batches, model, optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def report(quick: bool) -> str:
    rows: list[list[object]] = []
    for name in _DISTRIBUTIONS:
        for ranks in (1, 2):
            rows.append([name, f"dp{ranks}", *run_ranks(measure, ranks, name, quick)])
    columns = ["documents", "layout", "packed rows", f"cut into {PARTS}", "tokens of padded batches", "of packed rows"]
    return table(
        "Packing: tokens a second over those of padded batches (Llama, 6 layers of 384)",
        columns,
        rows,
        f"Speeds of rows as they are, and of rows that are cut into {PARTS} micro-batches between documents, which "
        "saves attention between documents where flash-attn does not run. The last two columns are the part of the "
        "tokens of batches that is no padding, and of the budget of rows that is used.",
    )
