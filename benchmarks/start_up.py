"""Time until training starts: imports, and `boost()` of a Llama of 1.1 billion parameters without values.

Imports: fresh interpreters in turn, time in addition to `import torch`; the limit is 0.2 s. `boost()`: tp2, fp32, the
slower of two ranks, each of which initializes its own shards; the limit is 10 s.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import run_ranks, table
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer import record_module_init

MODULES = ("booster", "plugins.hybrid_parallel")
_CLOCK = "import time, torch; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def import_seconds(repeats: int) -> dict[str, float]:
    """Return the median seconds of each import after `import torch`."""
    found: dict[str, list[float]] = {module: [] for module in MODULES}
    for _ in range(repeats):
        for module, seconds in found.items():
            command = [sys.executable, "-c", _CLOCK.format(f"import {module}")]
            seconds.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return {module: statistics.median(seconds) for module, seconds in found.items()}


def boost_seconds(layers: int) -> tuple[float, int]:
    """Return the seconds of `boost()` on the slowest rank, and the number of parameters of the whole model."""
    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=32000,
    )
    with record_module_init():
        model = LlamaForCausalLM(config)
    count = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    booster = Booster(plugin=HybridParallelPlugin(tp_size=dist.get_world_size()))
    dist.barrier()
    start = time.perf_counter()
    booster.boost(model, optimizer)
    slowest = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(slowest.cuda() if torch.cuda.is_available() else slowest, op=dist.ReduceOp.MAX)
    return float(slowest), count


def report(quick: bool) -> str:
    imports = import_seconds(3 if quick else 11)
    seconds, count = run_ranks(boost_seconds, 2, 1 if quick else 16)
    rows: list[list[object]] = [[f"import {module}, above torch", value, 0.2] for module, value in imports.items()]
    rows.append([f"boost() of {count / 1e9:.2f} billion parameters, tp2", seconds, 10.0])
    return table("Until training starts", ["what", "seconds", "limit"], rows)
