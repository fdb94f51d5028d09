"""A small BERT on some layout, and faults that are put into it: for tests of what the library says about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import BertConfig, BertForMaskedLM

from booster import Booster
from booster.errors import NonFiniteError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.utils.untraced import in_backward
from zoo_tests.harness.ranks import run_on_ranks

LAYOUTS = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "dp2": {},
    "tp2pp2": {"tp_size": 2, "pp_size": 2, "num_microbatches": 2},
}
SIZES = {"tp2": 2, "pp2": 2, "dp2": 2, "tp2pp2": 4}
NOTHING = "no error was raised"
NAN, INF = float("nan"), float("inf")
LAYER = "bert.encoder.layer.{}."


@dataclass
class Job:
    """A small BERT on some layout, and the faults that are put into it."""

    booster: Booster
    plugin: HybridParallelPlugin
    model: Any
    optimizer: Any
    scheduler: Any
    handles: list[RemovableHandle] = field(default_factory=list)

    @staticmethod
    def start(**options: Any) -> Job:
        torch.manual_seed(1)
        config = BertConfig(
            vocab_size=60,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model = BertForMaskedLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        plugin = HybridParallelPlugin(**{"zero_bucket_size_in_mb": 0.005, **options})
        booster = Booster(plugin=plugin)
        model, optimizer, scheduler = booster.boost(model, optimizer, scheduler)
        return Job(booster, plugin, model, optimizer, scheduler)

    def module(self, name: str) -> nn.Module | None:
        """The module of that name, if this stage has it."""
        return dict(self.model.unwrap().named_modules()).get(name)

    def parameter(self, name: str) -> nn.Parameter | None:
        return dict(self.model.unwrap().named_parameters()).get(name)

    def backward(self, step: int) -> Tensor:
        """Gradients of a batch of four rows a replica."""
        generator = torch.Generator().manual_seed(10 * step + self.plugin.dp_rank)
        tokens = torch.randint(1, 60, (4, 7), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        return self.booster.execute_pipeline(iter([batch]), self.model, optimizer=self.optimizer).loss

    def finish(self) -> None:
        self.optimizer.step()
        if not self.optimizer.step_was_skipped:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def train(self, steps: range) -> None:
        for step in steps:
            self.backward(step)
            self.finish()

    def message(self, step: int) -> str:
        """Of the error that a step raises on every rank; nothing may have changed."""
        before = self.state()
        self.backward(step)
        text = told(NonFiniteError, self.optimizer.step)
        assert text == NOTHING or same(before, self.state())
        self.optimizer.zero_grad()
        return text

    def state(self) -> list[Any]:
        """Everything that a skipped step must leave alone, down to the bit."""
        pieces = [piece.parameter for bucket in self.optimizer.buckets for piece in bucket.pieces]
        moments = [value for piece in pieces for _, value in sorted(self.optimizer.state[piece].items())]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        tensors = [*self.model.unwrap().state_dict().values(), *pieces, *moments]
        return [*(tensor.detach().clone() for tensor in tensors), rates, self.scheduler.last_epoch]

    def poison_gradient(self, name: str, value: float) -> None:
        """One value of a parameter's gradient, as the backward pass computes it."""
        param = self.parameter(name)
        if param is not None:
            self.handles.append(Tensor.register_hook(param, lambda gradient: poisoned(gradient, value)))

    def poison_output(self, name: str, value: float, microbatch: int = 0) -> None:
        """One value of what a module returns in the forward pass of one micro-batch."""
        module, calls = self.module(name), iter(range(100))
        if module is None:
            return
        native = module.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            output = native(*args, **kwargs)
            is_recomputed = in_backward()
            return poisoned(output, value) if not is_recomputed and next(calls) == microbatch else output

        module.forward = forward

    def heal(self) -> None:
        while self.handles:
            self.handles.pop().remove()


def told(kind: type[Exception], call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message of the error of that kind that a call raises."""
    try:
        call(*args, **kwargs)
    except kind as error:
        return str(error)
    return NOTHING


def poisoned(tensor: Tensor, value: float) -> Tensor:
    flat = tensor.clone()
    flat.view(-1)[1] = value
    return flat


def same(one: list[Any], other: list[Any]) -> bool:
    """Down to the bit: nan equals nan, and 0 is not -0."""
    return all(
        torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)
        if isinstance(a, Tensor)
        else a == b
        for a, b in zip(one, other, strict=True)
    )


def on(layout: str, function: Callable, *args: Any) -> list[Any]:
    return run_on_ranks(SIZES[layout], function, layout, *args)
