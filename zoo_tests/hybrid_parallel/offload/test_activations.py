"""Saved tensors that leave memory: what stays, what is read when, and what becomes of the space.

What breaks here first: a copy that outlives its graph, and a change in place that nobody notices. Look in
`plugins/hybrid_parallel/offload/activations.py`.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.live_bytes import LiveBytes
from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.offload.activations import OPTION, OffloadedActivations, layers_of
from plugins.hybrid_parallel.offload.places import check_layers
from plugins.hybrid_parallel.offload.stores import FileSpace, FileStore
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import boost

ROWS, HIDDEN = 32, 64
UNIT = ROWS * HIDDEN * 8  # bytes of one activation


class Layer(nn.Module):
    """Saves three activations of UNIT bytes: its input, the input of the nonlinearity, and that of the product."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.nn.functional.gelu(self.inner(x)))


class Layers(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def offloaded(depth: int, directory: Path) -> tuple[Layers, OffloadedActivations]:
    model, moved = Layers(depth), OffloadedActivations(FileStore(directory, OPTION), torch.device("cpu"))
    moved.add(model)
    return model, moved


def inputs(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], each) for name, each in expected.items())


def is_all_free(space: FileSpace) -> bool:
    """Whether the file is one free range."""
    size = space.size
    place = space.take(size)
    space.give_back(place, size)
    return place == 0 and space.size == size > 0


def test_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    """Two layers of saved tensors are in memory at once, however many the model has."""

    def alive(depth: int, moves: bool) -> tuple[int, int]:
        model, moved = offloaded(depth, tmp_path)
        x = inputs()
        with LiveBytes() as counted:
            if moves:
                with moved.running():
                    loss = model(x)
                # The thread that writes holds what it has written until it takes the next piece.
                moved.store.writer.submit(int).result()
            else:
                loss = model(x)
            after_forward, counted.peak = counted.bytes, counted.bytes
            grads = torch.autograd.grad(loss, list(model.parameters()))
        return after_forward, counted.peak - sum(each.nbytes for each in grads)

    plain, moved = ([alive(depth, moves) for depth in (3, 7)] for moves in (False, True))
    assert plain[1][0] - plain[0][0] == 4 * 3 * UNIT, "each layer saves three activations"
    assert moved[1][0] == moved[0][0] < 7 * UNIT + 1024, "six of two layers, and one of the loss"
    assert moved[1][1] <= moved[0][1] + UNIT, "nor in the backward pass, in which gradients of weights are added"


def test_file_does_not_grow(tmp_path: Path) -> None:
    model, moved = offloaded(4, tmp_path)

    def step(rows: int, goes_back: bool = True) -> None:
        with moved.running():
            loss = model(inputs(rows))
        if goes_back:
            loss.backward()

    step(ROWS)
    first = moved.store.space.size
    assert first >= 2 * 3 * UNIT
    for rows, goes_back in ((ROWS, True), (ROWS // 2, True), (ROWS, False), (ROWS - 7, False), (ROWS, True)):
        step(rows, goes_back)  # a graph that is dropped gives its space back too
        assert moved.store.space.size == first and is_all_free(moved.store.space)
    with torch.no_grad(), mock.patch.object(os, "pwrite", side_effect=AssertionError):
        step(ROWS, goes_back=False)


def test_graphs_that_are_used_again(tmp_path: Path) -> None:
    """A retained graph is read twice; a gradient of gradients goes through tensors that were read."""
    model, moved = offloaded(4, tmp_path)
    x = inputs().requires_grad_()

    def results(run: Callable[[], Tensor]) -> tuple[dict[str, Tensor], ...]:
        loss = run()
        loss.backward(retain_graph=True)
        once = gradients(model)
        loss.backward()
        twice = gradients(model)
        (slope,) = torch.autograd.grad(run(), x, create_graph=True)
        slope.square().sum().backward()
        return once, twice, gradients(model)

    def run() -> Tensor:
        with moved.running():
            return model(x)

    expected = results(lambda: model(x))
    assert all(map(same, results(run), expected))
    assert is_all_free(moved.store.space)


def test_two_graphs_at_once(tmp_path: Path) -> None:
    """As in a pipeline; the second time their layers are read ahead in the order of the first."""
    model, moved = offloaded(4, tmp_path)

    def run(rows: int) -> Tensor:
        with moved.running():
            return model(inputs(rows))

    (model(inputs(8)) + model(inputs(24))).backward()
    expected = gradients(model)
    for _ in range(2):
        first, second = run(8), run(24)
        first.backward()
        with mock.patch.object(FileStore, "read", autospec=True, side_effect=FileStore.read) as reads:
            second.backward()
        found = gradients(model)
        assert all(torch.allclose(found[name], each, rtol=1e-12) for name, each in expected.items())
    assert reads.call_count == 2 * 3, "two of four layers have left, and none is read twice"


@pytest.mark.parametrize("what", ["moved", "kept", "parameter", "read"])
def test_a_change_in_place_is_refused_as_in_plain_torch(what: str, tmp_path: Path) -> None:
    model, moved = offloaded(4, tmp_path)
    seen: list[Tensor] = []
    changed = {"moved": 1, "kept": 3}.get(what)
    for index, layer in enumerate(model.layers):
        if index == changed:
            layer.inner.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    with moved.running():
        x = inputs().requires_grad_()
        if what == "read":  # one node changes memory that another has saved, which has left since
            for half in (inputs() * 2).chunk(2):
                x = _Spoils.apply(x, half)
        loss = model(x)
    with torch.no_grad():
        for each in seen:
            each.add_(1)
        if what == "parameter":
            model.layers[0].outer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class _Spoils(torch.autograd.Function):
    """Changes what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0].add_(1).sum(), None


def test_what_stays() -> None:
    """Parameters and their views, buffers, and what is not plain memory."""
    store = mock.Mock()
    model = Layers(1)
    model.register_buffer("table", torch.zeros(4096))
    moved = OffloadedActivations(store, torch.device("cpu"))
    moved.add(model)
    moved._begin_layer()
    weight = model.layers[0].inner.weight
    large = torch.zeros(2048, dtype=torch.complex64)
    for tensor in (weight.detach(), weight.t(), weight[:1], model.table[1:], large.conj(), large.conj().imag):
        assert not moved._is_moved(tensor.detach())
    for tensor in (torch.zeros(8), large.to_sparse(), torch.zeros(4096, device="meta"), nn.Parameter(large)):
        assert not moved._is_moved(tensor)
    assert moved._is_moved(large) and moved._is_moved(large[:1]), "a view keeps all of its memory"


def test_space_is_used_again() -> None:
    source, space = random.Random(0), FileSpace()
    held: list[tuple[int, int]] = []
    for _ in range(2000):
        if held and source.random() < 0.5:
            space.give_back(*held.pop(source.randrange(len(held))))
            continue
        length = source.randint(1, 9)
        place = space.take(length)
        assert all(place + length <= start or start + size <= place for start, size in held), "ranges overlap"
        held.append((place, length))
    most = space.size
    for each in held:
        space.give_back(*each)
    assert is_all_free(space) and most < 2000


# ----- mistakes -----


def refusals(directory: str) -> str:
    """What `boost` says where rank 1 cannot write to the directory."""
    model = Layers(2)
    full = OSError(errno.ENOSPC, "No space left on device") if dist.get_rank() == 1 else None
    booster = Booster(plugin=HybridParallelPlugin(offload_activations=directory))
    with mock.patch.object(os, "pwrite", side_effect=full, wraps=os.pwrite), pytest.raises(ConfigurationError) as said:
        booster.boost(model, torch.optim.SGD(model.parameters()))
    return str(said.value)


def test_a_directory_that_one_rank_cannot_use(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, refusals, str(tmp_path))
    assert first == second and f"{OPTION}='{tmp_path}' has no space for 0.0 MiB more" in first
    with pytest.raises(ConfigurationError, match="cannot hold the file of a rank .No such file or directory."):
        FileStore(tmp_path / "not" / "there", OPTION)


def fill_the_disk(directory: str) -> str:
    """What a step says when the disk is full."""
    recipe = Recipe(family="bert", head="masked_lm", config=(("num_hidden_layers", 6),))
    boosted = boost(Case(recipe=recipe, layout="single", options=((OPTION, directory),)))
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "pwrite", side_effect=full), pytest.raises(ConfigurationError) as said:
        boosted.pipeline_backward(recipe.batch(0))
    boosted.pipeline_backward(recipe.batch(0))  # once there is space again
    return str(said.value)


def test_a_full_disk_stops_the_step(tmp_path: Path) -> None:
    (said,) = run_on_ranks(1, fill_the_disk, str(tmp_path))
    assert f"{OPTION}='{tmp_path}' has no space for" in said


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="moves what layers save, and Linear has none"):
        check_layers(tmp_path, nn.Linear(2, 2))
    check_layers(None, nn.Linear(2, 2))
    assert len(layers_of(Layers(3))) == 3
