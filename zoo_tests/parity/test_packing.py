"""Documents packed into rows train as the documents one by one through the plain model, in any packing and layout.

What breaks here first: a cache or a mask that lets documents of a row see each other, a label that crosses a border,
and a mean over micro-batches or replicas with other numbers of tokens. Look in
`shardformer/attention/packed_documents.py` and `plugins/hybrid_parallel/data/packed_rows.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.documents import (
    TOLERANCE,
    difference,
    language_model,
    one_by_one,
    one_row,
    random_documents,
    several_rows,
)
from zoo_tests.harness.ranks import run_on_ranks

_ULYSSES = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp1": {"num_microbatches": 2},
    "dp2": {},
    "tp2": {"tp_size": 2},
    "tp2 split_gather": {"tp_size": 2, "enable_sequence_parallelism": True},
    "tp2 all_to_all": {"tp_size": 2, **_ULYSSES},
    "cp2 ring_attn": {"cp_size": 2},
    "cp2 all_to_all": {"cp_size": 2, **_ULYSSES},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
}


def _batches(documents: list[list[int]], packing: str, replicas: int) -> list[dict[str, Any]]:
    """The batch of each replica: documents in one row or several, in shares of other sizes."""
    border = max(len(documents) // 3, 1)
    shares = [documents] if replicas == 1 else [documents[:border], documents[border:]]
    if packing == "rows":
        return [several_rows(share, 11) if share else _empty(documents) for share in shares]
    return [one_row(share, packing) if share else _empty(documents, packing) for share in shares]


def _empty(documents: list[list[int]], packing: str = "positions") -> dict[str, Any]:
    row = one_row(documents, packing)
    return {name: value[:0] if isinstance(value, torch.Tensor) else value for name, value in row.items()}


def _train(family: str, options: dict[str, Any], seed: int, packing: str, loop: str) -> dict[str, float]:
    documents = random_documents(seed, least=3)
    plugin = HybridParallelPlugin(**options)
    booster, model = Booster(plugin=plugin), language_model(family)
    expected_loss, expected = one_by_one(language_model(family), documents)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = _batches(documents, packing, plugin.dp_size)[plugin.dp_rank]
    model.eval()
    with torch.no_grad():
        evaluated = booster.execute_pipeline(iter([batch]), model).loss if loop == "step" else model(**batch).loss
    model.train()
    if loop == "step":
        loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss
    else:
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
    return {
        "evaluated": abs(evaluated.item() - expected_loss) / expected_loss,
        "loss": abs(loss.item() - expected_loss) / expected_loss,
        "gradients": difference(optimizer.full_gradients(), expected),
    }


def _check(family: str, layout: str, seed: int, packing: str, loop: str, ranks: int | None = None) -> None:
    options = LAYOUTS[layout]
    for found in run_on_ranks(ranks or (1 if layout == "dp1" else 2), _train, family, options, seed, packing, loop):
        wrong = {name: value for name, value in found.items() if not value < TOLERANCE[family]}
        assert not wrong, f"{family}, {layout}, seed {seed}, {packing}, {loop}: {wrong}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_train_as_they_do_one_by_one(layout: str) -> None:
    for seed, (packing, loop) in enumerate((("positions", "step"), ("borders", "loop"), ("rows", "loop"))):
        _check("GPT2", layout, seed, packing, loop)
