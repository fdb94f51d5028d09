"""Published training runs, predicted from the configurations in their papers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from plugins.hybrid_parallel.planner.costs import Prediction
from plugins.hybrid_parallel.planner.device import PRESETS, Device
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler
from plugins.hybrid_parallel.planner.stage_map import ModelMap

# Both systems fuse most operators between matrix products; transformers runs them one by one.
_FUSED = 0.4
_MEGATRON = "arXiv 2104.04473, table 1"
_LLAMA = "arXiv 2407.21783, table 4"


@dataclass(frozen=True)
class Run:
    """A published training run.

    Attributes:
        name, source: name of the run, and its source.
        device: device that it ran on.
        build: creates the model.
        layouts: the layouts that the paper's description allows; the fastest of them is assumed.
        length: tokens per sample.
        seconds: published time of a step.
    """

    name: str
    source: str
    device: str
    build: partial
    layouts: tuple[Layout, ...]
    length: int
    seconds: float


def report(quick: bool) -> str:
    """Return the section of the results page."""
    rows = []
    for run in [*_megatron_runs(), *llama_runs()][:: 6 if quick else 1]:
        best = _fastest(run)
        ratio = best.seconds.total / run.seconds
        rows.append(
            f"| {run.name} | {run.source} | {best.layout} | {run.seconds:.2f} s | {best.seconds.total:.2f} s | "
            f"{ratio:.2f} | {_shares(best)} |"
        )
    return "\n".join(
        [
            "## Published runs",
            "",
            f"Steps as their papers' FLOP/s say, and as the planner predicts them with its presets, elementwise "
            f"traffic at {_FUSED} of that of separate operators. Micro-batches and the number of interleaved chunks, "
            "which the papers do not state, are those that the planner finds fastest.",
            "",
            "| Run | Source | Layout | Published | Predicted | Predicted / published | Where the time goes |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def fused_device(name: str) -> Device:
    """Return a preset whose elementwise operators are fused."""
    return replace(PRESETS[name], elementwise=_FUSED)


def _fastest(run: Run) -> Prediction:
    predictor = Predictor(ModelMap(run.build), Profiler(run.build, run.length, fused_device(run.device), "bf16"))
    predictions = [predictor.predict(layout) for layout in run.layouts]
    return min(predictions, key=lambda each: each.seconds.total)


def _shares(prediction: Prediction) -> str:
    seconds = prediction.seconds
    names = ("compute", "comm", "bubble", "reduction", "optimizer")
    shares = {name: getattr(seconds, name) / seconds.total for name in names}
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= 0.005)


def _megatron_runs() -> Iterator[Run]:
    """Yield GPT on A100 with full recomputation; FLOPs per step are 96 B s l h^2 (1 + s / 6h + V / 16 l h)."""
    length, vocab = 2048, 51200
    # billions of parameters, heads, hidden, layers, tp, pp, devices, batch, TFLOP/s per device
    table = (
        (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
        (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
        (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
        (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
        (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
        (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
        (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
        (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
        (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
        (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
    )
    for billions, heads, hidden, layers, tp, pp, devices, batch, rate in table:
        head = 1 + length / (6 * hidden) + vocab / (16 * layers * hidden)
        flops = 96 * batch * length * layers * hidden**2 * head
        share = batch * tp * pp // devices
        layouts = tuple(
            Layout(
                dp_size=devices // tp // pp,
                tp_size=tp,
                pp_size=pp,
                pp_style="interleaved" if chunks > 1 else "1f1b",
                num_chunks=chunks,
                rows=rows,
                num_microbatches=share // rows,
                recomputation="full",
            )
            for rows in (1, 2, 4, 8)
            for chunks in (1, 2, 3, 4, 5)
            if share % rows == 0 and layers % (pp * chunks) == 0 and (chunks == 1 or pp > 1)
        )
        build = partial(_gpt, heads, hidden, layers, vocab, length)
        seconds = flops / devices / (rate * 1e12)
        yield Run(f"GPT {billions:g}B, {devices} A100", _MEGATRON, "A100", build, layouts, length, seconds)


def llama_runs() -> Iterator[Run]:
    """Yield Llama 3 405B on H100 without recomputation; model FLOPs per token are 6 N plus causal attention."""
    parameters, hidden, layers = 405.85e9 - 128256 * 16384, 16384, 126
    for devices, cp, dp, length, share, rate in (
        (8192, 1, 64, 8192, 32, 430),
        (16384, 1, 128, 8192, 16, 400),
        (16384, 16, 8, 131072, 16, 380),
    ):
        flops = (6 * parameters + 6 * layers * hidden * length) * length * share * dp
        layouts = tuple(
            _Unchecked(
                dp_size=dp,
                tp_size=8,
                pp_size=16,
                cp_size=cp,
                sequence=True,
                pp_style="interleaved",
                num_chunks=chunks,
                num_microbatches=share,
            )
            for chunks in (2, 4, 7)
        )
        seconds = flops / devices / (rate * 1e12)
        name = f"Llama 3 405B, {devices} H100, {length} tokens"
        yield Run(name, _LLAMA, "H100", partial(_llama, length), layouts, length, seconds)


class _Unchecked(Layout):
    """Layout with a context-parallel axis that the planner can predict but this version cannot run."""

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options().items() if name != "cp_size"}


def _gpt(heads: int, hidden: int, layers: int, vocab: int, length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # The system of 2021 had no fused attention.
    config = GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocab, n_positions=length, attn_implementation="eager"
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama(length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=length,
    )  # fmt: skip
    return LlamaForCausalLM(config)
