"""Recomputation by operators: what is saved is computed once, and all gradients are those of plain autograd.

What breaks here first: a collective that runs again on a sum, a saved result that the layer writes to afterwards.
Look in `shardformer/utils/untraced.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardformer.utils.untraced import contexts_by_operators, is_saved
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import boost


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.runs[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def _runs(case: Case) -> Counter[str]:
    boosted = boost(case)
    with _Counter() as counter:
        boosted.pipeline_backward(case.recipe.batch(0))
    return counter.runs


@pytest.mark.parametrize(
    ("layout", "sp", "repeated"),
    [
        ("single", False, ()),
        ("tp2", False, ()),
        ("tp2", True, ("_allgather_base_",)),  # of what norms return, which is not saved
        ("cp2", False, ()),
    ],
)
def test_products_attention_and_their_communication_run_once(layout: str, sp: bool, repeated: tuple[str, ...]) -> None:
    def runs(choice: str | None) -> Counter[str]:
        options = (("num_microbatches", 1), ("gradient_checkpointing", choice))
        recipe = Recipe(family="llama", head="causal_lm", precision="fp32")
        case = Case(recipe=recipe, layout=layout, sequence_parallel=sp, options=options)
        return run_on_ranks(case.sizes.world_size, _runs, case)[0]

    plain, full, found = runs(None), runs("full"), runs("operators")
    ways = ("mm", "addmm", "attention", "all", "reduce", "send", "recv")
    counted = {name for name in full if any(way in name for way in ways)} - set(repeated)
    assert {name: found[name] for name in counted} == {name: plain[name] for name in counted}
    assert sum(full[name] for name in counted) > sum(plain[name] for name in counted)
    assert sum(found.values()) > sum(plain.values()), "nothing is recomputed"


def _written_after_the_product(x: Tensor, linear: nn.Linear) -> Tensor:
    y = linear(x)  # a view of the product, with a version of its own
    y /= 3
    return (y.sigmoid() @ linear.weight).tanh()


def _written_in_parts(x: Tensor, linear: nn.Linear) -> Tensor:
    y = linear(x)
    z = y + 1  # reads what is overwritten next
    y[..., 0] = 2.0
    return (y.sin() * z.sin()).tanh()


@pytest.mark.parametrize("layer", [_written_after_the_product, _written_in_parts])
def test_a_saved_result_may_be_written_to(layer: Callable[..., Tensor]) -> None:
    """As in DeBERTa and ConvBERT; also where the graph is retained and recomputed twice."""
    linear = nn.Linear(4, 4, dtype=torch.float64)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    given = x, *linear.parameters()
    expected = torch.autograd.grad(layer(x, linear).sum(), given)
    out = checkpoint(layer, x, linear, use_reentrant=False, context_fn=contexts_by_operators).sum()
    for retains in (True, False):
        for found, each in zip(torch.autograd.grad(out, given, retain_graph=retains), expected, strict=True):
            torch.testing.assert_close(found, each, rtol=1e-12, atol=1e-12)


def test_a_kernel_that_draws_numbers_runs_again() -> None:
    """Skipped, it would leave its numbers to the dropout behind it."""
    flash, q = torch.ops.aten._scaled_dot_product_flash_attention.default, torch.empty(1, 1, 1, 8)
    assert is_saved(flash, q, q, q) and is_saved(flash, q, q, q, 0.0) and is_saved(flash, q, q, q, dropout_p=0.0)
    assert not is_saved(flash, q, q, q, 0.1) and not is_saved(flash, q, q, q, dropout_p=0.1)


def test_a_layer_without_products_is_recomputed() -> None:
    x = torch.randn(3, requires_grad=True)
    out = checkpoint(F.gelu, x, use_reentrant=False, context_fn=contexts_by_operators)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(F.gelu(x).sum(), x)[0])
