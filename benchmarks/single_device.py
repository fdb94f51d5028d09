"""Training on one device: the booster against plain transformers, torch.compile and Liger kernels.

Here shapes are small, and ways alternate on the CPU; `make gpu` measures real shapes on a GPU, each way alone. Every
way trains in bf16 with fp32 weights (autocast, or our master weights) and a fused AdamW.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.harness import run_ranks, table, turns
from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.layers.fused_ops import has_compiler

Step = Callable[[], None]
_WARM_UP = 3


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
    "Qwen3 30B-A3B, 4 of 48 layers": Shape(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "moe_intermediate_size": 768,
        },
        {**_GATED, "num_experts": 8, "moe_intermediate_size": 128},
        rows=4,
        length=4096,
        more={"head_dim": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
}


def config_of(shape: Shape, is_real: bool) -> transformers.PretrainedConfig:
    return getattr(transformers, shape.config)(**(shape.real if is_real else shape.small), **shape.more)


def build(shape: Shape, device: torch.device, is_real: bool) -> nn.Module:
    torch.manual_seed(0)
    with device:
        return getattr(transformers, shape.model)(config_of(shape, is_real))


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


def torchtitan_step(shape: Shape, batch: dict[str, torch.Tensor], device: torch.device, is_real: bool) -> Step:
    """Train torchtitan's own Llama, of 8B where shapes are real, with as many layers, each compiled."""
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["8B" if is_real else "debugmodel"](attn_backend="flex")
    config.layers = config.layers[: (shape.real if is_real else shape.small)["num_hidden_layers"]]
    with device:
        decoder = config.build()
    decoder.init_states(buffer_device=device)
    for layer in decoder.layers.values():
        layer.compile()
    return plain_step(_WithLoss(decoder), batch, device)


class _WithLoss(nn.Module):
    """A decoder that returns logits, with the loss of the next token."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        masks = self.decoder.get_attention_masks(positions)  # of blocks, where a document ends
        logits = self.decoder(input_ids, positions, masks)[:, :-1].flatten(0, 1).float()
        return SimpleNamespace(loss=F.cross_entropy(logits, labels[:, 1:].flatten()))


def automodel_step(shape: Shape, batch: dict[str, torch.Tensor], device: torch.device, is_real: bool) -> Step:
    """Train NeMo Automodel's version of the model: its kernels, and Liger's."""
    from nemo_automodel import NeMoAutoModelForCausalLM

    config = config_of(shape, is_real)
    with device:
        model = NeMoAutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return plain_step(model.to(device), batch, device)


def matmul_peak(device: torch.device, is_real: bool) -> float:
    """Measure the FLOP/s of a large bf16 matrix product on this device, in this run."""
    size = 8192 if is_real else 256
    first, second = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(5):
            torch.mm(first, second)
        wait(device)

    return 5 * 2 * size**3 / min(turns({"products": products}, 5)["products"])


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flops(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Return the FLOPs of a training step: 6 per parameter (without embeddings) and token, plus attention.

    Causal attention counts half, and of stacked experts those that a token chooses.
    """
    embedding = model.get_input_embeddings()
    looked_up = sum(param.numel() for param in embedding.parameters()) if isinstance(embedding, nn.Embedding) else 0
    ties = looked_up if getattr(model.config, "tie_word_embeddings", False) and model.get_output_embeddings() else 0
    weights = sum(param.numel() for param in model.parameters()) - looked_up + ties
    config = model.config
    stacked = sum(param.numel() for param in model.parameters() if param.dim() == 3)
    if stacked and hasattr(config, "num_experts"):
        weights -= stacked * (1 - config.num_experts_per_tok / config.num_experts)
    rows = len(batch["labels"])
    length = batch["input_ids"].shape[1] if "input_ids" in batch else (config.image_size // config.patch_size) ** 2
    causal = 0.5 if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")) else 1.0
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or 0) or config.hidden_size
    attention = 12 * config.num_hidden_layers * width * length * causal
    return rows * length * (6 * weights + attention)


def step_of(
    shape: Shape,
    way: str,
    device: torch.device,
    is_real: bool,
    options: dict[str, Any] | None = None,
    packed: bool = False,
) -> Step:
    """Build a model, and return its step, which is not waited for.

    Args:
        way: "plain", "compiled", "liger", "torchtitan" or "automodel".
        options: of the plugin, for ours instead.
        packed: whether a row is eight documents.
    """
    if way in _RIVALS and options is None:
        batch = batch_of(shape, build(shape, torch.device("meta"), is_real), device, is_real)
        return _RIVALS[way](shape, batch, device, is_real)
    model = build(shape, device, is_real)
    batch = batch_of(shape, model, device, is_real)
    if packed:
        length = batch["input_ids"].shape[1]
        batch["position_ids"] = (torch.arange(length, device=device) % (length // 8)).expand_as(batch["input_ids"])
    if options is not None:
        return our_step(model, batch, **options)
    if way == "liger":
        return liger_step(shape, model, batch, device)
    return (compiled_step if way == "compiled" else plain_step)(model, batch, device)


_RIVALS = {"torchtitan": torchtitan_step, "automodel": automodel_step}


def work_of(shape: Shape, is_real: bool) -> tuple[int, float]:
    """Return tokens (images, where they have no length) and FLOPs of a step."""
    meta = torch.device("meta")
    model = build(shape, meta, is_real)
    batch = batch_of(shape, model, meta, is_real)
    return batch.get("input_ids", batch["labels"]).numel(), flops(model, batch)


def measure(name: str, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each step, way by way, on this rank's CPU."""
    device = torch.device("cpu")
    ways = {"plain": None, "compiled": None, "ours": {}}
    if has_compiler(device.type):
        ways["ours compiled"] = {"compile_layers": True}
    steps = {way: step_of(SHAPES[name], way, device, False, options) for way, options in ways.items()}
    return turns(steps, repeats, _WARM_UP)


def report(quick: bool) -> str:
    """Write the table; quick is the first two shapes with few repeats."""
    rows: list[list[object]] = []
    for name in list(SHAPES)[:2] if quick else SHAPES:
        found = run_ranks(measure, 1, name, 3 if quick else 5)
        seconds = {way: statistics.median(each) for way, each in found.items()}
        ours = seconds["ours"]
        compiled = ours / seconds["ours compiled"] if "ours compiled" in seconds else "-"
        rows.append([name, seconds["plain"] / ours, seconds["compiled"] / ours, compiled])
    return table(
        "Training on one device, bf16 (small shapes on the CPU; `make gpu` measures GPUs): the booster's speed",
        ["model", "to plain transformers", "to transformers, layers compiled", "with `compile_layers`, to without"],
        rows,
        "Ratios of median step times; above 1.0 the booster is faster, or the option makes it faster.",
    )
