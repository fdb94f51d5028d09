"""Runs of one optimizer or several, sharded and plain, over many steps; and checkpoints between them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Case, Recipe, share_of
from zoo_tests.harness.compare import check_losses, check_weights, tolerance_of
from zoo_tests.harness.optimizers import BlockwiseAdam, Lamb, Lion, ScheduleFreeSGD
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.reference import Trace, _aliases, _copies, loss_of

Optimizers = list[torch.optim.Optimizer]
_TABLES = ("embed", "wte", "wpe", "lm_head")  # what Muon leaves to another optimizer


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The hidden matrices, and everything else."""
    named = list(model.named_parameters())
    hidden = [param for name, param in named if param.dim() == 2 and not any(table in name for table in _TABLES)]
    return hidden, [param for _, param in named if all(param is not each for each in hidden)]


def _muon(model: nn.Module) -> Optimizers:
    hidden, rest = _split(model)
    return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=2e-3, eps=1e-4)]


def _adafactor_of_transformers(model: nn.Module) -> Optimizers:
    from transformers.optimization import Adafactor

    return [Adafactor(model.parameters(), lr=None, warmup_init=True, weight_decay=0.01)]


def _adamw_8bit(model: nn.Module) -> Optimizers:
    import bitsandbytes

    # In 32 bit: what Trainer names by its module, and what a script names by itself.
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    manager.register_module_override(model.get_input_embeddings(), "weight", {"optim_bits": 32})
    manager.override_config(model.get_submodule("model.layers.1.mlp.down_proj").weight, "optim_bits", 32)
    manager.register_parameters(model.parameters())
    return [bitsandbytes.optim.AdamW8bit(model.parameters(), lr=2e-3, min_8bit_size=1024)]


MAKERS: dict[str, Callable[[nn.Module], Optimizers]] = {
    "muon": _muon,
    "adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.02)],
    "adafactor_of_transformers": _adafactor_of_transformers,
    "lamb": lambda model: [Lamb(model.parameters())],
    "lion": lambda model: [Lion(model.parameters())],
    "schedule_free": lambda model: [ScheduleFreeSGD(model.parameters(), lr=0.3)],
    "blockwise": lambda model: [BlockwiseAdam(model.parameters(), lr=2e-3)],
    "adamw_8bit": _adamw_8bit,
}


@dataclass
class Training:
    """The objects of a sharded training loop."""

    plugin: HybridParallelPlugin
    booster: Booster
    model: Any
    optimizers: list[Any]

    def share(self, recipe: Recipe, step: int) -> dict[str, Tensor]:
        """This rank's share of the global batch of a step."""
        return share_of(recipe.batch(step), self.plugin.dp_rank, self.plugin.dp_size)

    def step(self, recipe: Recipe, step: int) -> float:
        """One step of all optimizers; returns the loss."""
        batches = iter([self.share(recipe, step)])
        loss = self.booster.execute_pipeline(batches, self.model, optimizer=self.optimizers[0]).loss.item()
        if recipe.max_norm is not None:
            self.model.clip_grad_norm_(recipe.max_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss


def start(case: Case, maker: str) -> Training:
    """Build and boost; the gradients of several optimizers are clipped by hand, by one norm."""
    plugin = HybridParallelPlugin(**{**case.plugin_options, "max_norm": None})
    booster = Booster(plugin=plugin)
    model = case.recipe.model()
    model, *optimizers = booster.boost(model, *MAKERS[maker](model))
    return Training(plugin, booster, model, optimizers)


def train_some(case: Case, maker: str, first: int, last: int, directory: Path) -> list[float]:
    """Continue from the states of step `first`, save those of step `last`; the model as files of its own."""
    training = start(case, maker)
    booster, optimizers = training.booster, training.optimizers
    if first:
        booster.load_model(training.model, directory / f"model-{first}")
        for index, optimizer in enumerate(optimizers):
            booster.load_optimizer(optimizer, directory / f"optimizer-{index}-{first}")
    losses = [training.step(case.recipe, step) for step in range(first, last)]
    booster.save_model(training.model, directory / f"model-{last}")
    for index, optimizer in enumerate(optimizers):
        booster.save_optimizer(optimizer, directory / f"optimizer-{index}-{last}")
    return losses


def numbers_of_states(case: Case, maker: str) -> list[int]:
    """Of each rank: how many values the states of the first optimizer have after a step."""
    return run_on_ranks(case.sizes.world_size, _count_states, case, maker)


def _count_states(case: Case, maker: str) -> int:
    training = start(case, maker)
    training.step(case.recipe, 0)
    states = training.optimizers[0].state.values()
    return sum(value.numel() for state in states for value in state.values() if isinstance(value, Tensor))


@lru_cache(maxsize=64)
def plain_run(recipe: Recipe, maker: str) -> Trace:
    """The same in one process: transformers and torch, the whole global batch at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = recipe.model()
        optimizers = MAKERS[maker](model)
        trace = Trace([], {}, {}, _copies(model), _aliases(model), [])
        for step in range(recipe.steps):
            loss = loss_of(model, recipe.zoo_head, recipe.batch(step))
            trace.losses.append(loss.item())
            loss.backward()
            if recipe.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        trace.weights = _copies(model)
        return trace
    finally:
        torch.set_num_threads(threads)


def check_run(cases: list[Case], maker: str, borders: list[int], directory: Path) -> None:
    """Train on one layout after another, up to the steps of `borders`, and compare with uninterrupted plain training.

    Raises:
        AssertionError: losses or weights differ.
    """
    losses: list[float] = []
    first = 0
    for case, last in zip(cases, borders, strict=True):
        losses += run_on_ranks(case.sizes.world_size, train_some, case, maker, first, last, directory)[0]
        first = last
    recipe = cases[0].recipe
    plain, tolerance = plain_run(recipe, maker), tolerance_of(recipe.precision)
    check_losses(losses, plain.losses, tolerance.loss)
    model_class = getattr(importlib.import_module(recipe.zoo_family.module), recipe.zoo_head.model_class)
    found = model_class.from_pretrained(directory / f"model-{first}", dtype=recipe.dtype).state_dict()
    check_weights(found, plain, tolerance)
