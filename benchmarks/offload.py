"""Offload to a file: what it costs in time, and how much larger a model trains within a budget of memory.

A Llama with AdamW, one thread per rank. For time, runs with and without offload share the ranks and take turns. For the
largest model each trial runs in new processes in a memory cgroup, which kills a rank that does not fit; the number of
layers is doubled and then bisected. Where no cgroup can be made, a trial fits if its resident memory rises less than
the budget.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import ratio, run_ranks, table, turns
from benchmarks.memory_budget import ResidentPeak, cgroup_root, join, memory_budget
from booster import Booster, record_module_init
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.distributed.local_ranks import RankFailure

PLACES = {
    "offload_optimizer": {"zero_stage": 1},
    "offload_optimizer, stage 3": {"zero_stage": 3},
    "offload_optimizer and offload_parameters": {"zero_stage": 3},
}
SYSTEMS = ("ours, both offloads", "ours, stage 3", "DDP", "FSDP2 with CPUOffloadPolicy")
_LENGTH = 64
_VOCABULARY = 2048
Step = Callable[[], None]


def llama(layers: int, width: int) -> nn.Module:
    """Build a Llama of `layers` layers and hidden size `width`, always the same."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=4,
            use_cache=False,
        )
    )


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(_VOCABULARY, (2, _LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
    return {"input_ids": ids, "labels": ids}


def ours(layers: int, width: int, **options: Any) -> Step:
    """Return a training step of this package."""
    with record_module_init():
        model = llama(layers, width)
    booster = Booster(plugin=HybridParallelPlugin(seed=0, zero_bucket_size_in_mb=4, **options))
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters()))[:2]
    batch = _batch()

    def step() -> None:
        booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def other(name: str, layers: int, width: int) -> Step:
    """Return a training step of a system of torch."""
    if name == "DDP":
        model = nn.parallel.DistributedDataParallel(llama(layers, width))
    else:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        with torch.device("meta"):  # values arrive when parameters are sharded, as in ours
            model = llama(layers, width)
        for layer in model.model.layers:
            fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
        model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.normal_(param, std=0.02)
    optimizer, batch = torch.optim.AdamW(model.parameters()), _batch()

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def slow_down(name: str, layers: int, width: int, repeats: int, directory: str) -> float:
    """Return the time of a step with offload relative to one without, at the same stage."""
    options = dict(PLACES[name])
    places = {option: directory for option in ("offload_optimizer", "offload_parameters") if option in name}
    ways = {"with": ours(layers, width, **options, **places), "without": ours(layers, width, **options)}
    return ratio(turns(ways, repeats, warm_up=2), "without", "with")


def trial(name: str, layers: int, width: int, directory: str, cgroup: Path | None) -> tuple[int, str]:
    """Take two steps; return the rise of resident memory in bytes, the sum over ranks, and why a system refused."""
    if cgroup is not None:
        join(cgroup)
    peak, refusal = ResidentPeak(), ""
    try:
        if name == "ours, both offloads":
            places = {option: directory for option in ("offload_optimizer", "offload_parameters")}
            step = ours(layers, width, zero_stage=3, **places)
        else:
            step = ours(layers, width, zero_stage=3) if name.startswith("ours") else other(name, layers, width)
        for _ in range(2):
            step()
    except (RuntimeError, ValueError, AttributeError) as error:
        refusal = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    rise = torch.tensor(peak.rise())
    dist.all_reduce(rise)
    return int(rise), refusal


def fits(name: str, layers: int, width: int, ranks: int, budget: int) -> tuple[bool, str]:
    """Return whether all ranks train within the budget, and why a system refused."""
    enforced = cgroup_root() is not None
    with tempfile.TemporaryDirectory() as directory, memory_budget(budget) if enforced else nullcontext() as cgroup:
        try:
            rise, refusal = run_ranks(trial, ranks, name, layers, width, directory, cgroup)
        except RankFailure:  # killed
            return False, ""
    return not refusal and (enforced or rise < budget), refusal


def largest(name: str, width: int, ranks: int, budget: int, most: int) -> tuple[int, str]:
    """Return the largest number of layers, up to `most`, that trains within the budget; 0 and why if none does."""
    good, bad = 0, most + 1
    layers = 1
    while bad - good > 1:
        is_good, refusal = fits(name, layers, width, ranks, budget)
        if refusal:
            return 0, refusal
        good, bad = (layers, bad) if is_good else (good, layers)
        layers = min(2 * good, most) if bad > most else (good + bad) // 2
        layers = max(layers, 1)
    return good, ""


def report(quick: bool) -> str:
    layers, width, repeats, budget, most = (2, 64, 2, 2**28, 4) if quick else (12, 512, 3, 2**29, 64)
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as directory:
        for ranks in (1, 2):
            for name in PLACES:
                slower = run_ranks(slow_down, ranks, name, layers, width, repeats, directory)
                rows.append([ranks, name, f"{slower:.2f} x the time of a step without"])
    for name in SYSTEMS:
        ranks = 2
        found, refusal = largest(name, width, ranks, budget, most)
        count = sum(param.numel() for param in llama(found, width).parameters()) / 1e6 if found else 0.0
        rows.append([ranks, name, refusal or f"{found} layers, {count:.0f} million parameters"])
    how = "a memory cgroup" if cgroup_root() is not None else "the peak of resident memory"
    return table(
        "Offload to a file: time, and the largest model in a budget",
        ["dp", "system", "result"],
        rows,
        f"Time: {layers} layers of width {width}. Largest model: width {width}, {budget // 2**20} MiB for all ranks "
        f"together by {how}, at most {most} layers tried.",
    )
