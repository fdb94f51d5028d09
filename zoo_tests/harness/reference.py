"""Plain training: one process, transformers and torch, the whole global batch at once. No line of the library."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from zoo_tests.harness.case import LOSS_SCALE, Recipe
from zoo_tests.harness.quantised import values_of
from zoo_tests.zoo import Batch, Head

_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Trace:
    """What training left behind.

    Attributes:
        losses: of every step.
        gradients: name -> full gradient of the first step, before clipping; all names of a tied parameter; parameters
            without a gradient are absent.
        weights: name -> value after the last step.
        first_weights: name -> value before the first step.
        aliases: sets of names of the same parameter, for every trained parameter.
        grad_norms: of every step, where gradients are clipped.
        config: what `save_pretrained` writes of the model's configuration after the last step.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    first_weights: dict[str, Tensor]
    aliases: list[frozenset[str]]
    grad_norms: list[float]
    config: dict[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=64)
def train_reference(recipe: Recipe) -> Trace:
    """Train by the recipe."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _SixteenBit(recipe).train() if recipe.precision in _CAST else _Plain(recipe).train()
    finally:
        torch.set_num_threads(threads)


class _Plain:
    """Trains a model in its own dtype."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model = recipe.model()
        self.optimizer, self.scheduler = recipe.training(self.model)
        self.trained = list(self.model.parameters())
        self.config = self.model.config

    def train(self) -> Trace:
        aliases = _aliases(self.model)
        trace = Trace([], {}, {}, _copies(self.model), aliases, [])
        for step in range(self.recipe.steps):
            trace.losses.append(self._backward(self.recipe.batch(step)))
            if step == 0:
                trace.gradients = self._gradients()
            if self.recipe.max_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(self.trained, self.recipe.max_norm)
                trace.grad_norms.append(norm.item())
            self._step()
        trace.weights = _copies(self.model)
        trace.config = json.loads(self.config.to_json_string())
        return trace

    def _backward(self, batch: Batch) -> float:
        loss = loss_of(self.model, self.recipe.zoo_head, batch)
        loss.backward()
        return loss.item()

    def _gradients(self) -> dict[str, Tensor]:
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: param.grad.clone() for name, param in named if param.grad is not None}

    def _step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


class _SixteenBit(_Plain):
    """Trains a 16-bit copy of the parameters; the optimizer works on the fp32 originals."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.dtype = _CAST[recipe.precision]
        self.scale = LOSS_SCALE if recipe.precision == "fp16" else 1.0
        self.working = recipe.model()
        self.config = self.working.config
        for param in self.working.parameters():
            if param.is_floating_point():
                param.data = param.data.to(self.dtype)  # buffers keep their precision

    def _backward(self, batch: Batch) -> float:
        inputs = {
            key: value.to(self.dtype) if value.is_floating_point() and key != "labels" else value
            for key, value in batch.items()
        }
        loss = loss_of(self.working, self.recipe.zoo_head, inputs)
        (loss * self.scale).backward()
        for master, param in zip(self.model.parameters(), self.working.parameters(), strict=True):
            master.grad = None if param.grad is None else param.grad.float() / self.scale
            param.grad = None
        return loss.item()

    def _step(self) -> None:
        super()._step()
        with torch.no_grad():
            for master, param in zip(self.model.parameters(), self.working.parameters(), strict=True):
                param.copy_(master)


def loss_of(model: nn.Module, head: Head, batch: Batch) -> Tensor:
    """The loss of a global batch: the user's criterion, or the head's own."""
    outputs = model(**inputs_of(head, batch))
    if head.criterion is not None:
        value = head.criterion(outputs, batch)
        return value[0] / value[1] if isinstance(value, tuple) else value
    if head.reference_loss is None:
        dtype = next(model.parameters()).dtype
        assert outputs.loss.dtype == dtype and dtype.itemsize >= 4, f"transformers' loss is no reference in {dtype}"
        return outputs.loss
    loss = head.reference_loss(outputs, batch)
    allowed = 1e-5 if outputs.logits.dtype in (torch.float32, torch.float64) else 2e-2
    assert abs(loss.item() - outputs.loss.item()) <= allowed * abs(loss.item()), "reference_loss is not this head's"
    return loss


def inputs_of(head: Head, batch: Batch) -> dict[str, Any]:
    """What is given to the model: with a criterion, no labels (computing another loss would only cost time)."""
    if head.native_labels is not None:
        batch = batch | head.native_labels(batch)
    return {key: value for key, value in batch.items() if head.criterion is None or "labels" not in key}


def _aliases(model: nn.Module) -> list[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad:
            names.setdefault(id(param), set()).add(name)
    return [frozenset(group) for group in names.values()]


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values_of(model.state_dict()).items()}
