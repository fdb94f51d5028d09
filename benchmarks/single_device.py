"""Training on one device: the booster against plain transformers, torch.compile and Liger kernels.

On a GPU the shapes are realistic, and each way is measured alone, because the memory holds no two of these models with
their optimizer states. Otherwise they are small, to check that everything runs, and ways alternate. Every way trains in
bf16 with fp32 weights (autocast, or our master weights) and a fused AdamW.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.harness import run_ranks, table, turns
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.distributed.local_ranks import RankFailure, run_on_local_ranks
from shardformer.layers.fused_ops import has_compiler

Step = Callable[[], None]
# Way -> options of the plugin.
_OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours compiled": {"compile_layers": True},
    "ours fp8": {"precision": "fp8"},
}
# Calls a function with these arguments on one rank, which has a process group.
Runner = Callable[..., Any]
_TIMEOUT_S = 300.0
_WARM_UP = 3
_LATE = "no time left"


@dataclass(frozen=True)
class Shape:
    """A model and its batch.

    Attributes:
        model, config: class names in transformers.
        real, small: configuration values on a GPU, and elsewhere.
        rows, length: size of the batch on a GPU; images have no length.
        liger: name of the model family in Liger-Kernel; empty if it has none.
        more: configuration values for both.
    """

    model: str
    config: str
    real: dict[str, Any]
    small: dict[str, Any]
    rows: int
    length: int = 0
    liger: str = ""
    more: dict[str, Any] = field(default_factory=dict)


_TINY = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 2048}
_GATED = {**_TINY, "intermediate_size": 512}
_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
SHAPES = {
    "Llama 1B": Shape(
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "vocab_size": 128256,
        },
        _GATED,
        rows=4,
        length=4096,
        liger="llama",
    ),
    "BERT-large": Shape(
        "BertForMaskedLM",
        "BertConfig",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        _GATED,
        rows=32,
        length=512,
    ),
    "GPT-2 XL": Shape(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 1600, "n_layer": 48, "n_head": 25},
        {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 2048},
        rows=6,
        length=1024,
    ),
    "T5-large": Shape(
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
        {"d_model": 256, "d_ff": 512, "num_layers": 2, "num_heads": 4, "d_kv": 64, "vocab_size": 2048},
        rows=16,
        length=512,
        more={"decoder_start_token_id": 0},
    ),
    "ViT-L": Shape(
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512},
        rows=64,
        more={"num_labels": 1000},
    ),
    "Llama 8B, 8 of 32 layers": Shape(
        "LlamaForCausalLM", "LlamaConfig", {**_8B, "num_hidden_layers": 8}, _GATED, rows=2, length=4096, liger="llama"
    ),
}


_COLUMNS = [
    "plain transformers",
    "transformers, layers compiled",
    "transformers, Liger kernels",
    "with `compile_layers`, relative to without",
    "in fp8, relative to bf16",
    "of the measured matrix peak",
    "memory",
]


def build(shape: Shape, device: torch.device, is_real: bool) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, shape.config)(**(shape.real if is_real else shape.small), **shape.more)
    with device:
        return getattr(transformers, shape.model)(config)


def batch_of(shape: Shape, model: nn.Module, device: torch.device, is_real: bool) -> dict[str, torch.Tensor]:
    rows, length = (shape.rows, shape.length) if is_real else (4, min(shape.length, 128))
    if not length:
        pixels = torch.randn(rows, 3, model.config.image_size, model.config.image_size, device=device)
        return {"pixel_values": pixels, "labels": torch.randint(1000, (rows,), device=device)}
    ids = torch.randint(model.config.vocab_size, (rows, length), device=device)
    return {"input_ids": ids, "labels": ids}


def plain_step(model: nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(model: nn.Module, batch: dict[str, torch.Tensor], **options: Any) -> Step:
    plugin = HybridParallelPlugin(**{"precision": "bf16", "enable_all_optimization": True, **options})
    booster = Booster(plugin=plugin)
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))

    def step() -> None:
        booster.execute_pipeline(iter([batch]), model, optimizer=optimizer, return_loss=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compiled_step(model: nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> Step:
    """Compile each of the repeated layers: one compilation serves all of them, which takes seconds, not minutes."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile()
    return plain_step(model, batch, device)


def liger_step(shape: Shape, model: nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> Step:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model)
    return plain_step(model, batch, device)


def has_liger(shape: Shape, device: torch.device) -> bool:
    """Return whether Liger's kernels are installed and serve this family and device."""
    return bool(shape.liger) and device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def has_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies matrices in 8 bit."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def matmul_peak(device: torch.device, is_real: bool) -> float:
    """Measure the FLOP/s of a large bf16 matrix product on this device, in this run."""
    size = 8192 if is_real else 256
    first, second = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(5):
            torch.mm(first, second)
        _wait(device)

    return 5 * 2 * size**3 / min(turns({"products": products}, 5)["products"])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flops(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Return the FLOPs of a training step: 6 per parameter (without embeddings) and token, plus attention.

    Causal attention counts half.
    """
    embedding = model.get_input_embeddings()
    looked_up = sum(param.numel() for param in embedding.parameters()) if isinstance(embedding, nn.Embedding) else 0
    ties = looked_up if getattr(model.config, "tie_word_embeddings", False) and model.get_output_embeddings() else 0
    weights = sum(param.numel() for param in model.parameters()) - looked_up + ties
    config = model.config
    rows = len(batch["labels"])
    length = batch["input_ids"].shape[1] if "input_ids" in batch else (config.image_size // config.patch_size) ** 2
    causal = 0.5 if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")) else 1.0
    attention = 12 * config.num_hidden_layers * config.hidden_size * length * causal
    return rows * length * (6 * weights + attention)


def measure(name: str, repeats: int, is_real: bool) -> dict[str, Any]:
    """Measure one shape on this rank's device.

    Returns:
        "times": way -> seconds of each step, or a text about why there are none; "memory": way -> the most bytes of the
        device that were in use, on a GPU; "flops": those of a step; "peak": the device's FLOP/s.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    shape = SHAPES[name]

    def make(way: str) -> Step:
        model = build(shape, device, is_real)
        batch = batch_of(shape, model, device, is_real)
        if way in _OURS:
            step = our_step(model, batch, **_OURS[way])
        elif way == "liger":
            step = liger_step(shape, model, batch, device)
        else:
            step = (compiled_step if way == "compiled" else plain_step)(model, batch, device)

        def timed() -> None:
            step()
            _wait(device)

        return timed

    ways = ["plain", "ours", "compiled"]
    ways += ["ours compiled"] if has_compiler(device.type) else []
    ways += ["liger"] if has_liger(shape, device) else []
    ways += ["ours fp8"] if is_real and shape.liger and has_fp8(device) else []
    times: dict[str, list[float] | str] = {}
    memory: dict[str, int] = {}
    for together in [[way] for way in ways] if is_real else [ways]:
        try:
            times |= turns({way: make(way) for way in together}, repeats, _WARM_UP)
        except torch.OutOfMemoryError:
            times |= dict.fromkeys(together, "out of memory")
        except Exception as error:  # the other ways are still worth their time on the GPU
            times |= dict.fromkeys(together, _reason(error))
        if is_real:  # before the next model is built
            memory[together[0]] = torch.cuda.max_memory_allocated(device)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    meta = torch.device("meta")
    counted = build(shape, meta, is_real)
    work = flops(counted, batch_of(shape, counted, meta, is_real))
    return {"times": times, "memory": memory, "flops": work, "peak": matmul_peak(device, is_real)}


def report(
    quick: bool,
    run: Runner | None = None,
    until: float = float("inf"),
    tell: Callable[[str], None] | None = None,
) -> str:
    """Write the table.

    Args:
        quick: measure the first two shapes with few repeats.
        run: runs `measure` with small shapes; None for a new process on the GPU, or on the CPU.
        until: time (`time.monotonic`) at which a measurement is given up, and the next ones are left out.
        tell: called with the table after each row, so that what was measured is not lost with what follows.
    """
    on_gpu = run is None and torch.cuda.is_available()
    if run is None:
        run = partial(_on_gpu, until) if on_gpu else _on_cpu
    rows: list[list[object]] = []
    for name in list(SHAPES)[:2] if quick else SHAPES:
        try:
            late = time.monotonic() > until
            rows.append(_row(name, run(measure, name, 3 if quick else 5, on_gpu)) if not late else _same(name, _LATE))
        except RankFailure as failure:
            rows.append(_same(name, _reason(failure)))
        if tell is not None:
            tell(_table(rows, on_gpu))
    return _table(rows, on_gpu)


def _table(rows: list[list[object]], on_gpu: bool) -> str:
    where = torch.cuda.get_device_name() if on_gpu else "small shapes; no GPU was measured"
    return table(
        f"Training on one device, bf16 ({where}): the booster's speed relative to others",
        ["model", *_COLUMNS],
        rows,
        "Ratios of median step times; above 1.0 the booster is faster, or the option makes it faster. The share of the "
        "peak counts 6 operations a parameter and token and attention (half of it where it is causal). Memory is the "
        "most that tensors took, relative to plain transformers: below 1.0 the booster needs less.",
    )


def _same(name: str, text: str) -> list[object]:
    """Return a row that has one text in all cells."""
    return [name, *[text] * len(_COLUMNS)]


def _reason(error: Exception) -> str:
    """Describe an error in a cell of a table."""
    return " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())[:120]


def _row(name: str, found: dict[str, Any]) -> list[object]:
    times, ours = found["times"], found["times"]["ours"]
    others = [_compared(ours, times.get(way, "-")) for way in ("plain", "compiled", "liger")]
    others += [_compared(times[way], ours) if way in times else "-" for way in ("ours compiled", "ours fp8")]
    share = ours if isinstance(ours, str) else f"{found['flops'] / statistics.median(ours) / found['peak']:.0%}"
    memory = found["memory"]
    have_run = not isinstance(ours, str) and not isinstance(times["plain"], str)
    return [name, *others, share, memory["ours"] / memory["plain"] if have_run and memory.get("plain") else "-"]


def _compared(ours: list[float] | str, theirs: list[float] | str) -> float | str:
    """Return the speed of ours relative to theirs, or the text about why one of them has none."""
    if isinstance(ours, str):
        return f"booster: {ours}"
    return theirs if isinstance(theirs, str) else statistics.median(theirs) / statistics.median(ours)


def _on_cpu(function: Callable[..., Any], *arguments: Any) -> Any:
    return run_ranks(function, 1, *arguments)


def _on_gpu(until: float, function: Callable[..., Any], *arguments: Any) -> Any:
    limit = min(_TIMEOUT_S, until - time.monotonic())
    return run_on_local_ranks(function, 1, *arguments, timeout_s=limit, device="cuda")[0]
