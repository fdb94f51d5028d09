"""The order in which parts of a model run, recorded from a small model, and the stages that follow from it.

What breaks here first: what a later stage reads of an earlier one in a way that no module tree shows.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardformer.policies.plans.execution import execution_order
from shardformer.policies.plans.propose import ProposedPlan
from shardformer.policies.plans.stages import ExecutionOrder
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.shardformer.stages.test_earlier_modules import two_stages

_WIDTH = 4


class Mixer(nn.Module):
    """A layer with a residual, which may read a memory, a mask and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, hidden: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        read = hidden if memory is None else hidden + memory.mean(1, keepdim=True)
        new = self.body(read).tanh()
        return hidden + (new if mask is None else new * mask)


class Pool(nn.Module):
    """A layer that halves the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.body(hidden.reshape(len(hidden), -1, 2 * _WIDTH))


class Embedding(nn.Module):
    """Returns the hidden state and a mask of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, _WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), x[..., :1] > 0


class Tower(nn.Module):
    """Never called: the model runs its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.layers = nn.ModuleList(Mixer() for _ in range(2))


class Detector(nn.Module):
    """Registered against the order in which it runs: a backbone, an encoder, a decoder that refines boxes."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(_WIDTH, 2)
        self.boxes = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(depth))
        self.narrow = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(depth))  # each ahead of a decoder layer
        self.decoder = nn.ModuleList(Mixer() for _ in range(depth))
        self.twice = nn.LayerNorm(_WIDTH)  # called for the memory and for its mean
        self.queries = nn.Embedding(2, _WIDTH)  # never called
        self.scale = nn.Linear(_WIDTH, _WIDTH)  # called before each decoder layer
        self.encoder = Tower()
        self.backbone = nn.Sequential(Pool(), Pool())
        self.embed = Embedding()

    def forward(self, x: Tensor) -> Tensor:
        hidden, mask = self.embed(x)
        hidden = self.encoder.norm(self.backbone(hidden))
        mask = mask.view(len(x), hidden.shape[1], -1)[..., :1]
        for layer in self.encoder.layers:
            hidden = layer(hidden, mask=mask)
        hidden += 0.5  # in place
        memory, found = self.twice(hidden), []
        hidden = self.queries.weight + self.twice(memory.mean(1, keepdim=True))
        box = memory[:, :2]
        for ahead, layer, refine in zip(self.narrow, self.decoder, self.boxes, strict=True):
            hidden = layer(ahead(hidden), memory * self.scale(hidden).mean(1, keepdim=True))
            box = box + refine(hidden)
            found.append(self.head(hidden + box))
        return torch.stack(found)


class Passing(nn.Module):
    """Layers that pass a second value on to the next one, as a position bias."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 1)

        def forward(self, hidden: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
            bias = self.second(hidden) if bias is None else bias * 2
            return self.body(hidden).tanh() + bias, bias

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden, bias = nn.functional.pad(x, (0, 1)), None
        for layer in self.layers:
            hidden, bias = layer(hidden, bias)
        return hidden


def _order() -> ExecutionOrder:
    torch.manual_seed(1)
    model = Detector().double()
    order = execution_order(model, {"x": torch.randn(2, 8, 3, dtype=torch.float64)})
    assert order is not None
    return order


def test_each_part_is_found() -> None:
    run_on_ranks(1, _find_parts)  # on a rank, where mutants act


def _find_parts() -> None:
    order = _order()
    assert order.order == [["embed"], ["backbone"], ["encoder.norm"], ["encoder.layers"], ["decoder"]]
    assert order.layers == {"backbone": -1, "encoder.layers": 0, "decoder": 0}
    assert order.parts == {"boxes.*": "decoder"} and order.ahead == {"narrow.*": "decoder"}
    assert order.every == ["head", "queries", "scale", "twice"]
    # The mask, the memory, and what the scale, the boxes and the head read.
    assert order.kept == {"boxes.*": 0, "decoder.*": 0, "embed": 2, "encoder.layers.-1": 0}
    assert order.opened == ["encoder"] and order.behind == []


@pytest.mark.parametrize("first", range(1, 7))
def test_two_stages_have_the_gradients_of_the_whole(first: int) -> None:
    x = torch.randn(2, 8, 3, dtype=torch.float64)
    torch.manual_seed(0)
    whole = Detector().double()
    whole(x).square().sum().backward()
    found = two_stages(Detector, _order().layout, (first, 7 - first), x)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)


def test_what_only_the_next_layer_reads_travels() -> None:
    run_on_ranks(1, _train_passing)  # on a rank, where mutants act


def _train_passing() -> None:
    torch.manual_seed(0)
    whole, x = Passing().double(), torch.randn(2, 5, 3, dtype=torch.float64)
    order = execution_order(whole, {"x": x})
    assert order is not None and order.kept == {"layers.*": 2}
    whole(x).square().sum().backward()
    found = two_stages(Passing, order.layout, (2, 1), x)
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, msg=name)


def test_an_order_holds_for_any_depth() -> None:
    layout = _order().layout(Detector(depth=5))
    decoder = layout.chain[-1]
    boxes = {f"boxes.{number}": number for number in range(5)}
    assert decoder.layer_parts == boxes | {f"narrow.{number + 1}": number for number in range(4)}
    assert decoder.first.keys() == {"narrow.0"}
    assert decoder.kept_outputs.keys() >= {"decoder.3", "boxes.4"}


def test_a_part_of_another_configuration_has_no_place() -> None:
    class Refined(Detector):
        def __init__(self) -> None:
            super().__init__()
            self.refine = nn.Linear(_WIDTH, _WIDTH)

    order = _order()
    assert order.layout(Refined()) is None
    known = replace(order, otherwise=replace(order, order=[*order.order, ["refine"]])).layout(Refined())
    assert known is not None and "refine" in known.chain[-1].last


def test_layers_that_run_twice_are_no_stages() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Mixer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.layers, *self.layers):
                x = layer(x)
            return x

    assert execution_order(Twice(), {"x": torch.randn(1, 2, _WIDTH)}) is None


def test_stages_are_part_of_the_file() -> None:
    plan = ProposedPlan(execution={"*": _order()})
    assert ProposedPlan.from_dict(json.loads(plan.to_json())).policy().declared.execution == {
        "*": ExecutionOrder.from_dict(json.loads(json.dumps(_order().to_dict())))
    }
    with pytest.raises(ValueError, match="no keys but order, layers"):
        ProposedPlan.from_dict({"styles": {}, "stages": {"*": {"order": [], "layers": {}, "twice": []}}})
