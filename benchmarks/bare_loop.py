"""The booster on one rank against the bare transformers loop: forward, backward, AdamW step."""

from __future__ import annotations

import copy

import torch
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.harness import medians, run_ranks, table
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin


def measure(repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522
    )
    plain = BertForSequenceClassification(config)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    model = copy.deepcopy(plain)
    booster = Booster(plugin=HybridParallelPlugin())
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    batch = {"input_ids": torch.randint(1, 30522, (16, 64)), "labels": torch.randint(0, 2, (16,))}

    def bare() -> None:
        plain(**batch).loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def pipeline() -> None:
        booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def loop() -> None:
        booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return medians({"bare": bare, "execute_pipeline": pipeline, "ordinary loop": loop}, repeats, warm_up=2)


def report(quick: bool) -> str:
    found = run_ranks(measure, 1, 3 if quick else 11)
    rows: list[list[object]] = [[name, found["bare"] / found[name]] for name in ("execute_pipeline", "ordinary loop")]
    return table("One rank through the booster: speed relative to the bare loop", ["loop", "relative speed"], rows)
