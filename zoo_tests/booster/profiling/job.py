"""A job to profile: `job.py PP STEPS LOOP`, where LOOP is "pipeline" or "ordinary"."""

from __future__ import annotations

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification

from booster import Booster, launch_from_torch
from plugins.hybrid_parallel import HybridParallelPlugin

_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def main() -> None:
    pp_size, steps, loop = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    launch_from_torch(seed=42)
    train(pp_size, steps, loop)


def train(pp_size: int, steps: int, loop: str) -> None:
    booster = Booster(plugin=HybridParallelPlugin(pp_size=pp_size))
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **_SIZES))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = booster.boost(model, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # wraps `step` of the boosted one
    batch = {"input_ids": torch.arange(20).view(4, 5), "labels": torch.tensor([0, 1, 1, 0])}
    for _ in range(steps):
        if loop == "pipeline":
            booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
        else:
            booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
