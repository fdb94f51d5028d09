"""nan and inf: every rank decides alike, and the message says where they came from.

What breaks here first: a rank that sees a bad gradient the others do not see. Look in
`plugins/hybrid_parallel/features/nonfinite.py` and `zero/optimizer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import Booster
from booster.errors import NonFiniteError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.utils.untraced import in_backward
from zoo_tests.harness.faulty import INF, LAYER, LAYOUTS, NAN, NOTHING, SIZES, Job, on, poisoned, same
from zoo_tests.harness.ranks import run_on_ranks

# ----- raise: what is named -----


def _bad_gradient(layout: str, zero_stage: int, rank: int, name: str) -> str:
    job = Job.start(**LAYOUTS[layout], zero_stage=zero_stage)
    job.train(range(2))
    if dist.get_rank() == rank:
        job.poison_gradient(name, INF)
    message = job.message(2)
    job.heal()
    if message != NOTHING:
        job.train(range(3, 4))  # the step can be done without
    return message


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_gradient_on_one_rank_is_named_on_all(layout: str, zero_stage: int) -> None:
    """In a shard, in a copy that the norm does not count, in a layer of the last stage."""
    last = SIZES[layout] - 1
    for name in (LAYER.format(1) + "attention.self.key.weight", LAYER.format(1) + "output.LayerNorm.bias"):
        messages = on(layout, _bad_gradient, zero_stage, last, name)
        assert len(set(messages)) == 1, "all ranks say the same"
        assert f"gradients of step 3 are not finite: the gradient of {name} is the first" in messages[0]
        assert "1 inf of" in messages[0]
        if layout == "dp2" and zero_stage == 0:
            assert "of the sum over all replicas" in messages[0]
        else:
            assert f"on rank {last} (" in messages[0]


def _bad_activation(layout: str, microbatch: int) -> str:
    job = Job.start(**LAYOUTS[layout])
    if dist.get_rank() == dist.get_world_size() - 1:
        job.poison_output(LAYER.format(1) + "attention.output.dense", NAN, microbatch)
    return job.message(0)


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_a_bad_activation_names_the_micro_batch_of_its_loss(layout: str) -> None:
    microbatch = 1 if layout == "pp2" else 0
    place = "rank 1 (stage 1)" if layout == "pp2" else "rank 1 (replica 1)"
    for message in on(layout, _bad_activation, microbatch):
        assert f"not finite: the loss of micro-batch {microbatch} is nan on {place}; the gradient of cls." in message


def _bad_weight(layout: str, name: str, nonfinite: str) -> str:
    job = Job.start(**LAYOUTS[layout], nonfinite=nonfinite)
    param = job.parameter(name)
    if param is not None and dist.get_rank() == dist.get_world_size() - 1:
        param.data.view(-1)[3] = NAN
    return job.message(0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_weight_is_named_and_never_skipped(layout: str) -> None:
    name = LAYER.format(1) + "intermediate.dense.bias"
    for nonfinite in ("raise", "skip"):
        for message in on(layout, _bad_weight, name, nonfinite):
            assert f"not finite: the weight {name} itself has 1 nan of" in message
            assert f"on rank {SIZES[layout] - 1} (" in message


class Regression(nn.Module):
    """Takes floating-point inputs; `spare` is used by nobody, `frozen` learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.frozen, self.spare = nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.loose = nn.Parameter(torch.ones(5))  # trained by nobody

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.body(x) * self.loose).square()


def _regression(**options: Any) -> tuple[Booster, Any, Any]:
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.SGD([*model.body.parameters(), *model.spare.parameters()], lr=0.1)
    booster = Booster(plugin=HybridParallelPlugin(**options))
    return booster, *booster.boost(model, optimizer)


def _regress(booster: Booster, model: Any, optimizer: Any, x: Tensor) -> None:
    booster.execute_pipeline(iter([{"x": x}]), model, lambda outputs, _: outputs.mean(), optimizer)
    optimizer.step()


def _bad_input() -> str:
    booster, model, optimizer = _regression(microbatch_size=2)
    x = torch.ones(6, 3)
    if dist.get_rank() == 1:
        x[3, 0] = INF
    with pytest.raises(NonFiniteError) as raised:
        _regress(booster, model, optimizer, x)
    return str(raised.value)


def test_a_bad_input_is_named_with_its_micro_batch() -> None:
    for message in run_on_ranks(2, _bad_input):
        assert "not finite: the input 'x' of micro-batch 1 has 1 inf of 6 values on rank 1 (replica 1)" in message


def _bad_gradients_that_do_not_matter(zero_stage: int) -> None:
    booster, model, optimizer = _regression(zero_stage=zero_stage)
    inside = model.unwrap()
    inside.frozen.weight.grad = torch.full_like(inside.frozen.weight, INF)
    inside.loose.register_hook(lambda gradient: gradient * INF)
    before = inside.body.weight.detach().clone()
    _regress(booster, model, optimizer, torch.ones(4, 3))
    assert not optimizer.step_was_skipped and not torch.equal(before, inside.body.weight)
    assert not torch.isfinite(inside.loose.grad).all(), "the fault was not there"


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_gradients_that_no_optimizer_takes_do_not_matter(zero_stage: int) -> None:
    run_on_ranks(2, _bad_gradients_that_do_not_matter, zero_stage)


def _ordinary_loop() -> str:
    booster, model, optimizer = _regression()
    loss = model(x=torch.ones(4, 3)).mean()
    booster.backward(loss * (NAN if dist.get_rank() == 1 else 1.0), optimizer)
    with pytest.raises(NonFiniteError) as raised:
        optimizer.step()
    return str(raised.value)


def test_an_ordinary_loop_is_told_as_well() -> None:
    for message in run_on_ranks(2, _ordinary_loop):
        assert "the loss of micro-batch 0 is nan on rank 1 (replica 1); the gradient of body." in message


# ----- skip and ignore -----


@contextmanager
def _faults(job: Job, step: int) -> Iterator[None]:
    """Step 1 is bad on the last rank."""
    if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
        job.poison_gradient(LAYER.format(1) + "attention.self.key.weight", NAN)
    yield
    job.heal()


def _skip(layout: str, zero_stage: int, precision: str) -> None:
    options = {**LAYOUTS[layout], "zero_stage": zero_stage, "precision": precision}
    job, without = Job.start(**options, nonfinite="skip"), Job.start(**options, nonfinite="skip")
    for step in range(4):
        with _faults(job, step):
            before = job.state()
            job.backward(step)
            job.finish()
            assert job.optimizer.step_was_skipped == (step == 1) == same(before, job.state())
        if step != 1:
            without.train(range(step, step + 1))
        assert same(job.state(), without.state()), f"step {step}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_skipped_step_is_as_if_its_batch_had_not_been_seen(layout: str) -> None:
    for zero_stage, precision in ((1, "bf16"), (0, "fp32")):
        on(layout, _skip, zero_stage, precision)


def _ignore() -> None:
    job = Job.start(nonfinite="ignore")
    job.poison_gradient(LAYER.format(1) + "attention.self.key.weight", NAN)
    job.train(range(1))
    assert not job.optimizer.step_was_skipped
    assert not torch.isfinite(job.parameter(LAYER.format(1) + "attention.self.key.weight")).all()


def test_ignoring_trains_on_as_plain_torch_does() -> None:
    run_on_ranks(2, _ignore)


# ----- fp16 -----


def _fp16(layout: str, rank: int) -> tuple[list[float], str]:
    """Overflows on one rank at every step; the scales, and how it ends at the floor."""
    job = Job.start(**LAYOUTS[layout], precision="fp16", initial_scale=4.0)
    if dist.get_rank() == rank:
        job.poison_gradient(LAYER.format(rank if layout == "pp2" else 0) + "attention.self.key.weight", INF)
    scales = []
    for step in range(2):
        before = job.state()
        job.backward(step)
        job.finish()
        assert job.optimizer.step_was_skipped and same(before, job.state())
        scales.append(job.optimizer.loss_scale.value)
    return scales, job.message(3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_fp16_shrinks_its_scale_alike_and_reports_the_floor(layout: str, rank: int) -> None:
    for scales, message in on(layout, _fp16, rank):
        assert scales == [2.0, 1.0]
        assert re.search(r"gradients of step 3, at the smallest loss scale of 1, are not finite: the gradient", message)


# ----- debug mode: which module -----


class _Spoiled(torch.autograd.Function):
    """One value of the gradient is nan on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return poisoned(grad, NAN)


def _spoil_backward(module: nn.Module, microbatch: int) -> None:
    """The backward pass of `module` goes bad inside, while the gradient that it was given is finite."""
    native, calls = module.forward, iter(range(100))

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_recomputed = in_backward()
        spoils = not is_recomputed and next(calls) == microbatch
        return native(_Spoiled.apply(hidden) if spoils else hidden, *args, **kwargs)

    module.forward = forward


def _watched(layout: str, rank: int, name: str, direction: str, options: dict[str, Any]) -> str:
    job = Job.start(**LAYOUTS[layout], debug=True, **options)
    job.train(range(1))
    microbatch = 1 if "pp" in layout else 0
    module = job.module(name)
    if dist.get_rank() == rank:
        if direction == "forward":
            job.poison_output(name, NAN, microbatch)
        else:
            _spoil_backward(module, microbatch)
    return job.message(1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": "full"}], ids=["plain", "recomputed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_debug_names_the_module_of_the_forward_pass(layout: str, options: dict[str, Any]) -> None:
    """In a sharded layer of the first stage, on the second tensor-parallel rank where there is one."""
    rank, microbatch = (0 if layout == "pp2" else 1), (1 if "pp" in layout else 0)
    name = LAYER.format(0) + "intermediate.dense"
    messages = on(layout, _watched, rank, name, "forward", options)
    assert len(set(messages)) == 1
    came = f"is the first in the forward pass of micro-batch {microbatch}, with 1 nan of"
    expected = rf"not finite: the output of {name} \(\w+\) {came} \d+ values, from finite inputs on rank {rank} "
    assert re.search(expected, messages[0]), messages[0]


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": "full"}], ids=["plain", "recomputed"])
@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=() if layout == "tp2pp2" else pytest.mark.slow) for layout in LAYOUTS]
)
def test_debug_names_the_module_of_the_backward_pass(layout: str, options: dict[str, Any]) -> None:
    """The layer after it is sound, those before it are spoiled; losses are finite."""
    rank, microbatch = SIZES[layout] - 1, (1 if "pp" in layout else 0)
    layer = 1
    name = LAYER.format(layer) + "attention.self"
    messages = on(layout, _watched, rank, name, "backward", options)
    assert len(set(messages)) == 1
    given = rf"the gradient of the input of {name} \(\w+\), of whose output the gradient is finite,"
    expected = rf"not finite: {given} is the first in the backward pass of micro-batch {microbatch}, .* on rank {rank} "
    assert re.search(expected, messages[0]), messages[0]
