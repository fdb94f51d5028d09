"""What the JSON form describes trains to the numbers of plain training: cuts along one dim, any mapping of devices.

What breaks here first: a layer that a family reads in a way of its own (`shardformer/policies/user_policy.py`),
and a group whose ranks are in another order than its pieces (`plugins/hybrid_parallel/distributed/mesh.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.shard_spec import spec_of
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import distributed
from zoo_tests.zoo import FAMILIES

HEADS = {"bert": "masked_lm", "llama": "causal_lm", "gpt2": "lm_head", "t5": "generation", "vit": "image"}


def _case(family: str, layout: str, zero: int = 1, recipe: dict[str, Any] | None = None, **options: Any) -> Case:
    head = HEADS.get(family) or FAMILIES[family].main_head
    precision = FAMILIES[family].precision
    return Case(
        recipe=Recipe(family=family, head=head, **{"precision": precision, "steps": 1, **(recipe or {})}),
        layout=layout,
        zero_stage=zero,
        options=tuple(options.items()),
    )


def _mapping(*stages: tuple[Any, ...]) -> dict[str, dict[str, Any]]:
    return {
        f"stage_{number}": {f"shard_{shard}": device for shard, device in enumerate(devices)}
        for number, devices in enumerate(stages)
    }


FAST = [
    _case("bert", "tp2", sharding_dim=0),
    _case("llama", "tp2pp2", sharding_dim=-1),
    _case(
        "gpt2",
        "tp2pp2",
        device_mapping=_mapping((3, 0), (1, 2)),
        recipe={"optimizer": "adamw", "steps": 2, "max_norm": 0.05},
    ),
]
_DIMS = (0, -1)
# Each family with one of the dims, in turn; the campaign has both.
_SHARDED = [
    *([_case(family, "tp2pp2", sharding_dim=dim) for dim in _DIMS] for family in HEADS),
    *([_case(family, "tp4", sharding_dim=dim) for dim in _DIMS] for family in ("llama", "vit")),
    *([_case(family, "tp2", sharding_dim=dim) for dim in _DIMS] for family in ("albert", "bloom", "clip", "mixtral")),
]
CAMPAIGN = [pair[1 - number % 2] for number, pair in enumerate(_SHARDED)]
SUITE = [
    *(pair[number % 2] for number, pair in enumerate(_SHARDED)),
    _case("bert", "tp2dp2", sharding_dim=0, zero=0, recipe={"optimizer": "momentum", "max_norm": 0.05}),
    _case("llama", "tp2dp2", sharding_dim=-1, recipe={"optimizer": "adamw", "steps": 2, "max_norm": 0.05}),
    _case("gpt2", "tp2pp2", sharding_dim=-1, pp_style="zbv", num_microbatches=4),
    _case("llama", "tp4", device_mapping=_mapping(("cpu:2", "cpu:0", "cpu:3", "cpu:1")), recipe={"max_norm": 0.05}),
    _case("bert", "pp4", device_mapping=_mapping((2,), (3,), (0,), (1,))),
    _case("t5", "tp2pp2", device_mapping=_mapping((3, 1), (0, 2))),
    _case("llama", "pp2dp2", device_mapping=_mapping((1,), (0,)), recipe={"optimizer": "adamw"}),
    _case("bert", "tp2dp2", zero=0, device_mapping=_mapping((1, 0)), recipe={"optimizer": "momentum"}),
    _case("gpt2", "tp2pp2", device_mapping=_mapping((3, 0), (1, 2)), pp_style="interleaved", sharding_dim=0),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case)) for case in FAST + SUITE]
    + [pytest.param(case, id=str(case), marks=pytest.mark.campaign) for case in CAMPAIGN],
)
def test_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@distributed(4)
def test_a_device_holds_the_piece_that_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / f"{dist.get_rank()}.json"
    mapping = _mapping(("cpu:2", "/device:XLA_DTU:0"), (3, "1"))
    path.write_text(json.dumps({"mode": "hybrid", "sharding_size": 2, "stage_cnt": 2, "device_mapping": mapping}))
    plugin = HybridParallelPlugin.from_config(path, zero_stage=0)
    whole = Recipe(family="bert", head="masked_lm").model()
    model = Booster(plugin=plugin).boost(Recipe(family="bert", head="masked_lm").model())
    stage, shard = {2: (0, 0), 0: (0, 1), 3: (1, 0), 1: (1, 1)}[dist.get_rank()]
    assert (plugin.stage_index, plugin.tp_rank, plugin.dp_size) == (stage, shard, 1)
    assert plugin.mesh.mesh.flatten().tolist() == [2, 0, 3, 1]
    pieces = dict(model.unwrap().named_parameters())
    assert ("bert.encoder.layer.0.output.dense.weight" in pieces) == (stage == 0)
    for name, piece in pieces.items():
        if spec_of(piece).dim is not None and ".layer." in name:  # vocabularies are padded
            expected = whole.get_parameter(name).chunk(2, spec_of(piece).dim)[shard]
            assert torch.equal(piece, expected.to(piece)), name


@pytest.mark.parametrize("dim", [0, -1])
@distributed(2)
def test_a_model_without_a_policy(dim: int) -> None:
    """Layers of any model, one smaller than the axis, one tied to another."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 1), nn.Linear(1, 7), nn.Linear(7, 7)
    )
    plain[5].weight = plain[2].weight
    plain.double()
    sharded = nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 1), nn.Linear(1, 7), nn.Linear(7, 7)
    )
    sharded[5].weight = sharded[2].weight
    sharded.double().load_state_dict(plain.state_dict())
    booster = Booster(
        plugin=HybridParallelPlugin.from_config({"mode": "sharding", "sharding_size": 2, "sharding_dim": dim})
    )
    model, optimizer = booster.boost(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).double()
        loss, expected = model(x).square().mean(), plain(x).square().mean()
        booster.backward(loss, optimizer)
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14, check_device=False)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    kinds = [type(layer).__name__ for layer in model.unwrap()]
    cut = {0: "RowParallelLinear", -1: "ColumnParallelLinear"}[dim]
    assert kinds == [cut, "Tanh", "Linear", "Linear", "Linear", "Linear"]
