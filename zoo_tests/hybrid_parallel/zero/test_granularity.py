"""What an optimizer reads to update one value, by a trial of the object.

What breaks here first: an optimizer whose copy is not like it. Look in `plugins/hybrid_parallel/zero/granularity.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.setup.input_checks import check_granularity, check_zero_size
from plugins.hybrid_parallel.zero.granularity import Granularity, granularity_of
from zoo_tests.harness.optimizers import (
    SAM,
    BlockwiseAdam,
    ClippedSGD,
    DerivedAdam,
    Lamb,
    Lion,
    PointwiseSAM,
    ScheduleFreeSGD,
    TrustAdamW,
)

ELEMENT, PARAMETER, MODEL = Granularity


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(5))]


def _adafactor_of_transformers(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(params)


TORCHS = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
FOUND: dict[str, tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], Granularity]] = {
    **{name: (partial(getattr(torch.optim, name), lr=0.1), ELEMENT) for name in TORCHS},
    "a subclass": (DerivedAdam, ELEMENT),
    "from anywhere": (Lion, ELEMENT),
    "torch's Adafactor": (torch.optim.Adafactor, PARAMETER),
    "transformers' Adafactor": (_adafactor_of_transformers, PARAMETER),
    "a norm of each tensor": (TrustAdamW, PARAMETER),
    "Lamb": (Lamb, PARAMETER),
    "blocks of a tensor": (BlockwiseAdam, PARAMETER),
    "a norm of all tensors": (ClippedSGD, MODEL),
    "a norm of all tensors, in its closure": (SAM, MODEL),
    "no norm in its closure": (PointwiseSAM, ELEMENT),
    "all tensors as one vector": (torch.optim.LBFGS, MODEL),
    "the same with a search": (partial(torch.optim.LBFGS, line_search_fn="strong_wolfe"), MODEL),
    "steps in training mode alone": (ScheduleFreeSGD, ELEMENT),
    "what cannot be tried": (torch.optim.SparseAdam, PARAMETER),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name: str) -> None:
    make, expected = FOUND[name]
    params = _params()
    optimizer, before = make(params), [param.detach().clone() for param in params]
    torch.manual_seed(5)
    assert granularity_of(optimizer) is expected
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3)), "it draws from nobody's random numbers"
    assert all(torch.equal(old, new) for old, new in zip(before, params, strict=True))
    assert all(group["params"] for group in optimizer.param_groups)


def test_a_schedule_that_begins_with_zero_hides_nothing() -> None:
    optimizer = TrustAdamW(_params())
    LambdaLR(optimizer, lambda step: 0.0)
    assert granularity_of(optimizer) is PARAMETER


def test_a_step_of_the_objects_own_is_not_trusted() -> None:
    optimizer = torch.optim.SGD(_params(), lr=0.1)
    optimizer.step = lambda closure=None: None
    assert granularity_of(optimizer) is PARAMETER


def test_an_optimizer_around_another_leaves_that_one_alone() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, params: list[nn.Parameter]) -> None:
            super().__init__(params, {})
            self.inside = torch.optim.AdamW(self.param_groups, lr=0.1)

        def step(self, closure: Any = None) -> None:
            self.inside.step()

    params = _params()
    optimizer, before = Around(params), [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    assert granularity_of(optimizer) in (ELEMENT, PARAMETER)
    assert not optimizer.inside.state
    assert all(torch.equal(old, new) for old, new in zip(before, params, strict=True))


def _sizes(**sizes: int) -> dict[str, int]:
    return {"tp_size": 1, "ep_size": 1, "pp_size": 1, "num_shards": 1} | sizes


def test_what_is_refused() -> None:
    check_granularity(torch.optim.AdamW(_params()), **_sizes(tp_size=2, ep_size=2, pp_size=2, num_shards=2))
    check_granularity(Lamb(_params()), **_sizes(tp_size=2, ep_size=2, pp_size=2, num_shards=2))
    for make in (ClippedSGD, SAM, torch.optim.LBFGS):
        check_granularity(make(_params()), **_sizes())
    refused = [
        (ClippedSGD, {"num_shards": 2}, "from the values of others, which zero_stage=1 or more with 2 replicas has"),
        (
            ClippedSGD,
            {"pp_size": 2},
            "from the values of others, which pp_size=2 has on other ranks; use zero_stage=0",
        ),
        (ClippedSGD, {"tp_size": 2}, "which tp_size=2 has on other ranks; use zero_stage=0 with pp_size=1, tp_size=1"),
        (SAM, {"ep_size": 2}, "SAM updates each parameter from the values of others, which ep_size=2 has on other"),
        (torch.optim.LBFGS, {"tp_size": 2}, "LBFGS updates each parameter from the values of others, which tp_size=2"),
    ]
    for make, sizes, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            check_granularity(make(_params()), **_sizes(**sizes))


def test_states_of_whole_parameters_are_not_repeated() -> None:
    optim = torch.optim.Adafactor([nn.Parameter(torch.ones(4, 4))])
    for zero_size, num_parts in ((None, 2), (4, 2), (2, 1)):
        check_zero_size(optim, zero_size, num_replicas=4, num_parts=num_parts)
    check_zero_size(torch.optim.AdamW([nn.Parameter(torch.ones(4, 4))]), 2, num_replicas=4, num_parts=2)
    with pytest.raises(ConfigurationError, match="Adafactor reads whole parameters, .* zero_size=2 cannot repeat"):
        check_zero_size(optim, 2, num_replicas=4, num_parts=2)
