"""Training on the simulated CUDA device: what the CPU computes, under the rules of CUDA and NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.zero import user_optimizer
from plugins.hybrid_parallel.zero.bucket import Bucket
from shardformer.matmul import kernel
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.simcuda import rules

STEPS, ROWS, LENGTH, VOCABULARY = 3, 8, 12, 64
_EXCHANGE = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # name -> (number of ranks, options)
    "single": (1, {}),
    "tp2": (2, {"tp_size": 2}),
    "tp2-sequence": (2, {"tp_size": 2, "enable_sequence_parallelism": True}),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 4}),
    "dp2": (2, {"dp_size": 2, "zero_stage": 1, "zero_bucket_size_in_mb": 0.02, "num_microbatches": 4}),
    "dp2-zero0": (2, {"dp_size": 2, "zero_stage": 0}),
    "tp2-exchange": (2, {"tp_size": 2, **_EXCHANGE}),
    "cp2": (2, {"cp_size": 2}),
    "cp2-exchange": (2, {"cp_size": 2, "sequence_parallelism_mode": "all_to_all"}),
    "tp2pp2": (4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 4}),
}
FAMILIES = ("bert", "llama")


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    if family == "bert":
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForSequenceClassification(BertConfig(**sizes, **dropouts, vocab_size=VOCABULARY))
    decoder = {"num_key_value_heads": 2, "vocab_size": VOCABULARY}
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, **decoder, num_local_experts=4))
    return LlamaForCausalLM(LlamaConfig(**sizes, **decoder))


def batch(family: str, step: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    labels = ids[:, 0] % 2 if family == "bert" else ids.clone()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


class Training:
    """A boosted model and its loop.

    Args:
        family: "bert", "llama" or "mixtral".
        rows: samples of the global batch.
        frozen: prefixes of names of parameters that are not trained.
        options: of the plugin.
    """

    def __init__(self, family: str, rows: int = ROWS, frozen: tuple[str, ...] = (), **options: Any) -> None:
        self.family, self.rows, model = family, rows, build(family)
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.plugin = HybridParallelPlugin(seed=1, max_norm=1.0, **options)
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer = self.booster.boost(model, optimizer)[:2]

    def share(self, number: int) -> dict[str, torch.Tensor]:
        """This replica's part of a step's batch."""
        own = self.rows // self.plugin.dp_size
        whole = batch(self.family, number, self.rows)
        return {name: value[self.plugin.dp_rank * own :][:own] for name, value in whole.items()}

    def step(self, number: int) -> float:
        """One step; its loss."""
        loss = self.booster.execute_pipeline(iter([self.share(number)]), self.model, optimizer=self.optimizer).loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @property
    def device(self) -> str:
        return self.plugin.grid.device.type


def train(
    family: str, options: dict[str, Any], active: tuple[str, ...] | None = None, hangs_after_s: float = 20
) -> tuple[str, list[float]]:
    """The device and the losses of training under these rules; None for the usual ones."""
    with rules.only(*(rules.settings.active if active is None else active), hangs_after_s=hangs_after_s):
        training = Training(family, **options)
        return training.device, [training.step(number) for number in range(STEPS)]


def reference(family: str, rows: int = ROWS) -> list[float]:
    """The losses of plain training of the whole batch."""
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(family, step, rows)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Each layout with one of the two families; the others are sampled.
_CASES = [
    pytest.param(family, layout, marks=pytest.mark.slow if (place + number) % 2 else ())
    for place, family in enumerate(FAMILIES)
    for number, layout in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("family", "layout"), _CASES)
def test_losses_are_those_of_the_cpu(family: str, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    for device, losses in run_on_ranks(world_size, train, family, options, device="simcuda"):
        assert device == "cuda"
        assert losses == pytest.approx(reference(family), rel=1e-5)


@pytest.mark.parametrize("layout", ["single", "tp2", "tp2-sequence", "dp2", "cp2"])
def test_under_every_rule(layout: str) -> None:
    """The device drains when it loads code, and now and then; in pipelines see test_findings.py."""
    world_size, options = LAYOUTS[layout]
    for _, losses in run_on_ranks(world_size, train, "llama", options, rules.ALL, device="simcuda"):
        assert losses == pytest.approx(reference("llama"), rel=1e-5)


def train_in_sixteen_bits(options: dict[str, Any], device: str) -> tuple[list[float], float]:
    """The losses and the loss scale at the end."""
    training = Training("llama", dp_size=2, zero_stage=1, num_microbatches=2, **options)
    assert training.device == device
    losses = [training.step(number) for number in range(STEPS)]
    return losses, training.optimizer.loss_scale.value


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "fp16", "initial_scale": 2.0**32}], ids=str)
def test_sixteen_bits(options: dict[str, Any]) -> None:
    """In fp16 the first scale is too large: steps overflow and are skipped, as on the CPU."""
    expected = run_on_ranks(2, train_in_sixteen_bits, options, "cpu", device="cpu")
    found = run_on_ranks(2, train_in_sixteen_bits, options, "cuda", device="simcuda")
    for (losses, scale), (same, same_scale) in zip(found, expected, strict=True):
        assert losses == pytest.approx(same, rel=2e-2)
        assert scale == same_scale and (scale < 2.0**32) == (options["precision"] == "fp16" or scale == 1)


def gradients_in_sixteen_bits(options: dict[str, Any], least: int) -> tuple[dict[str, torch.Tensor], int]:
    """The gradients of two micro-batches, and how many came through autograd; weights of `least` elements need none."""
    with (
        mock.patch.object(kernel, "_WORTH_A_NODE", least),
        mock.patch.object(Bucket, "accumulate", autospec=True, side_effect=Bucket.accumulate) as arrived,
    ):
        training = Training("llama", precision="bf16", num_microbatches=2, **options)
        training.booster.execute_pipeline(iter([training.share(0)]), training.model, optimizer=training.optimizer)
        return training.optimizer.full_gradients(), arrived.call_count


def low_bits(sums: torch.Tensor) -> bool:
    """Whether most sums have bits that those of two numbers in bf16 do not have."""
    return (sums.view(torch.int32) & 0xF != 0).float().mean().item() > 0.5


@pytest.mark.parametrize(
    "options",
    [{}, {"dp_size": 2, "zero_stage": 2}, {"tp_size": 2}, {"pp_size": 2, "pp_style": "zero_bubble"}],
    ids=str,
)
def test_products_of_sixteen_bits_add_weight_gradients_in_fp32(options: dict[str, Any]) -> None:
    ranks = 2 if options else 1
    found, arrived = run_on_ranks(ranks, gradients_in_sixteen_bits, options, 0, device="simcuda")[0]
    usual, all_arrived = run_on_ranks(ranks, gradients_in_sixteen_bits, options, 2**30, device="simcuda")[0]
    assert all(low_bits(each) for name, each in found.items() if "proj" in name)
    if not options:  # parallel layers write in both
        assert arrived < all_arrived and not any(low_bits(each) for each in usual.values())
    for name, each in found.items():
        assert (each - usual[name]).norm() < 1e-2 * usual[name].norm(), name


def muon_weights(boosts: bool) -> tuple[dict[str, torch.Tensor], int]:
    """The weights after two steps of Muon, and how many calls were in batches."""
    model = build("llama")
    weights = {name: each for name, each in model.named_parameters() if "proj" in name}
    optimizer = torch.optim.Muon(weights.values(), lr=0.02)
    booster = Booster(plugin=HybridParallelPlugin()) if boosts else None
    with mock.patch.object(user_optimizer, "batched_muon", side_effect=user_optimizer.batched_muon) as batched:
        if booster is not None:
            model, optimizer = booster.boost(model, optimizer)
        for number in range(2):
            loss = model(**batch("llama", number, 2)).loss
            loss.backward() if booster is None else booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return {name: each.detach().cpu() for name, each in weights.items()}, batched.call_count


def test_muon_iterates_on_matrices_of_one_shape_together() -> None:
    found, calls = run_on_ranks(1, muon_weights, True, device="simcuda")[0]
    expected, _ = muon_weights(boosts=False)
    assert calls == 2
    before = dict(build("llama").named_parameters())
    for name, weight in expected.items():  # it rounds to bf16 inside
        assert (found[name] - weight).norm() < 5e-2 * (weight - before[name].detach()).norm(), name


def continue_from_checkpoint(
    directory: str, options: dict[str, Any], asynchronous: bool
) -> tuple[list[float], list[float]]:
    """Losses after a checkpoint: of the training that went on while it was written, and of one that resumes from it."""
    first = Training("llama", **options)
    first.step(0)
    first.booster.save_checkpoint(directory, model=first.model, optimizer=first.optimizer, asynchronous=asynchronous)
    went_on = [first.step(number) for number in (1, 2)]
    first.booster.plugin.checkpoint_io.finish_saving()
    second = Training("llama", **options)
    second.booster.load_checkpoint(directory, model=second.model, optimizer=second.optimizer)
    return went_on, [second.step(number) for number in (1, 2)]


@pytest.mark.parametrize(
    ("layout", "asynchronous"),
    [
        ("tp2", True),
        ("dp2", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("tp2", False), ("dp2", True)]),
    ],
)
def test_checkpoint(layout: str, asynchronous: bool, tmp_path: Path) -> None:
    """The copy for an asynchronous save is in pinned memory, which holds NaN until the host has waited for it."""
    world_size, options = LAYOUTS[layout]
    for went_on, resumed in run_on_ranks(
        world_size, continue_from_checkpoint, str(tmp_path / "checkpoint"), options, asynchronous, device="simcuda"
    ):
        assert went_on == resumed == pytest.approx(reference("llama")[1:], rel=1e-5)


def generate(options: dict[str, Any]) -> list[list[int]]:
    training = Training("llama", **options)
    training.model.eval()
    ids = batch("llama", 0, 2)["input_ids"].to(training.device)
    return training.model.generate(input_ids=ids, max_new_tokens=6, do_sample=False).tolist()


def test_generate() -> None:
    model = build("llama").eval()
    expected = model.generate(input_ids=batch("llama", 0, 2)["input_ids"], max_new_tokens=6, do_sample=False).tolist()
    for tokens in run_on_ranks(2, generate, {"tp_size": 2}, device="simcuda"):
        assert tokens == expected
