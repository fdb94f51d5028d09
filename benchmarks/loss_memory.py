"""Peak memory and time of a language-model head and loss, forward and backward: with all logits and without.

Hidden states [1, sequence, hidden size] and a head without bias. "transformers" is `nn.Linear` and `ForCausalLMLoss`,
"all logits" is our loss of logits that are sharded over two ranks, and "ours" never holds more than one chunk of
logits. On CPUs the peak is the peak resident set size that the kernel counts (`VmHWM`, reset before each way), which
includes temporaries inside operators. On GPUs it is `torch.cuda.max_memory_allocated`. One column excludes the weight
and the hidden states, which exist before; the next column includes them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks.harness import ratio, run_ranks, table, turns
from shardformer.layers.embedding import VocabParallelLMHead, deferred_logits, parallel_logits
from shardformer.loss.text import token_sum

REPEATS = 3  # one less at full size on CPUs, where a step takes a minute
FULL, QUICK = (128_256, 4096, 512), (32_000, 4096, 256)  # vocabulary, sequence, hidden size


class _Model(nn.Module):
    """Language-model head with the interface of transformers' models."""

    def __init__(self, vocabulary: int, hidden_size: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(hidden_size, vocabulary, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


def peak_of(work: Callable[[], None], device: torch.device) -> int:
    """Return the peak number of bytes that `work` uses in addition to existing memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM to the current resident set size
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def measure(sizes: tuple[int, int, int], dtype: torch.dtype, repeats: int) -> dict[str, tuple[int, float]]:
    """Return each way's peak in bytes and its time relative to the first way, on this number of ranks."""
    vocabulary, length, hidden_size = sizes
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = _Model(vocabulary, hidden_size).to(device, dtype)
    hidden = torch.randn(1, length, hidden_size, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (1, length), device=device)
    cut = dist.get_world_size() > 1
    if cut:
        model.lm_head = VocabParallelLMHead.from_native_module(model.lm_head, dist.group.WORLD, divisible_by=64)

    def finish(loss: Tensor) -> None:
        (loss / length).backward()
        model.zero_grad()
        hidden.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()

    def library(deferring: bool) -> None:
        with deferred_logits(model) if deferring else parallel_logits(model) if cut else nullcontext():
            logits = model(hidden)
            finish(token_sum(model, "logits", SimpleNamespace(logits=logits), F.pad(labels, (0, 1), value=-100)[:, 1:]))

    def transformers_loss() -> None:
        logits = model(hidden)
        finish(ForCausalLMLoss(logits, labels, vocabulary) * (length - 1))

    with_all = {"all logits": lambda: library(False)} if cut else {"transformers": transformers_loss}
    ways = {**with_all, "ours": lambda: library(True)}
    peaks: dict[str, list[int]] = {name: [] for name in ways}

    def counted(name: str) -> None:
        peaks[name].append(peak_of(ways[name], device))

    times = turns({name: partial(counted, name) for name in ways}, repeats, warm_up=0)
    first = next(iter(ways))
    # The first peak includes memory that libraries allocate once and keep.
    return {name: (min(peaks[name]), 1 / ratio(times, name, first)) for name in ways}


def report(quick: bool) -> str:
    on_gpu = torch.cuda.is_available()
    sizes, repeats = (QUICK if quick else FULL), (REPEATS if quick or on_gpu else REPEATS - 1)
    rows: list[list[object]] = []
    for dtype in (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16):
        inputs = dtype.itemsize * sizes[2] * sizes[0], dtype.itemsize * sizes[2] * sizes[1]  # weight, hidden states
        plain = run_ranks(measure, 1, sizes, dtype, repeats)
        cut = run_ranks(measure, 2, sizes, dtype, repeats) if not on_gpu or torch.cuda.device_count() > 1 else {}
        whole = plain["transformers"][0]
        for ranks, found in ((1, plain), (2, cut)):
            for name, (peak, time) in found.items():
                counted = (peak + inputs[0] / ranks + inputs[1]) / (whole + sum(inputs))
                named = name if name == "transformers" else f"{name}, tp{ranks}"
                rows.append([str(dtype).removeprefix("torch."), named, peak / whole, counted, time])
    columns = [
        "dtype",
        "way, memory of a rank",
        "peak",
        "with weight and hidden states",
        "time, of that with all logits",
    ]
    title = "Peak memory of a language-model loss (vocabulary {}, sequence {}, hidden size {})".format(*sizes)
    return table(
        title, columns, rows, "Peaks are fractions of transformers' peak in the same dtype; the limit is 0.35."
    )
