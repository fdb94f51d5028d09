"""Faults that tests of `booster verify` put into the library, in the ranks that it starts."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.verify.train import Trace, VerifyCase, train_on_rank
from zoo_tests.campaigns.mutations import mutants


def train_with(fault: Callable[[], None], trial: VerifyCase) -> Trace:
    """Train on a rank whose library has a fault."""
    fault()
    return train_on_rank(trial)


def rows_are_not_summed() -> None:
    """Row-parallel layers keep their parts of the sum."""
    from shardformer.layers import linear

    linear.reduce_from_region = lambda x, group: x


def gradients_of_inputs_are_not_summed() -> None:
    """The backward pass of column-parallel layers leaves their all-reduce out; the forward pass is right."""
    from shardformer.matmul import native as linear_functions

    done = SimpleNamespace(wait=lambda: None)
    linear_functions.dist = SimpleNamespace(all_reduce=lambda *args, **options: done)


def one_module_is_off() -> None:
    """A column-parallel layer in the middle returns a little more than it should."""

    def spoil(name: str, module: nn.Module) -> None:
        if name.endswith(("layers.2.mlp.up_proj", "block.2.layer.1.DenseReluDense.wi")):
            module.register_forward_hook(lambda _, args, output: output * 1.001)

    _for_every_sharded_module(spoil)


def one_head_is_off() -> None:
    """A part of a rank's piece of a fused query-key-value projection."""

    def spoil(name: str, module: nn.Module) -> None:
        if name.endswith("h.1.attn.c_attn"):
            module.register_forward_hook(lambda _, args, output: output + 0.001)

    _for_every_sharded_module(spoil)


def queries_are_off() -> None:
    """Of the third layer."""

    def spoil(name: str, module: nn.Module) -> None:
        if name.endswith("layers.2.self_attn.q_proj"):
            module.register_forward_hook(lambda _, args, output: output * 1.1)

    _for_every_sharded_module(spoil)


def later_calls_are_off() -> None:
    """A layer that runs several times is right the first time alone."""
    calls = itertools.count()

    def spoil(name: str, module: nn.Module) -> None:
        if name.endswith("albert_layers.0.ffn"):
            module.register_forward_hook(lambda _, args, output: output * 1.1 if next(calls) else output)

    _for_every_sharded_module(spoil)


def replicas_do_not_meet() -> None:
    mutants.apply("no data-parallel reduction")


def weights_stay() -> None:
    mutants.apply("no optimizer step")


def labels_are_not_shifted() -> None:
    mutants.apply("labels not shifted")


def a_rank_raises() -> None:
    raise ValueError("planted")


def a_rank_sleeps() -> None:
    time.sleep(600)


def a_rank_is_mistaken() -> None:
    raise ConfigurationError("planted mistake")


def leave_pid_and_sleep(directory: str) -> None:
    """For tests that look whether ranks end."""
    (Path(directory) / str(os.getpid())).touch()
    time.sleep(600)


def _for_every_sharded_module(change: Callable[[str, nn.Module], None]) -> None:
    from shardformer import ShardFormer

    optimize = ShardFormer.optimize

    def changed(self: Any, model: nn.Module, policy: Any = None) -> Any:
        result = optimize(self, model, policy)
        for name, module in model.named_modules():
            change(name, module)
        return result

    ShardFormer.optimize = changed
