"""Train models of real sizes in fp32 on two ranks, and plainly in fp64: every loss, norm, clipped step and weight.

    python -m zoo_tests.campaigns.scale [--models PATTERN] [--layouts PATTERN] [--log FILE]
        [--output docs/results/scale.md]

A tiny model shows a wrong formula; it does not show a sum over 10^8 values that rounds, a bucket that is as large as an
embedding of 128,000 rows, or attention over 8,192 tokens. The weights of the oracle lie on disk: 9 GiB of memory and 9
of disk are enough. What is in the log is not trained again.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.campaigns.census.verdict import add_row, read_rows
from zoo_tests.harness.case import share_of
from zoo_tests.harness.ranks import run_on_ranks, stop_pools
from zoo_tests.zoo.labels import IGNORED, causal_loss, token_loss

LIMIT = 2e-6
QUANTITIES = ("losses", "norms", "movement", "weights")
_STEPS, _LEARNING_RATE, _MAX_NORM, _TIMEOUT_S = 5, 0.05, 1.0, 3000.0
_HEAD = """# Real sizes

Written by `python -m zoo_tests.campaigns.scale --output docs/results/scale.md`; do not edit.

Five steps of SGD with clipped gradients, in fp32 on two ranks, beside plain transformers and torch in fp64 with the
same initial weights. Norms and biases are perturbed, and sequences have different lengths. Errors are relative to the
numbers in fp64, and the largest is shown:

- losses, norms: of each step; the norm is that of all gradients before clipping.
- movement: the length of the way from the first weights to the last ones, which is wrong if clipping is.
- weights: the norm of the difference of a tensor after the last step, relative to the norm of the tensor.

The limit is {limit:.0e}. Rows "plain fp32", where there are any, are transformers and torch in fp32 in one process.
Norms are sums over up to 4e8 values, and Llama's and Gemma's vocabularies have 128,256 and 262,144 rows.

| Model | Parameters | Layout | losses | norms | movement | weights |
|---|---|---|---|---|---|---|
"""
_LLAMA_1B = {
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 64, "tie_word_embeddings": True, "vocab_size": 128256, "num_hidden_layers": 2},
}
_QWEN3_30B = {
    **{"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"head_dim": 128, "num_experts": 24, "num_experts_per_tok": 8, "vocab_size": 16384, "num_hidden_layers": 2},
}
_MIXTRAL = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 2048, "num_hidden_layers": 1},
}
_GEMMA3_270M = {
    **{"hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1},
    **{"head_dim": 256, "vocab_size": 262144, "num_hidden_layers": 4, "sliding_window": 8},
}
_NARROW = {
    **{"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 8192},
}
_BERT_LARGE = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
_GPT2_MEDIUM = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

PLAIN = "plain fp32"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "sp2": {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"},
    "pp2": {"pp_size": 2},
    "dp2 ZeRO-1": {"zero_stage": 1},
    "dp2 ZeRO-3": {"zero_stage": 3},
    "cp2": {"cp_size": 2},
    "cp2 all-to-all": {"cp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    "ep2": {"ep_size": 2},
}
_USUAL = ("tp2", "pp2", "dp2 ZeRO-1", "dp2 ZeRO-3", "cp2")


@dataclass(frozen=True)
class Subject:
    """A model and its batches.

    Attributes:
        model_class, config_class: names in transformers.
        config: fields of the configuration.
        layouts: names in `LAYOUTS`.
        lengths: of the sequences of a batch.
    """

    model_class: str
    config_class: str
    config: Mapping[str, Any]
    layouts: tuple[str, ...] = _USUAL
    lengths: tuple[int, ...] = (11, 7, 9, 4)

    def read(self, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model of a folder, in training mode."""
        model = getattr(transformers, self.model_class).from_pretrained(folder, dtype=dtype)
        model.config.use_cache = False
        return model.train()

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of a step: each [rows, longest], padded on the right; a third of the labels is ignored."""
        generator = torch.Generator().manual_seed(step)
        shape = len(self.lengths), max(self.lengths)
        ids = torch.randint(1, self.config.get("vocab_size", 30000), shape, generator=generator)
        mask = (torch.arange(shape[1]) < torch.tensor(self.lengths).roll(step)[:, None]).long()
        ignored = (mask == 0) | (torch.rand(shape, generator=generator) < 1 / 3)
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(ignored, IGNORED)}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """In the dtype of the model; that of transformers is in fp32."""
        outputs = model(**{key: value for key, value in batch.items() if key != "labels"})
        return (token_loss if "MaskedLM" in self.model_class else causal_loss)(outputs, batch)


SUBJECTS = {
    "GPT-2 medium": Subject("GPT2LMHeadModel", "GPT2Config", _GPT2_MEDIUM),
    "BERT-large": Subject("BertForMaskedLM", "BertConfig", _BERT_LARGE),
    "Llama 3.2 1B, 2 layers": Subject("LlamaForCausalLM", "LlamaConfig", _LLAMA_1B, (*_USUAL, "sp2")),
    # The experts alone are 0.35 and 0.23 billion: more layers or experts are too large for fp64 here.
    "Mixtral 8x7B, 1 layer, 2 experts": Subject(
        "MixtralForCausalLM", "MixtralConfig", _MIXTRAL, ("tp2", "dp2 ZeRO-1", "dp2 ZeRO-3", "cp2", "ep2")
    ),
    "Qwen3 30B-A3B, 2 layers, 24 experts": Subject(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", _QWEN3_30B, (*_USUAL, "ep2")
    ),
    "Gemma 3 270M, 4 layers": Subject("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA3_270M),
    "Llama of 8,192 tokens": Subject(
        "LlamaForCausalLM", "LlamaConfig", _NARROW, ("cp2", "cp2 all-to-all", "sp2"), (8190,)
    ),
}


@dataclass
class Trace:
    """What a training leaves beside its weights: losses and gradient norms of every step, and number of parameters."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: int = 0


def write(subject: Subject, folder: Path) -> None:
    """Leave a new model in fp32 in a folder."""
    torch.manual_seed(3)
    config = getattr(transformers, subject.config_class)(**subject.config)
    model = getattr(transformers, subject.model_class)(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:  # norms start at 1, and biases at 0
                param.add_(torch.randn_like(param), alpha=0.05)
    model.save_pretrained(folder)


def train_plain(subject: Subject, first: Path, dtype: torch.dtype, last: Path) -> Trace:
    """Train the model of the folder `first` in one process, and write its last weights. No line of the library."""
    torch.set_num_threads(os.cpu_count() or 1)
    torch.use_deterministic_algorithms(False)  # fresh memory of so many bytes takes long to fill
    model = subject.read(first, dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no fp64
    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE, foreach=False)
    trace = Trace(parameters=sum(param.numel() for param in model.parameters()))
    for step in range(_STEPS):
        loss = subject.loss(model, subject.batch(step))
        loss.backward()
        trace.norms.append(nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM).item())
        trace.losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    save_file(dict(model.named_parameters()), last)
    return trace


def train_sharded(subject: Subject, first: Path, options: Mapping[str, Any], folder: Path) -> Trace:
    """Train the model of the folder `first` on all ranks; the last one is left in `folder`."""
    torch.use_deterministic_algorithms(False)
    model = subject.read(first)
    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE)
    plugin = HybridParallelPlugin(max_norm=_MAX_NORM, num_microbatches=2 if "pp_size" in options else 1, **options)
    booster = Booster(plugin=plugin)
    model, optimizer = booster.boost(model, optimizer)[:2]
    trace = Trace()
    for step in range(_STEPS):
        share = share_of(subject.batch(step), plugin.dp_rank, plugin.dp_size)
        trace.losses.append(booster.execute_pipeline(iter([share]), model, optimizer=optimizer).loss.item())
        optimizer.step()
        trace.norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    booster.save_model(model, folder)
    return trace


Weights = Mapping[str, Tensor]


def errors(found: Trace, weights: Weights, expected: Trace, oracle: Path, first: Weights) -> dict[str, float]:
    """The largest error of each of `QUANTITIES`; the file has the oracle's last weights."""
    worst, moved, should_move = 0.0, 0.0, 0.0
    with safe_open(oracle, "pt") as last:
        for name in last.keys():  # noqa: SIM118 - it is no mapping
            right, origin, weight = last.get_tensor(name), first[name].double(), weights[name].double()
            worst = max(worst, ((weight - right).norm() / right.norm()).item())
            moved += (weight - origin).square().sum().item()
            should_move += (right - origin).square().sum().item()
    return {
        "losses": _largest(found.losses, expected.losses),
        "norms": _largest(found.norms, expected.norms),
        "movement": _largest([math.sqrt(moved)], [math.sqrt(should_move)]),
        "weights": worst,
    }


def _largest(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def measure(name: str, subject: Subject, layouts: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each layout, one of which may be `PLAIN`: its name, number of parameters, errors, and seconds."""
    with tempfile.TemporaryDirectory(prefix="scale-") as directory:
        first, last, other = (Path(directory) / each for each in ("first", "fp64.safetensors", "other.safetensors"))
        _on(1, write, subject, first)
        expected = _on(1, train_plain, subject, first, torch.float64, last)
        for layout in layouts:
            start = time.monotonic()
            if layout == PLAIN:
                found = _on(1, train_plain, subject, first, torch.float32, other)
                weights: Weights = load_file(other)
            else:
                folder = Path(directory) / layout
                found = _on(2, train_sharded, subject, first, LAYOUTS[layout], folder)
                weights = subject.read(folder).state_dict()
                shutil.rmtree(folder)
            found_errors = errors(found, weights, expected, last, subject.read(first).state_dict())
            del weights
            yield {
                **{"model": name, "layout": layout, "parameters": expected.parameters, "errors": found_errors},
                **{"seconds": round(time.monotonic() - start)},
                **{"trace": asdict(found), "expected": asdict(expected)},
            }


def _on(ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns on the first of so many new processes: the memory of old ones is theirs."""
    found = run_on_ranks(ranks, function, *args, timeout_s=_TIMEOUT_S)
    stop_pools()
    return found[0]


def page(rows: list[dict[str, Any]]) -> str:
    """The page of the documentation."""
    lines = []
    for name, group in groupby(rows, key=lambda row: row["model"]):
        for row in sorted(group, key=lambda row: row["layout"] != PLAIN):
            cells = " | ".join(f"{row['errors'][each]:.1e}" for each in QUANTITIES)
            lines.append(f"| {name} | {row['parameters'] / 1e6:.3g} million | {row['layout']} | {cells} |")
    return _HEAD.format(limit=LIMIT) + "\n".join(lines) + "\n"


def is_within(row: Mapping[str, Any]) -> bool:
    """Whether all errors are below the limit; NaN is not."""
    return all(error <= LIMIT for error in row["errors"].values())


def main() -> int:
    """Train; return 1 if an error of a sharded training exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help=f"regular expression on {', '.join(SUBJECTS)}")
    parser.add_argument("--layouts", default="", help=f"regular expression on {PLAIN}, {', '.join(LAYOUTS)}")
    parser.add_argument("--log", type=Path, help="log (.jsonl): written after each layout, read at first")
    parser.add_argument("--output", type=Path, help="page to write")
    given = parser.parse_args()
    rows = read_rows(given.log)
    known = {(row["model"], row["layout"]) for row in rows}
    try:
        for name, subject in SUBJECTS.items():
            layouts = [each for each in (*subject.layouts, PLAIN) if re.search(given.layouts, each)]
            new = [each for each in layouts if (name, each) not in known]
            for row in measure(name, subject, new) if new and re.search(given.models, name) else ():
                rows.append(row)
                print(f"{name}, {row['layout']}: {row['errors']} ({row['seconds']} s)", flush=True)
                add_row(given.log, row)
    finally:
        stop_pools()
    rows.sort(key=lambda row: list(SUBJECTS).index(row["model"]))
    if given.output:
        given.output.write_text(page(rows), encoding="utf-8")
    return int(not all(is_within(row) for row in rows if row["layout"] != PLAIN))


if __name__ == "__main__":
    # Ranks import what they run by the name of this module.
    sys.exit(importlib.import_module("zoo_tests.campaigns.scale").main())
