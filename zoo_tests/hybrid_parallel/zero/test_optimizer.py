"""The user's optimizer over ZeRO-1 shards: every class of torch.optim, groups, schedulers, clipping.

What breaks here first: an optimizer with a state of another shape than its parameter, and parameters cut in the
middle. Look in `plugins/hybrid_parallel/zero`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.shard_report import fake_rank
from plugins.hybrid_parallel.zero.reducer import global_norm
from plugins.hybrid_parallel.zero.user_optimizer import place_states
from zoo_tests.harness.optimizers import ClippedSGD, DerivedAdam, Lamb, Lion, TrustAdamW
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.toy import Pair, global_batch, mean_square, share_of, toy

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.05, "initial_accumulator_value": 0.3},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.1},
    "Adamax": {"lr": 0.01},
    "Adadelta": {"lr": 1.0},
    "ASGD": {"lr": 0.1, "t0": 1.0},
    "Rprop": {"lr": 0.01},
    "Adafactor": {"lr": 0.05},
}


def _train(pair: Pair, steps: int = 3, **tolerance: float) -> None:
    before = [param.detach().clone() for param in pair.plain.parameters()]
    for step in range(steps):
        pair.backward(step)
        pair.step()
        pair.check_parameters(**tolerance)
    moved = [not torch.equal(old, new) for old, new in zip(before, pair.plain.parameters(), strict=True)]
    assert any(moved), "a step that moves nothing shows nothing"


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(2)
def test_equals_plain_torch(name: str, zero_stage: int) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])

    _train(Pair.make(make, zero_stage=zero_stage))


@pytest.mark.slow
@distributed(2)
def test_optimizers_as_users_write_them() -> None:
    for zero_stage in (0, 1):
        for make in (DerivedAdam, TrustAdamW, Lamb, Lion, ClippedSGD):
            if make is ClippedSGD and zero_stage == 1:
                with pytest.raises(ConfigurationError, match="ClippedSGD updates each parameter from the values of"):
                    Pair.make(lambda model: ClippedSGD(model.parameters()), zero_stage=zero_stage)
                continue
            _train(Pair.make(lambda model, make=make: make(model.parameters()), zero_stage=zero_stage))


@pytest.mark.slow
@distributed(2)
def test_adafactor_of_transformers() -> None:
    from transformers.optimization import Adafactor

    for options in ({}, {"lr": 0.05, "relative_step": False, "scale_parameter": False, "beta1": 0.9}):
        _train(Pair.make(lambda model, options=options: Adafactor(model.parameters(), **options)))


@pytest.mark.slow
@distributed(2)
def test_muon_gets_whole_matrices() -> None:
    """It rounds to bf16 inside, so that the last bit of a gradient can show."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([model.first.weight, model.second.weight], lr=0.1)

    _train(Pair.make(make), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("zero_stage", [0, 1])
@distributed(4)
def test_four_replicas(zero_stage: int) -> None:
    _train(Pair.make(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), zero_stage=zero_stage))


@distributed(2)
def test_state_from_before_boost_is_kept() -> None:
    def two_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in (10, 11):
            batch = global_batch(step)
            mean_square(model(batch["x"]), batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    _train(Pair.make(lambda model: torch.optim.Adam(model.parameters(), lr=0.01), before_boost=two_steps))


# ----- parameters that are not trained -----


@pytest.mark.parametrize("bucket_size", [1e-4, 12])
@pytest.mark.parametrize("zero_stage", [0, 1])
@distributed(2)
def test_unused_parameters_are_not_moved_by_weight_decay(zero_stage: int, bucket_size: float) -> None:
    """In a bucket of their own, and in one with parameters that are used."""
    pair = Pair.make(
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5),
        zero_stage=zero_stage,
        zero_bucket_size_in_mb=bucket_size,
    )
    before = toy().spare.weight
    for step in range(2):
        pair.backward(step)
        pair.check_gradients()
        assert not any(name.startswith("spare") for name in pair.optimizer.full_gradients())
        pair.step()
    pair.check_parameters()
    assert torch.equal(pair.model.unwrap().spare.weight, before)


@pytest.mark.parametrize("given", ["all", "trainable"])
@distributed(2)
def test_frozen_parameters(given: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        model.first.weight.requires_grad_(False)
        params = [param for param in model.parameters() if given == "all" or param.requires_grad]
        return torch.optim.AdamW(params, lr=0.1)

    pair = Pair.make(make)
    _train(pair)
    assert torch.equal(pair.model.unwrap().first.weight, toy().first.weight)


# ----- groups, schedulers -----


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [model.first.weight, model.spare.weight], "lr": 0.02, "weight_decay": 0.1},
        {"params": [model.second.weight]},
        {"params": [model.first.bias, model.spare.bias], "lr": 0.5, "betas": (0.5, 0.6)},
    ]
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)


@distributed(2)
def test_parameter_groups_keep_their_options() -> None:
    pair = Pair.make(_groups)
    assert [group["lr"] for group in pair.optimizer.param_groups] == [0.02, 0.1, 0.5]
    _train(pair)


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("kind", ["lambda", "one_cycle", "plateau"])
@distributed(2)
def test_schedulers_made_before_and_after_boost(kind: str, made: str) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        if kind == "lambda":
            return LambdaLR(optimizer, lambda step: 0.5**step)
        if kind == "one_cycle":
            return OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
        return ReduceLROnPlateau(optimizer, patience=0, factor=0.1)

    schedulers: list[Any] = []

    def before_boost(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if made == "before":
            schedulers.append(make(optimizer))

    pair = Pair.make(_groups, before_boost)
    if made == "after":
        schedulers = [make(pair.optimizer), make(pair.plain_optimizer)]
    for step in range(4):
        pair.backward(step)
        pair.step()
        for scheduler in schedulers:
            scheduler.step(*([1.0] if kind == "plateau" else []))
        rates = [
            [(group["lr"], group["betas"]) for group in optimizer.param_groups]
            for optimizer in (pair.optimizer, pair.plain_optimizer)
        ]
        assert rates[0] == rates[1]
        pair.check_parameters()
    assert rates[0][0][0] != 0.02


@distributed(2)
def test_boost_returns_the_users_scheduler() -> None:
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    boosted = Booster(plugin=HybridParallelPlugin()).boost(scheduler, model, optimizer)
    assert boosted[0] is scheduler and boosted[2].unwrap() is optimizer


# ----- clipping, accumulation -----


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("max_norm", [0.05, 1e3])
@distributed(2)
def test_clipping_equals_torchs(max_norm: float, zero_stage: int) -> None:
    pair = Pair.make(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.5), max_norm=max_norm, zero_stage=zero_stage
    )
    for step in range(3):
        pair.backward(step)
        expected = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), max_norm)
        pair.step()
        assert pair.optimizer.grad_norm == pytest.approx(expected.item(), rel=1e-12)
        pair.check_parameters()


@distributed(2)
def test_without_clipping_the_norm_is_that_of_the_check() -> None:
    for nonfinite in ("raise", "ignore"):
        pair = Pair.make(lambda model: torch.optim.SGD(model.parameters(), lr=0.5), nonfinite=nonfinite)
        pair.backward(0)
        pair.step()
        assert (pair.optimizer.grad_norm is None) == (nonfinite == "ignore")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("zero_stage", [0, 1])
@distributed(2)
def test_accumulation_without_and_with_communication(zero_stage: int, overlap: bool) -> None:
    """Ordinary loop: three backward passes, the middle one synchronised, before one step."""
    pair = Pair.make(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.5), zero_stage=zero_stage, overlap_communication=overlap
    )
    for round_ in range(2):
        for step in range(3):
            # Equal shares: the user's own loss is a local mean, which the ranks average.
            batch = global_batch(3 * round_ + step, rows=6)
            share = share_of(batch)
            loss = mean_square(pair.model(x=share["x"]), share)
            if step == 1:
                pair.booster.backward(loss, pair.optimizer)
            else:
                with pair.booster.no_sync(pair.model, pair.optimizer):
                    pair.booster.backward(loss, pair.optimizer)
            mean_square(pair.plain(batch["x"]), batch).backward()
        pair.step()  # reduces what `no_sync` left
        pair.check_parameters()


@distributed(2)
def test_zero_grad_forgets_everything() -> None:
    pair = Pair.make(lambda model: torch.optim.AdamW(model.parameters(), lr=0.5))
    pair.backward(0)
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.zero_grad()
    assert pair.optimizer.full_gradients() == {}
    pair.step()  # without any gradient: moves nothing
    pair.check_parameters()
    _train(pair)


# ----- state dicts -----


@pytest.mark.parametrize("zero_stage", [0, 1])
@distributed(2)
def test_state_dicts_of_its_own_and_of_plain_torch(zero_stage: int) -> None:
    pair = Pair.make(_groups, zero_stage=zero_stage)
    for step in range(2):
        pair.backward(step)
        pair.step()
    own, plain = copy.deepcopy(pair.optimizer.state_dict()), copy.deepcopy(pair.plain_optimizer.state_dict())
    for saved in (own, plain):
        pair.backward(2)
        pair.step()
        pair.optimizer.load_state_dict(copy.deepcopy(saved))
        pair.plain_optimizer.load_state_dict(copy.deepcopy(plain))
        _train(pair)
    other = Pair.make(_groups, zero_stage=1 - zero_stage)
    with pytest.raises(ConfigurationError, match="got the state of another rank or layout; save and load by booster"):
        other.optimizer.load_state_dict(own)
    with pytest.raises(ConfigurationError, match=r"got groups of \[6\] parameters, the optimizer has \[2, 1, 2\]"):
        pair.optimizer.load_state_dict(torch.optim.AdamW([nn.Parameter(torch.ones(1)) for _ in range(6)]).state_dict())


# ----- what is refused -----


@distributed(2)
def test_what_is_refused() -> None:
    pair = Pair.make(lambda model: torch.optim.SGD(model.parameters(), lr=0.5))
    pair.optimizer.param_groups[0]["params"].append(pair.model.unwrap().first.weight)
    with pytest.raises(ConfigurationError, match=r"holds a parameter that was added after boost\(\)"):
        pair.optimizer.step()
    with pytest.raises(RuntimeError, match="parameter groups cannot be added after boost"):
        pair.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@distributed(2)
def test_a_model_that_boost_did_not_return_is_refused() -> None:
    pair = Pair.make(lambda model: torch.optim.SGD(model.parameters(), lr=0.5))
    booster, optimizer, batch = pair.booster, pair.optimizer, share_of(global_batch(0))
    average = torch.optim.swa_utils.AveragedModel(pair.model)
    calls: list[Callable[[Any], Any]] = [
        lambda model: booster.execute_pipeline(batch, model, optimizer=optimizer),
        lambda model: booster.execute_pipeline(batch, model),
        lambda model: booster.no_sync(model, optimizer).__enter__(),
        lambda model: booster.check_synchrony(model),
        lambda model: booster.save_model(model, "nowhere"),
        lambda model: booster.load_model(model, "nowhere"),
        lambda model: booster.save_checkpoint("nowhere", model=model),
        lambda model: booster.load_checkpoint("nowhere", model=model),
    ]
    raw = (
        r"the model is a plain \w+; pass the model that boost\(\) returned: model, optimizer, … = booster.boost\(model"
    )
    around = r"the model is AveragedModel around the one that boost\(\) returned; pass its \.module"
    for call in calls:
        for model, words in ((pair.model.unwrap(), raw), (average, around)):
            with pytest.raises(ConfigurationError, match=words):
                call(model)
    for call in (booster.save_optimizer, booster.load_optimizer):
        with pytest.raises(ConfigurationError, match="the optimizer is a plain SGD; pass the one that boost"):
            call(pair.plain_optimizer, "nowhere")


@distributed(2)
def test_an_optimizer_of_another_model_is_refused_before_anything_is_changed() -> None:
    model, booster = toy(), Booster(plugin=HybridParallelPlugin())
    with pytest.raises(ConfigurationError, match="SGD holds a parameter that is not in the model"):
        booster.boost(model, torch.optim.SGD(toy().parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="got an optimizer without its model; make it from the"):
        booster.boost(torch.optim.SGD(model.parameters(), lr=0.1))
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_norm_of_a_stage_without_trained_parameters_is_on_the_device_of_the_others() -> None:
    """On the CPU it would go to another backend than theirs, and both would wait."""
    with fake_rank(0, 2):
        assert global_norm([], torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("key", "group", "device"),
    [
        ("step", {"fused": True}, "meta"),
        ("step", {"capturable": True}, "meta"),
        ("step", {"fused": None, "capturable": False}, "cpu"),
        ("mu_product", {}, "meta"),
    ],
)
def test_states_from_before_boost_are_where_the_optimizer_reads_them(
    key: str, group: dict[str, Any], device: str
) -> None:
    """A fused kernel refuses a number of steps in host memory."""
    model = nn.Linear(4, 4, device="meta")
    optim = torch.optim.AdamW(model.parameters())
    optim.param_groups[0].update(group)
    piece = SimpleNamespace(index=0, parameter=model.weight, start=0, stop=16)
    place_states(
        optim,
        {model.weight: {key: torch.tensor(3.0)}},
        [SimpleNamespace(params=[model.weight], pieces=[piece], group_index=0)],
    )
    assert optim.state[model.weight][key].device.type == device
