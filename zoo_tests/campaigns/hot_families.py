"""The families of the last twelve months under every axis, plainly, with LoRA, packed, and with the loss of routers.

    python -m zoo_tests.campaigns.hot_families [--families REGEX] [--layouts tp2,cp2] [--features lora,packed]
        [--log FILE] [--output docs/results/recent_families.md]

What is in the log is not trained again.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from plugins.hybrid_parallel.verify.compare import Tolerance, compare
from plugins.hybrid_parallel.verify.tiny_model import TinyModel
from plugins.hybrid_parallel.verify.train import VerifyCase, train_reference
from shardformer.attention.packed_documents import document_starts
from shardformer.layers.experts import expert_modules
from shardformer.loss.terms import router_loss_of
from zoo_tests.campaigns.census.classes import HeadClass
from zoo_tests.campaigns.census.trained import trained_or_refused, twin_of
from zoo_tests.campaigns.census.verdict import EXACT, NO_ANSWER, Verdict, append, kind_of, read_log, reasons
from zoo_tests.harness.adapters import with_adapters
from zoo_tests.harness.ranks import RankError, run_on_ranks, stop_pools

_ROWS, _STEPS, _TIMEOUT_S = 5, 2, 120.0
_TOLERANCE = Tolerance(loss=1e-3, tensor=1e-3, floor=1e-4)

FAMILIES: dict[str, str] = {
    "bamba": "BambaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma3n": "Gemma3nForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "jamba": "JambaForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen4_exp": "Qwen4ExpForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "t5gemma": "T5GemmaForConditionalGeneration",
    "t5gemma2": "T5Gemma2ForConditionalGeneration",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2, "num_microbatches": 1},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "sp2": {"tp_size": 2, "enable_sequence_parallelism": True},
    "cp2": {"cp_size": 2},
    "ep2": {"ep_size": 2, "num_microbatches": 2},
}
_PLAIN = "plain"
_HEAD = """# Recent families under every axis

Written by `python -m zoo_tests.campaigns.hot_families --output docs/results/recent_families.md`; do not edit.

Tiny models of families of the last twelve months, trained on two ranks and plainly, in fp32: every loss and gradient is
compared. *plain*: as it is. *lora*: adapters of peft on the linear layers of attention. *packed*: several documents in
a row, compared with plain training on the documents in rows of their own. *router*: with the loss of the routers, at a
large coefficient. sp2: `tp_size=2` with sequence parallelism. cp2: `cp_size=2` by ring attention. ep2: experts shared
by two ranks. An empty cell: the model has no experts.
"""
FEATURES = ("plain", "lora", "packed", "router")


@dataclass(frozen=True)
class Subject:
    """A tiny model of a family, and what is asked of it.

    Attributes:
        family: a key of `FAMILIES`.
        feature: "plain"; "lora" on linear layers of attention; "packed" documents in one row; "router" losses.
        by_document: whether packed documents have rows of their own, as plain transformers sees them.
    """

    family: str
    feature: str
    by_document: bool = False

    @property
    def name(self) -> str:
        """Name of the model for messages."""
        return FAMILIES[self.family]

    @property
    def twin_of(self) -> TinyModel:
        return twin_of(HeadClass(self.family, FAMILIES[self.family]))

    def build(self) -> nn.Module:
        """Build the model in training mode, without dropout."""
        model = self.twin_of.build()
        if self.feature == "router":
            text = model.config.get_text_config()
            model.config.output_router_logits = text.output_router_logits = True
            for holder in (model, model.config, text):
                for name in ("router_aux_loss_coef", "aux_loss_coef"):
                    if hasattr(holder, name):
                        setattr(holder, name, 2.0)  # so that a wrong loss exceeds the tolerance
        return with_adapters(model, _linears_of_attention(model)) if self.feature == "lora" else model

    def batch(self, model: nn.Module, step: int, rows: int) -> dict[str, Tensor]:
        """Make the global batch of a step."""
        batch = self.twin_of.batch(model.get_base_model() if self.feature == "lora" else model, step, rows)
        if self.feature != "packed":
            return batch
        packed = _packed(batch["input_ids"], rows, step)
        return _unpacked(packed) if self.by_document else packed

    def is_meaningful(self) -> bool:
        """Whether the model has what the feature needs."""
        if self.feature == "packed":
            return "position_ids" in inspect.signature(self.twin_of.build().forward).parameters
        return self.feature != "router" or router_loss_of(self.twin_of.build()) is not None

    def has_experts(self) -> bool:
        """Whether the model has experts that ranks can share."""
        return next(expert_modules(self.twin_of.build()), None) is not None


def judge(subject: Subject, layouts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the verdict under each layout: "exact", or what differs, or why it is refused."""
    try:
        plain = train_reference(VerifyCase(replace(subject, by_document=True), _ROWS, _STEPS, {}))
    except Exception as error:  # plain training may fail in its own way
        yield _PLAIN, f"{type(error).__name__}: {' '.join(str(error).split())}"
        return
    for layout in layouts:
        case = VerifyCase(subject, _ROWS, _STEPS, LAYOUTS[layout])
        try:
            ranks = run_on_ranks(2, trained_or_refused, case, timeout_s=_TIMEOUT_S)
        except RankError as error:
            lines = [line for line in str(error).splitlines() if "Error: " in line]
            yield layout, lines[-1] if lines else NO_ANSWER
            continue
        refusals = [each for each in ranks if isinstance(each, str)]
        if refusals:
            yield layout, refusals[0]
            continue
        verdict = compare(plain, ranks, _TOLERANCE)
        losses, gradients, _ = verdict.worst
        is_exact = losses.value < _TOLERANCE.loss and gradients.value < _TOLERANCE.tensor
        yield layout, EXACT if is_exact else verdict.first.text


def _linears_of_attention(model: nn.Module) -> tuple[str, ...]:
    """Return the last names of linear layers inside attention, or else of all in the layers (Mamba)."""
    linears = [path for path, each in model.named_modules() if type(each) is nn.Linear and ".layers." in path]
    inside = [path for path in linears if "attn" in path or "attention" in path]
    names = {path.rpartition(".")[2] for path in inside or linears}
    if any("Mamba" in type(each).__name__ for each in model.modules()):
        names.discard("out_proj")  # peft refuses it
    return tuple(sorted(names))


def _packed(ids: Tensor, rows: int, step: int) -> dict[str, Tensor]:
    """Return rows of documents of several lengths, told apart by their numbers and by positions, [rows, 12]."""
    generator = torch.Generator().manual_seed(500 + step)
    ids = torch.randint(5, 95, (rows, 12), generator=generator)
    positions, labels = torch.arange(12).repeat(rows, 1), ids.clone()
    for row in range(rows):
        for border in (4 + row % 3, 9):
            positions[row, border:] -= int(positions[row, border])
            labels[row, border] = -100
    numbers = document_starts(positions).cumsum(-1).int()
    return {"input_ids": ids, "position_ids": positions, "seq_idx": numbers, "labels": labels}


def _unpacked(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch whose rows are the documents of a packed one, with padding behind them."""
    starts = document_starts(batch["position_ids"]).flatten().nonzero()[:, 0].tolist()
    lengths = [end - start for start, end in pairwise([*starts, batch["input_ids"].numel()])]
    ids, labels = (
        pad_sequence(batch[name].flatten().split(lengths), batch_first=True, padding_value=fill)
        for name, fill in (("input_ids", 1), ("labels", -100))
    )
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def page(found: Mapping[str, Mapping[str, str]], layouts: Sequence[str]) -> str:
    """The page of the documentation; found: "family feature" -> layout -> verdict."""
    rows = [["Family", "What", *layouts], ["---"] * (len(layouts) + 2)]
    for name, verdicts in found.items():
        rows.append([*name.split(), *(kind_of(verdicts[each]) if each in verdicts else "" for each in layouts)])
    exact = {layout: [each[layout] for each in found.values() if layout in each] for layout in layouts}
    counts = [f"{each.count(EXACT)} of {len(each)}" for each in exact.values()]
    rows.insert(2, ["**exact**", "", *counts])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    named = {f"{name}/{FAMILIES[name.split()[0]]}": verdicts for name, verdicts in found.items()}
    return f"{_HEAD}\n{table}\n\n## What is not exact\n\n{reasons(named)}\n"


def main() -> int:
    """Train the families; return 1 if one differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="", help="a regular expression")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--features", default=",".join(FEATURES))
    parser.add_argument("--log", type=Path, help="log (.jsonl): written after each model, read at first")
    parser.add_argument("--output", type=Path, help="page to write")
    given = parser.parse_args()
    log, found, layouts = read_log(given.log) if given.log else {}, {}, given.layouts.split(",")
    families = [each for each in FAMILIES if re.search(given.families, each)]
    try:
        for subject in (Subject(family, feature) for family in families for feature in given.features.split(",")):
            name = f"{subject.family} {subject.feature}"
            known = log.get(name, Verdict(EXACT))
            if name not in log and subject.is_meaningful():
                asked = [each for each in layouts if each != "ep2" or subject.has_experts()]
                known.layouts |= dict(judge(subject, asked))
                if given.log:
                    append(given.log, name, known)
                for layout, verdict in known.layouts.items():
                    sys.stdout.write(f"{name:24} {layout:5} {' '.join(verdict.split())[:260]}\n")
                sys.stdout.flush()
            if known.layouts:
                found[name] = known.layouts
    finally:
        stop_pools()
    if given.output:
        given.output.write_text(page(found, layouts), encoding="utf-8")
    kinds = [kind_of(verdict) for verdicts in found.values() for verdict in verdicts.values()]
    return int(any(kind not in (EXACT, "refused") for kind in kinds))


if __name__ == "__main__":
    # Ranks import the classes of their task by the name of this module.
    sys.exit(importlib.import_module("zoo_tests.campaigns.hot_families").main())
