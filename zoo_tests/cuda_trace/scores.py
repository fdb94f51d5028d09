"""Counts what log-probabilities ask of a device, of a trainer and of a sampler that agree; on true CPU tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.distributed.local_ranks import run_on_local_ranks
from plugins.hybrid_parallel.reproducible import batch_invariance
from zoo_tests.cuda_trace.recorder import StepRecorder

_SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
_WAYS = ((False, True), (True, True), (True, False))  # arguments of `_kernels`


def main() -> None:
    """Print the kernels of each way, as JSON."""
    print(json.dumps([run_on_local_ranks(_kernels, 1, *way, timeout_s=600.0)[0] for way in _WAYS]))


def _kernels(reproducible: bool, in_one_call: bool) -> dict[str, int]:
    """Count what scoring, training and decoding run; `in_one_call`: whether the device's kernels round alike there."""

    def decided(name: str, whole: Callable, by_tiles: Callable, *inputs: torch.Tensor) -> torch.Tensor:
        return (whole if in_one_call else by_tiles)(*inputs)

    def count(work: Callable[[], Any]) -> int:
        work()  # shapes are tried once
        with StepRecorder("cpu") as recorder:
            work()
        return sum(recorder.counts.kernels.values())

    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **_SIZES))
    booster = Booster(HybridParallelPlugin(precision="bf16", reproducible=reproducible))
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
    batch = {"input_ids": torch.arange(4 * 64).view(4, 64) % 128}

    def train() -> None:
        booster.backward(model.token_log_probs(batch).log_probs.mean(), optimizer)

    def generate(tokens: int) -> int:
        return count(lambda: model.generate(batch["input_ids"], min_new_tokens=tokens, max_new_tokens=tokens))

    with mock.patch.object(batch_invariance, "_in_one_call", decided):
        with torch.no_grad():
            scored = count(lambda: model.token_log_probs(batch))
        return {
            "scored": scored,
            "scored, with the backward pass": count(train),
            "a token generated over a cache, of 4 rows": generate(3) - generate(2),
        }
