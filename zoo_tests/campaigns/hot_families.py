"""The families of the last twelve months under every axis, plainly, with LoRA, packed, and with the loss of routers.

python -m zoo_tests.campaigns.hot_families [--families REGEX] [--layouts tp2,cp2] [--features lora,packed]
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.verify.compare import Tolerance, compare
from plugins.hybrid_parallel.verify.tiny_model import TinyModel
from plugins.hybrid_parallel.verify.train import VerifyCase, train_reference
from shardformer.expert_parallel.experts import expert_modules
from shardformer.loss.routers import router_loss_of
from zoo_tests.campaigns.census.classes import HeadClass
from zoo_tests.campaigns.census.trained import trained_or_refused, twin_of
from zoo_tests.harness.adapters import with_adapters
from zoo_tests.harness.ranks import RankError, run_on_ranks

EXACT = "exact"
_ROWS, _STEPS, _TIMEOUT_S = 5, 2, 120.0
_TOLERANCE = Tolerance(loss=1e-3, tensor=1e-3, floor=1e-4)

FAMILIES: dict[str, str] = {
    "gemma4": "Gemma4ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "bamba": "BambaForCausalLM",
    "jamba": "JambaForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2, "num_microbatches": 1},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "sp2": {"tp_size": 2, "enable_sequence_parallelism": True},
    "cp2": {"cp_size": 2},
    "ep2": {"ep_size": 2, "num_microbatches": 2},
}
FEATURES = ("plain", "lora", "packed", "router")


@dataclass(frozen=True)
class Subject:
    """A tiny model of a family, and what is asked of it.

    Attributes:
        family: a key of `FAMILIES`.
        feature: "plain"; "lora" on linear layers of attention; "packed" documents in one row; "router" losses.
    """

    family: str
    feature: str

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
            model.config.output_router_logits = True
            for holder in (model, model.config):
                for name in ("router_aux_loss_coef", "aux_loss_coef"):
                    if hasattr(holder, name):
                        setattr(holder, name, 2.0)  # so that a wrong loss exceeds the tolerance
        return with_adapters(model, _linears_of_attention(model)) if self.feature == "lora" else model

    def batch(self, model: nn.Module, step: int, rows: int) -> dict[str, Tensor]:
        """Make the global batch of a step."""
        batch = self.twin_of.batch(model.get_base_model() if self.feature == "lora" else model, step, rows)
        return _packed(batch["input_ids"], rows, step) if self.feature == "packed" else batch

    def is_meaningful(self) -> bool:
        """Whether the model has what the feature needs."""
        return self.feature != "router" or router_loss_of(self.twin_of.build()) is not None

    def has_experts(self) -> bool:
        """Whether the model has experts that ranks can share."""
        return next(expert_modules(self.twin_of.build()), None) is not None


def judge(subject: Subject, layouts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the verdict under each layout: "exact", or what differs, or why it is refused."""
    try:
        plain = train_reference(VerifyCase(subject, _ROWS, _STEPS, {}))
    except Exception as error:  # plain training may fail in its own way
        yield "plain", f"{type(error).__name__}: {error}"
        return
    for layout in layouts:
        case = VerifyCase(subject, _ROWS, _STEPS, LAYOUTS[layout])
        try:
            ranks = run_on_ranks(2, trained_or_refused, case, timeout_s=_TIMEOUT_S)
        except RankError as error:
            lines = [line for line in str(error).splitlines() if "Error: " in line]
            yield layout, lines[-1] if lines else "a rank did not answer"
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
    """Return rows of documents of several lengths, told apart by positions that restart, [rows, 12]."""
    generator = torch.Generator().manual_seed(500 + step)
    ids = torch.randint(5, 95, (rows, 12), generator=generator)
    positions, labels = torch.arange(12).repeat(rows, 1), ids.clone()
    for row in range(rows):
        for border in (4 + row % 3, 9):
            positions[row, border:] -= int(positions[row, border])
            labels[row, border] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="", help="a regular expression")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--features", default=",".join(FEATURES))
    given = parser.parse_args()
    for feature in given.features.split(","):
        for family in (each for each in FAMILIES if re.search(given.families, each)):
            subject = Subject(family, feature)
            if subject.is_meaningful():
                layouts = [each for each in given.layouts.split(",") if each != "ep2" or subject.has_experts()]
                for layout, verdict in judge(subject, layouts):
                    print(f"{family:18} {feature:7} {layout:5} {' '.join(verdict.split())[:260]}", flush=True)


if __name__ == "__main__":
    # Ranks import the classes of their task by the name of this module.
    importlib.import_module("zoo_tests.campaigns.hot_families").main()
