"""When a backward pass begins and ends to use a module, and that a graph takes its hooks along when it is freed.

What breaks here first: a hook refers to a node that refers to it, and every step leaves its graph behind. Look in
`plugins/hybrid_parallel/zero/stage3.py`.
"""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.zero.stage3 import UseInBackward
from zoo_tests.harness.ranks import distributed


class _Events(list):
    """What happened; unlike a list, weak references may refer to it."""


def _four_modules(events: _Events, prompt: nn.Parameter) -> Tensor:
    """The sum of four modules in a row that share an input; one ignores it, and one returns it."""
    hidden = torch.ones(3, requires_grad=True) * 1.0
    shared = hidden * 2.0
    for number in range(4):
        given, before = [hidden, shared, prompt], hidden
        hidden = hidden * prompt + (0.0 if number == 2 else shared)
        results = [hidden, shared] if number == 1 else [hidden]
        use = UseInBackward(
            lambda number=number: events.append(("begin", number)), lambda number=number: events.append(("end", number))
        )
        use.watch(results, given)
        assert before is not hidden
    return hidden.sum()


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_a_graph_takes_its_hooks_along(passes: int) -> None:
    """Without the garbage collector, which does not see how nodes refer to each other."""
    events, prompt = _Events(), nn.Parameter(torch.ones(3))
    total = _four_modules(events, prompt)
    for _ in range(passes):
        total.backward(retain_graph=True)
    begins = [("begin", number) for number in (3, 2, 1, 0)]
    assert events[:4] == begins[: 4 * min(passes, 1)]
    assert sorted(events) == sorted([*begins, *(("end", number) for number in range(4))] * passes)
    assert not prompt._backward_hooks, "a parameter outlives the graph"
    alive = weakref.ref(events)
    del events, total
    assert alive() is None


def test_a_pass_that_leaves_an_input_out() -> None:
    events, prompt = _Events(), nn.Parameter(torch.ones(3))
    used, unused = (torch.ones(3, requires_grad=True) * 1.0 for _ in range(2))
    result = used * prompt
    UseInBackward(lambda: events.append("begin"), lambda: events.append("end")).watch([result], [used, unused])
    (result.sum() + 0.0 * used.sum()).backward(retain_graph=True)
    unused.sum().backward()
    assert events == ["begin", "end"]


class _Positions(nn.Module):
    """Returns a view of its own parameter, [rows, 16, 64], as Perceiver's positions and latents do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 1024).view(16, 64))

    def forward(self, rows: int) -> Tensor:
        return self.table.expand(rows, -1, -1)


class _Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = _Positions()

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(self.positions(len(x)), (64,)).cos() * x[:, None, None]


@distributed(2)
def test_a_module_may_return_a_view_of_its_parameter() -> None:
    x, plain = torch.arange(4.0), _Positioned()
    expected = plain(x).mean()
    expected.backward()
    model = _Positioned()
    booster = Booster(plugin=HybridParallelPlugin(zero_stage=3))
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(x=x).mean(), expected)
        share = {"x": x[2 * dist.get_rank() :][:2]}
        booster.execute_pipeline(iter([share]), model, criterion=lambda out, _: out.mean(), optimizer=optimizer)
        gradients = optimizer.full_gradients()
        torch.testing.assert_close(gradients["positions.table"], plain.positions.table.grad)
        optimizer.zero_grad()
