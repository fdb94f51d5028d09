"""Optimizer states of a checkpoint: where they are loaded to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from plugins.hybrid_parallel.checkpoint.optimizer_state import OptimizerLoad
from plugins.hybrid_parallel.zero.bucket_layout import StateMemory
from plugins.hybrid_parallel.zero.user_optimizer import Stepper

PRESENT = {"lr": 0.1, "fused": None, "capturable": False}


@pytest.mark.parametrize(
    ("saved", "device"), [({"fused": True}, "meta"), ({"capturable": True}, "meta"), ({"fused": False}, "cpu")]
)
def test_the_number_of_steps_is_where_the_optimizer_reads_it(saved: dict[str, Any], device: str) -> None:
    """Options of the group are loaded as well, so the saved ones decide. The meta device stands for a GPU."""
    param = nn.Parameter(torch.empty(4, device="meta"))
    piece = SimpleNamespace(index=0, parameter=param, start=0, stop=4)
    bucket = SimpleNamespace(params=[param], pieces=[piece], group_index=0, has_masters=False)
    optimizer = SimpleNamespace(
        param_groups=[dict(PRESENT)],
        buckets=[bucket],
        updated=[bucket],
        wholes=(),
        stepper=Stepper(None, StateMemory()),
        averages={},
        names={param: "weight"},
        aliases={},
        state={},
        take_unfrozen=lambda names: None,
        loss_scale=SimpleNamespace(load_state_dict=lambda state: None),
    )
    header = {"param_groups": [saved], "loss_scale": {}}
    numbers = {"shapes": {"weight": [4]}, "numbers": {"weight": {"step": ["float32", 3.0]}}}
    load = OptimizerLoad(optimizer, SimpleNamespace(tensors={}, state={"optimizer": {**header, **numbers}}))
    load.apply()
    assert optimizer.state[param]["step"].device.type == device
