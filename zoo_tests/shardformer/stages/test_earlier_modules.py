"""What later stages need of earlier ones besides the hidden state, on two stages in one process.

What breaks here first: an output that does not travel, a shape that later code sees, a list that is cut elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.pipeline.p2p import to_header
from shardformer.policies.plans.plan import Plan
from shardformer.stages.earlier_modules import KeptOutput, MetaModule
from shardformer.stages.placeholders import Skipped, with_attributes
from shardformer.stages.stage import PipelineStageManager, Received, StageLayout, StagePartitioner, run_stage

_STATES = ("a", "b")


class Pooled(nn.Module):
    """Two lists of layers with a pooling between them; the head reads the end of the first list again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(count)) for count in (2, 1))
        self.pools = nn.ModuleList(nn.AvgPool1d(2) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden, kept = self.embed(x), None
        for block, pool in zip(self.blocks, self.pools, strict=True):
            for layer in block:
                hidden = layer(hidden)
            kept = hidden if kept is None else kept
            hidden = pool(hidden.tanh().mT).mT
            hidden = hidden + kept.view(len(x), hidden.shape[1], -1, 4).mean(2)
        return self.head(hidden)


class Block(nn.Module):
    """A layer with its residual, which writes or reads a dictionary for all layers."""

    def __init__(self, writes: str | None = None, reads: str | None = None) -> None:
        super().__init__()
        self.linear, self.writes, self.reads = nn.Linear(4, 4), writes, reads

    def forward(self, hidden: Tensor, states: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        new = self.linear(hidden)
        if self.writes is not None:
            states[self.writes] = (new, new.sin())
        if self.reads is not None:
            new = new * states[self.reads][0] + states[self.reads][1]
        return hidden + new


class Sharing(nn.Module):
    """Layers that share states; the third reads those of the first, the fourth those of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        kinds = [{"writes": "a"}, {"writes": "b"}, {"reads": "a"}, {"reads": "b"}]
        self.layers = nn.ModuleList(Block(**kind) for kind in kinds)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden, states = self.embed(x), {}
        for layer in self.layers:
            hidden = layer(hidden, states)
        return self.head(hidden)


def _pooled(model: nn.Module) -> StageLayout | None:
    return Plan({}, layers="blocks.*", kept_outputs={"blocks.0.1": 0}, changes_shapes=True).stages_of(model)


def _sharing(model: nn.Module) -> StageLayout | None:
    return Plan({}, layers="layers", first={"embed": Received}, shared_states={"states": _STATES}).stages_of(model)


def two_stages(make: Callable[[], nn.Module], layout_of: Callable, split: tuple[int, int], x: Tensor) -> dict:
    """Return the gradients of both stages, by name; those of parameters on both are summed."""
    stages, messages = [], [None]
    for stage in range(2):
        torch.manual_seed(0)
        model = make().double()
        manager = PipelineStageManager(stage, 2, split)
        StagePartitioner(model, "", layout_of(model), manager).apply()
        stages.append(model)
    sent = run_stage(stages[0], None, {"x": x})
    messages = [None if each is None else each.detach().requires_grad_(each.is_floating_point()) for each in sent]
    run_stage(stages[1], tuple(messages), {"x": x}).square().sum().backward()
    pairs = [(out, each.grad) for out, each in zip(sent, messages, strict=True) if each is not None]
    torch.autograd.backward(*zip(*[(out, grad) for out, grad in pairs if grad is not None], strict=True))
    found: dict[str, Tensor] = {}
    for name, each in (pair for model in stages for pair in model.named_parameters()):
        if each.grad is not None:
            found[name] = found[name] + each.grad if name in found else each.grad
    return found


@pytest.mark.parametrize(
    ("make", "layout_of", "split"),
    [
        (Sharing, _sharing, (1, 3)),
        (Sharing, _sharing, (2, 2)),
        (Sharing, _sharing, (3, 1)),
        (Pooled, _pooled, (1, 2)),
        (Pooled, _pooled, (2, 1)),
    ],
)
def test_what_later_layers_read_arrives(make: Callable, layout_of: Callable, split: tuple[int, int]) -> None:
    x = torch.randn(2, 8, 3, dtype=torch.float64)
    torch.manual_seed(0)
    whole = make().double()
    whole(x).square().sum().backward()
    found = two_stages(make, layout_of, split, x)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)


def test_nested_lists_are_a_chain() -> None:
    layout = _pooled(Pooled())
    assert [each.layers for each in layout.chain] == ["blocks.0", "blocks.1"]
    assert list(layout.first) == ["embed"]
    assert layout.chain[1].last == ("head",)
    assert layout.kept_outputs == {"blocks.0.1": 0}


def test_dummies_have_the_shapes_of_the_module_and_are_not_numbers() -> None:
    placeholder = MetaModule(nn.Sequential(OrderedDict(conv=nn.Conv1d(3, 5, 2, stride=2), gelu=nn.GELU())))
    output = placeholder(torch.zeros(2, 3, 8))
    assert output.shape == (2, 5, 4)
    assert output.isnan().all()
    assert not list(placeholder.parameters())  # they would belong to the model
    assert placeholder.conv.weight.dtype == torch.float32  # models read it to cast images


class Checked(nn.Linear):
    """Checks its input, as some attention checks the sizes of images."""

    def forward(self, x: Tensor) -> Tensor:
        torch._check_tensor_all(x == x)
        return super().forward(x) if (x > -1).all() else x


def test_checks_of_values_pass_where_there_are_only_shapes() -> None:
    assert MetaModule(Checked(3, 5))(torch.zeros(2, 3)).shape == (2, 5)


def test_models_look_up_the_parts_of_a_layer_that_is_elsewhere() -> None:
    """X-MOD finds the number of its default language among the adapters of its first layer."""
    layer = nn.Module()
    layer.output = nn.Module()
    layer.output.adapters = nn.ModuleDict({"en_XX": nn.Linear(2, 2), "de_DE": nn.Linear(2, 2)})
    placeholder = with_attributes(Skipped(1), layer)
    assert list(placeholder.output.adapters.keys()) == ["en_XX", "de_DE"]
    assert not list(placeholder.parameters())


def test_a_message_of_too_many_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="has 257 tensors, more than 256"):
        to_header((None,) * 257)


def test_attributes_of_a_kept_module_are_read_as_of_the_module() -> None:
    """DINOv3 casts its pixels to the dtype of the patch embedding, on every stage: that of the hidden state there."""
    native = nn.Sequential(OrderedDict(patches=nn.Linear(3, 5)))
    kept = KeptOutput("embeddings", 0, native)
    assert kept.patches.in_features == 3 and kept.patches.weight.dtype == kept.dtype
    assert not list(kept.parameters())
    with pytest.raises(AttributeError):
        _ = KeptOutput("embeddings", 0).patches


def test_an_embedding_that_a_later_stage_reads_is_not_a_number() -> None:
    """A value that layers use although it does not travel makes the loss NaN, not wrong."""
    received = Received()
    received.stage_input.begin((torch.ones(2, 3, 4),))
    assert received().shape == (2, 3, 4) and received().isnan().all()
