"""Expert parallelism trains like plain transformers: each rank has some of the experts, and tokens travel to them.

What breaks here first: gradients of experts that are counted as often as there are ranks, tensor-parallel ranks that
send the same tokens, a rank that no token came to and that others wait for in the backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo_tests.harness import compare
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.reference import Trace, _Plain
from zoo_tests.zoo import FAMILIES

_EAGER = {"experts_implementation": "eager"}  # in the place of grouped matrix products
_OF_CASE = ("zero_stage", "ordinary_loop", "sequence_parallel")


@dataclass(frozen=True, kw_only=True)
class UnevenRecipe(Recipe):
    """Of eight experts the first four alone are chosen: each of two pairs has opposite scores, all others have none."""

    def model(self) -> nn.Module:
        model = super().model()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(".gate.weight"):
                    weight[1], weight[3], weight[4:] = -weight[0], -weight[2], 0.0
        return model


def _case(
    family: str,
    layout: str,
    ep_size: int,
    config: dict[str, Any] | None = None,
    optimizer: str = "momentum",
    precision: str = "fp32",
    recipe: type[Recipe] = Recipe,
    adapters: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    fields = {name: options.pop(name) for name in _OF_CASE if name in options}
    trained = recipe(
        family=family,
        head=FAMILIES[family].main_head,
        precision=precision,
        config=tuple((config or {}).items()),
        max_norm=0.05,
        optimizer=optimizer,
        adapters=adapters,
    )
    return Case(recipe=trained, layout=layout, options=tuple({"ep_size": ep_size, **options}.items()), **fields)


_MANY = {"num_experts": 8, "num_local_experts": 8}

FAST = [
    _case("mixtral", "dp2", 2),
    _case("mixtral", "dp4", 4, {**_MANY, **_EAGER}, recipe=UnevenRecipe),
    _case("mixtral", "tp2dp2", 2),
]
SLOW = [
    _case("qwen3_moe", "dp4", 2, zero_stage=0),
    _case("qwen3_moe", "pp2dp2", 2, _EAGER),
    _case("mixtral", "cp2", 2),
    _case("mixtral", "dp4", 2),
    _case("mixtral", "dp2", 2, _MANY, recipe=UnevenRecipe, zero_stage=0),
    _case("qwen3_moe", "tp2dp2", 2, zero_stage=0),
    _case("qwen3_moe", "dp4", 4, ordinary_loop=True),
    _case("mixtral", "dp2", 2, ordinary_loop=True, zero_stage=0),
    _case("mixtral", "pp2dp2", 2, zero_stage=0, gradient_checkpointing="full"),
    _case("qwen3_moe", "dp2", 2, gradient_checkpointing="full"),
    _case("mixtral", "tp2dp2", 2, gradient_checkpointing="full"),
    _case("qwen3_moe", "tp2dp2", 2, sequence_parallel=True),
    _case("mixtral", "tp2dp2", 2, sequence_parallel=True, gradient_checkpointing="full"),
    _case(
        "qwen3_moe",
        "tp2dp2",
        2,
        enable_sequence_parallelism=True,
        sequence_parallelism_mode="all_to_all",
    ),
    _case("mixtral", "pp2dp2", 2, pp_style="zero_bubble", num_model_chunks=1),
    _case("qwen3_moe", "pp2dp2", 2, pp_style="gpipe"),
    _case("mixtral", "dp2", 2, microbatch_size=2),
    _case("mixtral", "dp2", 2, optimizer="adamw", precision="bf16"),
    _case("mixtral", "dp2", 2, precision="bf16"),
    _case("qwen3_moe", "tp2dp2", 2, precision="fp16"),
    _case("qwen3_moe", "dp2", 2, _EAGER, precision="bf16"),
    _case("mixtral", "dp2", 2, overlap_communication=False, overlap_allgather=True),
    _case("mixtral", "dp2", 2, debug=True),
    _case("mixtral", "tp2dp2", 2, adapters=("q_proj", "o_proj")),
    _case("qwen3_moe", "cp2dp2", 4, zero_stage=0),
    _case("qwen3_moe", "cp2dp2", 2, sequence_parallelism_mode="all_to_all"),
    _case("mixtral", "cp2tp2", 2, _EAGER),
    _case("qwen3_moe", "cp2pp2", 2, gradient_checkpointing="full", expert_rank_capacity_factor=2.0),
    _case("mixtral", "cp2", 2, ordinary_loop=True),
]


def _parameters(fast: list[Case], slow: list[Case]) -> list:
    return [
        *(pytest.param(case, id=str(case)) for case in fast),
        *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in slow),
    ]


@pytest.mark.parametrize("case", _parameters(FAST, SLOW))
def test_experts_on_several_ranks_train_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


# ----- capacity -----

_TIGHT = {"expert_capacity_factor": 0.6}
WITH_CAPACITY = [
    _case("mixtral", "dp2", 2, _EAGER, **_TIGHT),
    _case("qwen3_moe", "tp2dp2", 2, **_TIGHT),
    _case("mixtral", "tp2", 1, **_TIGHT),
]
SLOW_WITH_CAPACITY = [
    _case("qwen3_moe", "single", 1, **_TIGHT),
    _case("mixtral", "dp4", 4, expert_capacity_factor=1.0),
    _case("mixtral", "pp2dp2", 2, gradient_checkpointing="full", **_TIGHT),
    _case("mixtral", "tp2dp2", 2, sequence_parallel=True, expert_rank_capacity_factor=2.0, **_TIGHT),
    _case("qwen3_moe", "dp2", 2, ordinary_loop=True, expert_capacity_factor=0.05),
]


class _PlainWithCapacity(_Plain):
    """Plain training in which an expert has room for so many tokens of a sequence, in words instead of tensors."""

    def __init__(self, recipe: Recipe, factor: float) -> None:
        super().__init__(recipe)
        self.factor, self.dropped, self.shape = factor, 0, (0, 0)
        for name, module in self.model.named_modules():
            if name.endswith(".mlp"):
                module.register_forward_pre_hook(self._see)
                module.experts.register_forward_pre_hook(self._drop)

    def _see(self, _: nn.Module, args: tuple[Tensor]) -> None:
        self.shape = tuple(args[0].shape[:2])

    def _drop(self, experts: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, index, weights = args
        batch, length = self.shape
        room = math.ceil(self.factor * length * index.shape[1] / experts.num_experts)
        mask = torch.ones_like(weights)
        for row in range(batch):
            taken = [0] * experts.num_experts
            for choice in range(index.shape[1]):
                for position in range(length):
                    token = row * length + position
                    expert = int(index[token, choice])
                    if taken[expert] == room:
                        mask[token, choice], self.dropped = 0.0, self.dropped + 1
                    else:
                        taken[expert] += 1
        return hidden, index, weights * mask


@pytest.mark.parametrize("case", _parameters(WITH_CAPACITY, SLOW_WITH_CAPACITY))
def test_what_an_expert_has_no_room_for_is_dropped(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case.shallow()
    plain = _PlainWithCapacity(case.recipe, dict(case.options)["expert_capacity_factor"])

    def train(_: Recipe) -> Trace:
        return plain.train()

    monkeypatch.setattr(compare, "train_reference", train)
    check_case(case, tmp_path)
    assert plain.dropped > 0
