"""Peak memory and time of a language-model loss, its head included, forward and backward: with all logits and without.

Hidden states [1, sequence, hidden size] and a head without bias. "transformers" is `nn.Linear` and `ForCausalLMLoss`,
"all logits" is our loss of logits that lie cut over two ranks, and "ours" never has more logits than a chunk. On CPUs
the peak is that of the resident set, which the kernel counts (`VmHWM`, reset before each way): it has the temporaries
inside of operators, too. On GPUs it is `torch.cuda.max_memory_allocated`. Weight and hidden states, which are there
before, are left out in one column and counted in the next.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks.harness import ratio, run_ranks, table, turns
from shardformer.layers.lm_head import VocabParallelLMHead, deferred_logits, parallel_logits
from shardformer.loss.text import token_sum

REPEATS = 3  # one less at full size, where a step takes a minute
FULL, QUICK = (128_256, 4096, 512), (32_000, 4096, 256)  # vocabulary, sequence, hidden size


class _Model(nn.Module):
    """A head, as transformers' models have it."""

    def __init__(self, vocabulary: int, hidden_size: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(hidden_size, vocabulary, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


def peak_of(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes that `work` takes beside what is there already."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def measure(sizes: tuple[int, int, int], dtype: torch.dtype, repeats: int) -> dict[str, tuple[int, float]]:
    """Of each way on this number of ranks: peak in bytes, and time relative to that of the first."""
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
            finish(token_sum(model, logits, F.pad(labels, (0, 1), value=-100)[:, 1:]))

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
    # The first peak has what libraries take once and keep.
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
    return table(title, columns, rows, "Peaks are shares of transformers' in the same dtype; the limit is 0.35.")
