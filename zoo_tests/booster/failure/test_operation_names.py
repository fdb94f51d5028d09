"""A rank that calls a collective operation alone waits in it: messages name the operation, not the one before.

Where ranks of a replica give one operation batches of other shapes, they name the shapes.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from booster import Booster, failure, launch_from_torch
from booster.failure import hooks
from booster.failure.operation_log import Operations
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Recipe
from zoo_tests.harness.ended_ranks import run_to_the_end
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
    with mock.patch.object(hooks, "publish", return_value=None) as published:
        for publishes in (False, True):
            with pytest.raises(ValueError), failure.guard("model(**batch)", publishes=publishes):
                raise ValueError
        published.assert_called_once()


def _train_on_other_shapes(layout: dict[str, int], later: bool) -> None:
    """The first steps compare batches over ranks; those after them do not, and gloo ends a process."""
    launch_from_torch()
    recipe = Recipe(family="llama", head="causal_lm", precision="fp32")
    plain = recipe.model()
    booster = Booster(plugin=HybridParallelPlugin(**layout))
    model, optimizer = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for step in range(5):
        ids = torch.ones(4, 12 + (dist.get_rank() if step >= 3 * later else 0), dtype=torch.int64)
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "later"),
    [
        ({"tp_size": 2}, True),
        ({"cp_size": 2}, True),
        ({"pp_size": 2, "num_microbatches": 2}, True),
        ({"tp_size": 2}, False),
    ],
    ids=["tp2", "cp2", "pp2", "first"],
)
def test_batches_of_other_shapes_on_the_ranks_of_a_replica_are_named(
    layout: dict[str, int], later: bool, tmp_path: Path
) -> None:
    """In one line of one rank, besides the one of gloo's."""
    ranks = run_to_the_end(2, _train_on_other_shapes, layout, later, folder=tmp_path)
    lines = [line for rank in ranks for line in rank.err.splitlines() if line.startswith("error")]
    assert len(lines) == 1, lines
    assert "'input_ids' of the batch " in lines[0]
    assert "[4, 12]" in lines[0] and "[4, 13]" in lines[0] and "all ranks of a replica need the same batch" in lines[0]
    assert all(rank.code for rank in ranks)
