"""Offloaded optimizer states: where they are, and that a step in parts is one step.

What breaks here first: an option of a group that every part advances, and loaded states that stay in memory. Look in
`plugins/hybrid_parallel/zero/user_optimizer.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin, ShardedEMA
from plugins.hybrid_parallel.offload import stores
from plugins.hybrid_parallel.setup import optimizer as setup_optimizer
from plugins.hybrid_parallel.zero.user_optimizer import step_in_parts
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.optimizer_runs import start, train_some
from zoo_tests.harness.optimizers import ScheduleFreeSGD
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.toy import Pair, toy

# ----- a step in parts -----


def _with_gradients(make: Any) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), (2, 2), (7,))]
    return make([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]), params


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: ScheduleFreeSGD(groups, lr=0.3),
        lambda groups: torch.optim.NAdam(groups, lr=torch.tensor(0.3)),
        lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    ],
    ids=["schedule_free", "nadam", "adamw"],
)
def test_a_step_in_parts_is_one_step(make: Any) -> None:
    (whole, expected), (parted, found) = _with_gradients(make), _with_gradients(make)
    for optim in (whole, parted):
        getattr(optim, "train", list)()
    for step in range(3):
        for params in (expected, found):
            for index, param in enumerate(params):
                param.grad = torch.full_like(param, 1.0 + index + step)
        whole.step()
        step_in_parts(parted, [[found[3], found[0]], [found[1]], [found[2]]], parted.step)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    options = [[{**group, "params": None} for group in optim.param_groups] for optim in (whole, parted)]
    assert options[0] == options[1]
    assert [group["params"] for group in parted.param_groups] == [found[:2], found[2:]]


def test_hooks_run_once_a_step_and_see_all_groups() -> None:
    optim, params = _with_gradients(lambda groups: torch.optim.SGD(groups, lr=0.1))
    seen = []

    def hook(optim: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        seen.append([len(group["params"]) for group in optim.param_groups])

    optim.register_step_pre_hook(hook)
    optim.register_step_post_hook(hook)
    shared = register_optimizer_step_pre_hook(hook)
    try:
        for _ in range(2):
            step_in_parts(optim, [[param] for param in params], optim.step)
    finally:
        shared.remove()
    assert seen == [[2, 2]] * 6


def test_a_failed_step_leaves_the_groups_whole() -> None:
    optim, params = _with_gradients(lambda groups: torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(ZeroDivisionError):
        step_in_parts(optim, [[param] for param in params], lambda: 1 / 0)
    assert [group["params"] for group in optim.param_groups] == [params[:2], params[2:]]


# ----- where states are -----

_RECIPE = Recipe(
    family="llama", head="causal_lm", optimizer="adamw", precision="bf16", config=(("num_hidden_layers", 3),)
)
_LARGE = 64  # elements


def _in_file(optimizer: Any, tensor: Tensor) -> bool:
    memory = optimizer.buckets[0].options.states
    starts = [(address, extent) for address, (extent, _, _) in memory.file._places.items()]
    return any(address <= tensor.data_ptr() < address + len(extent) for address, extent in starts)


def _states(optimizer: Any) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [value for value in values if value.numel() >= _LARGE]


def _look(case: Case, maker: str) -> tuple[list[int], bool]:
    """Elements of states outside of the file whenever a part of the first step ends, and whether all are in it then."""
    training = start(case, maker)
    (optimizer, *_), outside = training.optimizers, []
    own = optimizer.optim.step

    def step() -> None:
        own()
        outside.append(sum(each.numel() for each in _states(optimizer) if not _in_file(optimizer, each)))

    optimizer.optim.step = step
    training.step(case.recipe, 0)
    held = [*_states(optimizer), *(bucket.shard.values for bucket in optimizer.buckets if bucket.has_masters)]
    return outside, len(held) > 4 and all(_in_file(optimizer, each) for each in held)


@pytest.mark.slow
def test_states_of_one_bucket_are_in_memory_at_a_time(tmp_path: Path) -> None:
    case = Case(recipe=_RECIPE, layout="dp2", options=(("offload_optimizer", str(tmp_path)),))
    for outside, are_in_file in run_on_ranks(2, _look, case, "lamb"):
        assert are_in_file
        assert len(outside) >= 3
        assert max(outside) < 0.5 * sum(outside)


@pytest.mark.parametrize(
    ("maker", "layout", "stage"),
    [
        ("muon", "tp2", 1),
        ("adamw_8bit", "dp2", 3),
        pytest.param("adafactor", "dp2", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_resumes_with_and_without_bit_by_bit(maker: str, layout: str, stage: int, tmp_path: Path) -> None:
    if maker == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    plain = Case(recipe=_RECIPE, layout=layout, zero_stage=stage)
    offloaded = plain.but(options=(("offload_optimizer", str(tmp_path)),))
    losses = []
    for name, first in (("plain", plain), ("offloaded", offloaded)):
        directory = tmp_path / name
        directory.mkdir()
        ranks = plain.sizes.world_size
        found = run_on_ranks(ranks, train_some, first, maker, 0, 2, directory)[0]
        other = offloaded if first is plain else plain
        losses.append(found + run_on_ranks(ranks, train_some, other, maker, 2, 4, directory)[0])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4


class _Decaying(torch.optim.AdamW):
    """Its step changes an option of its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.8
        return super().step(closure)


@pytest.mark.slow
@distributed(2)
def test_loaded_states_averages_and_unfrozen_parameters(tmp_path: Path) -> None:
    def run(**options: Any) -> tuple[list[Tensor], Any]:
        def make(model: Any) -> torch.optim.Optimizer:
            model.second.weight.requires_grad_(False)
            return _Decaying(model.parameters(), lr=0.1)

        pair = Pair.make(make, zero_bucket_size_in_mb=1e-4, **options)
        ema = ShardedEMA(pair.optimizer, decay=0.5)
        for step in range(4):
            if step == 2:
                pair.optimizer.load_state_dict(pair.optimizer.state_dict())
                for model in (pair.model.unwrap(), pair.plain):
                    model.second.weight.requires_grad_()
            pair.backward(step)
            pair.step()
            ema.update()
        with ema.applied():
            averages = [param.detach().clone() for param in pair.model.parameters()]
        return averages + [param.detach().clone() for param in pair.model.parameters()], pair.optimizer

    expected, _ = run()
    found, optimizer = run(offload_optimizer=tmp_path)
    assert all(torch.equal(*values) for values in zip(found, expected, strict=True))
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert states and all(_in_file(optimizer, each) for each in states)


# ----- what is refused -----


def _boost(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return Booster(plugin=HybridParallelPlugin(**options)).boost(model, optimizer)


@distributed(2)
def test_a_rank_without_space_is_one_sentence_on_all(tmp_path: Path) -> None:
    model = toy()
    free = 0 if dist.get_rank() else 2**40
    with (
        mock.patch.object(stores, "_free_bytes", lambda directory: free),
        pytest.raises(ConfigurationError, match="has no space for .* of this rank: 0.0 MiB are free; free some, or"),
    ):
        _boost(model, torch.optim.AdamW(model.parameters()), offload_optimizer=str(tmp_path))
    assert model(torch.ones(2, 5, dtype=torch.float64)).isfinite().all()  # nothing was changed


@distributed(1)
@pytest.mark.parametrize("option", ["offload_optimizer", "offload_parameters"])
def test_a_missing_directory_is_refused_before_the_model_is_sharded(option: str, tmp_path: Path) -> None:
    model = toy()
    with (
        mock.patch.object(setup_optimizer, "build_model", side_effect=AssertionError("the model was sharded")),
        pytest.raises(ConfigurationError, match=f"{option}='.*' cannot hold the file of a rank .No such file"),
    ):
        _boost(model, torch.optim.AdamW(model.parameters()), zero_stage=3, **{option: str(tmp_path / "not" / "there")})


@distributed(1)
def test_a_disk_that_fills_up_later_stops_the_step(tmp_path: Path) -> None:
    pair = Pair.make(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), offload_optimizer=tmp_path
    )
    pair.backward(0)
    with (
        mock.patch.object(stores, "_free_bytes", lambda directory: 0),
        pytest.raises(ConfigurationError, match="offload_optimizer='.*' has no space for"),
    ):
        pair.optimizer.step()


@distributed(1)
def test_an_optimizer_that_mixes_parameters_is_refused(tmp_path: Path) -> None:
    model = toy()
    with pytest.raises(ConfigurationError, match="LBFGS updates parameters together, and offload_optimizer='.*' steps"):
        _boost(model, torch.optim.LBFGS(model.parameters()), zero_stage=0, offload_optimizer=str(tmp_path))


@distributed(2)
def test_cpu_changes_nothing_on_a_cpu() -> None:
    model = toy()
    _, optimizer = _boost(
        model, torch.optim.AdamW(model.parameters()), zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu"
    )[:2]
    assert not optimizer.buckets[0].options.states.is_offloaded
    assert optimizer.buckets[0].options.exchange.shard_memory is None
