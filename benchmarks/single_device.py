"""Training on one device: the booster against plain transformers, torch.compile and Liger kernels.

On a GPU the shapes are realistic; without one they are small, to check that everything runs, and the ratios are for the
CPU. Every way trains in bf16 with fp32 weights (autocast, or our master weights) and a fused AdamW.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from benchmarks.harness import ratio, run_ranks, table, turns
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin

Step = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """A model and its batch.

    Attributes:
        model, config: class names in transformers.
        real, small: configuration values with a GPU, and without one.
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
    "Llama 8B, 8 of 32 layers": Shape(
        "LlamaForCausalLM", "LlamaConfig", {**_8B, "num_hidden_layers": 8}, _GATED, rows=2, length=4096, liger="llama"
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
        rows=8,
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
}


def build(shape: Shape, on_gpu: bool) -> nn.Module:
    torch.manual_seed(0)
    values = {**(shape.real if on_gpu else shape.small), **shape.more}
    return getattr(transformers, shape.model)(getattr(transformers, shape.config)(**values))


def batch_of(shape: Shape, model: nn.Module, device: torch.device, on_gpu: bool) -> dict[str, torch.Tensor]:
    rows, length = (shape.rows, shape.length) if on_gpu else (4, min(shape.length, 128))
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


def our_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Step:
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16", enable_all_optimization=True))
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))

    def step() -> None:
        booster.execute_pipeline(iter([batch]), model, optimizer=optimizer, return_loss=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_liger(model: nn.Module, family: str) -> nn.Module | None:
    """Apply Liger's kernels to the model; return None if there are none for it."""
    if not family or importlib.util.find_spec("liger_kernel") is None or not torch.cuda.is_available():
        return None
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model)
    return model


def matmul_peak(device: torch.device) -> float:
    """Measure the FLOP/s of a large bf16 matrix product on this device, in this run."""
    size = 8192 if device.type == "cuda" else 1024
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


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Return the seconds per step of each way and turn, the model's FLOPs and the device's peak FLOP/s."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    shape = SHAPES[name]
    plain = build(shape, on_gpu).to(device)
    batch = batch_of(shape, plain, device, on_gpu)
    steps = {"plain": plain_step(plain, batch, device)}
    steps["ours"] = our_step(copy.deepcopy(plain), batch)
    compiled = torch.compile(copy.deepcopy(plain))
    steps["compiled"] = plain_step(compiled, batch, device)
    liger = with_liger(copy.deepcopy(plain), shape.liger)
    if liger is not None:
        steps["liger"] = plain_step(liger, batch, device)

    def timed(step: Step) -> Step:
        def work() -> None:
            step()
            _wait(device)

        return work

    found = turns({way: timed(step) for way, step in steps.items()}, repeats, warm_up=3)
    return {"times": found, "flops": flops(plain, batch), "peak": matmul_peak(device), "rank": dist.get_rank()}


def report(quick: bool) -> str:
    on_gpu = torch.cuda.is_available()
    rows: list[list[object]] = []
    for name in list(SHAPES)[:2] if quick else SHAPES:
        found = run_ranks(measure, 1, name, 3 if quick else 9)
        times = found["times"]
        others = [ratio(times, "ours", way) if way in times else "-" for way in ("plain", "compiled", "liger")]
        seconds = sorted(times["ours"])[len(times["ours"]) // 2]
        rows.append([name, *others, f"{found['flops'] / seconds / found['peak']:.0%}"])
    where = torch.cuda.get_device_name() if on_gpu else "this CPU, small shapes; GPU: not measured"
    return table(
        f"Training on one device, bf16 ({where}): the booster's speed relative to others",
        ["model", "plain transformers", "with torch.compile", "with Liger kernels", "of the measured matrix peak"],
        rows,
        "The last column counts 6 operations a parameter and token and attention (half of it where it is causal).",
    )
