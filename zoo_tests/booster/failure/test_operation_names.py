"""A rank that calls a collective operation alone waits in it: messages name the operation, not the one before."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from booster import Booster, failure
from booster.failure import hooks
from booster.failure.operation_log import Operations
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Recipe
from zoo_tests.harness.ranks import run_on_ranks


def _named_operations() -> set[str]:
    recipe = Recipe(family="llama", head="causal_lm", precision="fp32")
    plain = recipe.model()
    booster = Booster(plugin=HybridParallelPlugin())
    model, optimizer = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    operations, batch = Operations(), recipe.batch(0)
    with mock.patch.object(hooks._Process, "operations", operations):
        booster.backward(model(**batch).loss, optimizer)
        optimizer.full_gradients()
        model.clip_grad_norm_(1.0)
        booster.check_synchrony(model, optimizer)
        model.generate(input_ids=batch["input_ids"][:1], max_new_tokens=1)
        assert operations.calls == dict.fromkeys(operations.calls, 1), "each is named once"
    return set(operations.completed)


def test_operations_after_boost_are_named() -> None:
    (names,) = run_on_ranks(1, _named_operations)
    expected = {"model(**batch)", "booster.backward", "optimizer.full_gradients", "model.clip_grad_norm_"}
    assert names == expected | {"booster.check_synchrony", "model.generate"}


def test_only_what_the_other_ranks_cannot_survive_is_published() -> None:
    with mock.patch.object(hooks, "publish") as published:
        for publishes in (False, True):
            with pytest.raises(ValueError), failure.guard("model(**batch)", publishes=publishes):
                raise ValueError
        published.assert_called_once()
