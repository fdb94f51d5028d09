"""Rewards and tools on several ranks: one rank runs a tool for its replica, and a wrong reward is said on all ranks.

What breaks here first: a rank that goes on alone. Look in `booster/integrations/trl_server.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from booster.errors import ConfigurationError
from booster.integrations.replicas import Replicas
from booster.integrations.trl_server import CheckedRewards, ToolsOfFirstRank
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import distributed


def _on_rank_1(wrong: Any, right: Any) -> Any:
    return wrong if dist.get_rank() == 1 else right


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "another number": (
        lambda prompts: _on_rank_1([1.0], [1.0, None, 2]),
        "returned 1 rewards for 3 completions; return one for each, or None where it does not apply",
    ),
    "nan": (
        lambda prompts: _on_rank_1([1.0, None, math.nan], [1.0, 2.0, 3.0]),
        "returned nan for completion 2 of 3; return a finite number, or None where it does not apply",
    ),
    "infinite": (
        lambda prompts: _on_rank_1([-math.inf, 1, 1], [1.0, 2.0, 3.0]),
        "returned -inf for completion 0 of 3; return a finite number, or None where it does not apply",
    ),
    "a failure": (
        lambda prompts: [1.0 / (1 - dist.get_rank())] * 3,
        "failed (ZeroDivisionError: float division by zero); it must return a number for each completion",
    ),
}


@distributed(2)
def test_a_wrong_reward_is_said_on_all_ranks() -> None:
    rewards = CheckedRewards(Replicas(HybridParallelPlugin(tp_size=2)))
    for function, said in WRONG.values():
        assert len(rewards.checked(function, "mine")(["a", "b", "c"])) == 3
        with pytest.raises(ConfigurationError) as error:
            rewards.raise_problem()
        assert str(error.value) == f"the reward function 'mine' {said}"
    assert rewards.checked(lambda prompts, **_: [None, 1, True], "mine")(["a", "b", "c"], more=1) == [None, 1.0, 1.0]
    rewards.raise_problem()

    async def later(prompts: list[str]) -> list[float]:
        return [math.nan] * len(prompts)

    assert asyncio.run(rewards.checked(later, "later")(prompts=["a"])) == [0.0]
    with pytest.raises(ConfigurationError, match="'later' returned nan for completion 0 of 1"):
        rewards.raise_problem()


class _World:
    """An environment whose methods count."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def reset(self) -> str:
        self.calls.append("reset")
        return f"rank {dist.get_rank()}"

    def look(self, where: str) -> list[Any]:
        self.calls.append(where)
        return [where, self.reset(), dist.get_rank()]

    async def wait(self) -> int:
        await asyncio.sleep(0)
        return dist.get_rank()

    def fail(self) -> None:
        raise KeyError(f"of rank {dist.get_rank()}")


@distributed(4)
def test_one_rank_runs_the_tools_of_a_replica() -> None:
    replicas = Replicas(HybridParallelPlugin(tp_size=2))
    tools = ToolsOfFirstRank(SimpleNamespace(accelerator=SimpleNamespace(replicas=replicas)))
    first = 2 * (dist.get_rank() // 2)
    environments = tools.factory({"world": _World})
    world, other = environments["world"](), environments["world"]()
    assert type(world) is type(other) is _World, "TRL tells environments by their classes"
    assert world.look(where="here") == ["here", f"rank {first}", first]
    assert world.calls == (["here", "reset"] if dist.get_rank() == first else [])
    assert world.wait() == other.wait() == first
    with pytest.raises(RuntimeError, match=f"of rank {first}"):
        world.fail()
    assert world.reset() == f"rank {first}", "it goes on after a failure"
