"""Rewards, tools and environments of TRL's trainers: programs outside say the same to all ranks of a replica."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

from booster.integrations.replicas import Replicas


class CheckedRewards:
    """Reward functions whose answers are looked through; problems of any rank are raised on all of them."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._problem: str | None = None
        self._cause: Exception | None = None

    def checked(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a reward function that answers zeros for what is no reward, until `raise_problem` says so."""
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

            @functools.wraps(function)
            async def answer(prompts: list[Any], **kwargs: Any) -> list[float | None]:
                try:
                    return self._looked_through(await function(prompts=prompts, **kwargs), name, len(prompts))
                except Exception as error:  # of the user's function, of any kind
                    return self._failed(error, name, len(prompts))

        else:

            @functools.wraps(function)
            def answer(prompts: list[Any], **kwargs: Any) -> list[float | None]:
                try:
                    return self._looked_through(function(prompts=prompts, **kwargs), name, len(prompts))
                except Exception as error:  # of the user's function, of any kind
                    return self._failed(error, name, len(prompts))

        return answer

    def raise_problem(self) -> None:
        """Raise what the reward functions of any rank did wrong, on all ranks."""
        problem, cause, self._problem, self._cause = self._problem, self._cause, None, None
        self._replicas.raise_on_all_ranks(problem, cause)

    def _looked_through(self, answer: Iterable[Any], name: str, count: int) -> list[float | None]:
        rewards = [None if each is None else float(each) for each in answer]
        wrong = [index for index, each in enumerate(rewards) if each is not None and not math.isfinite(each)]
        if len(rewards) != count:
            said = f"{len(rewards)} rewards for {count} completions; return one for each"
        elif wrong:
            said = f"{rewards[wrong[0]]} for completion {wrong[0]} of {count}; return a finite number"
        else:
            return rewards
        self._problem = f"the reward function {name!r} returned {said}, or None where it does not apply"
        return [0.0] * count

    def _failed(self, error: Exception, name: str, count: int) -> list[float | None]:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        self._problem = f"the reward function {name!r} failed ({said}); it must return a number for each completion"
        self._cause = error
        return [0.0] * count


def rollout_of_first_rank(function: Callable[..., Any], replicas: Replicas) -> Callable[..., Any]:
    """Return a `rollout_func` that all ranks call, as a model generates on all; the first one's answer counts."""

    @functools.wraps(function)
    def roll_out(*args: Any, **kwargs: Any) -> Any:
        answer, problem, cause = None, None, None
        try:
            answer = function(*args, **kwargs)
        except Exception as error:  # of the user's function, of any kind
            said = " ".join(f"{type(error).__name__}: {error}".split())
            problem, cause = f"rollout_func failed ({said}); it must return what TRL asks of it on every rank", error
        replicas.raise_on_all_ranks(problem, cause)
        return replicas.on_first_rank(lambda: answer)

    return roll_out


class ToolsOfFirstRank:
    """Tools and environments that the first rank of a replica runs, and whose answers all of its ranks get.

    Args:
        trainer: has the accelerator by the time that a tool is called.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_running = False
        self._loop: asyncio.AbstractEventLoop | None = None  # of coroutines, which may keep connections in it

    def tool(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a tool that runs on the first rank. A coroutine is waited for, as ranks call tools in one order."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:  # called by another one, on the first rank alone
                return self._awaited(function(*args, **kwargs))
            return self._trainer.accelerator.replicas.on_first_rank(lambda: self._run(function, args, kwargs))

        return call

    def _run(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        self._is_running = True
        try:
            return self._awaited(function(*args, **kwargs))
        finally:
            self._is_running = False

    def _awaited(self, answer: Any) -> Any:
        """Return what a coroutine returns; the coroutine itself to another one, which awaits it."""
        if not inspect.iscoroutine(answer) or (self._loop is not None and self._loop.is_running()):
            return answer
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(answer)

    def factory(self, make: Any) -> Any:
        """Return a factory of environments whose methods run on the first rank; a dict of them stays one."""
        if isinstance(make, dict):
            return {name: self.factory(each) for name, each in make.items()}

        def made() -> Any:
            environment = make()
            for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction):
                if not name.startswith("_"):
                    setattr(environment, name, self.tool(getattr(environment, name)))
            return environment

        return made
