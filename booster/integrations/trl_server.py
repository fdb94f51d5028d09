"""Programs outside of TRL's trainers: servers and engines of vLLM, rewards, tools and environments.

The weights of all ranks stream to vLLM, on a server or on the ranks. All ranks of a replica are told the same.
Client, protocol and calls of the engine are TRL's own. What fails on one rank fails on all: all go on, or all end.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from booster.errors import ConfigurationError
from booster.integrations.arguments import ranks_of_replica
from booster.integrations.replicas import Replicas
from shardformer.distributed.process_groups import all_gather_json


class ServerError(RuntimeError):
    """A vLLM server or engine did not answer, or refused; raised on all ranks."""


_OF_A_REPLICA = ("connect", "get_sequence_logprobs")  # methods that each replica calls for itself
_LONGEST = 400  # characters of what vLLM said


class _ClientOfFirstRank:
    """TRL's client, which `connect` makes on the first rank of each replica: all ranks call it, and get its answer."""

    def __init__(self, url: str, connect: Callable[[], Any], replicas: Replicas) -> None:
        self._server, self._replicas = f"the vLLM server at {url}", replicas
        self.client: Any = None

        def connected() -> str:
            self.client = connect()
            return self.client.model

        self._server += f", which serves {self._call('connect', connected)!r},"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(name, lambda: getattr(self.client, name)(*args, **kwargs))

    def init_communicator(self, **options: Any) -> None:
        """Join the server's group for weights."""
        info = self._call("get_server_info", lambda: self.client.get_server_info())
        self.get_server_info = lambda: info  # TRL asks for it on one rank alone
        self._call("init_communicator", lambda: self.client.init_communicator(**options))

    def update_named_params(self, metadata: list[Any], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send weights, which all ranks gather."""
        send = sending(lambda stream: self.client.update_named_params(metadata, stream), weights)
        self._call("update_named_params", send)

    def _call(self, name: str, work: Callable[[], Any]) -> Any:
        """Return on all ranks what `work`, the method `name` of the client, returns on the first one."""
        result = problem = cause = None
        try:
            result = self._replicas.on_first_rank(work, of_job=name not in _OF_A_REPLICA)
        except RuntimeError as error:
            problem, cause = f"{self._server} failed in {name}: {said(error)}; {_AGAIN}", error
        self._replicas.raise_on_all_ranks(problem, cause, ServerError)
        return result


def merged_weights(trainer: Any, to_rank: int | None = 0) -> Iterator[tuple[str, Tensor]]:
    """Return what `save_model` would write, with adapters added to their base, on one rank or on all (None)."""
    merges = hasattr(trainer.model.unwrap(), "peft_config")
    return trainer.accelerator.booster.weights(trainer.model, to_rank=to_rank, merge_adapters=merges)


def sending(send: Callable[[Iterator[Any]], None], weights: Iterator[Any]) -> Callable[[], None]:
    """Return what sends a stream on the first rank, after the other ranks have gathered it."""

    def work() -> None:
        try:
            send(weights)
        finally:
            deque(weights, 0)  # the other ranks gather it all

    if dist.get_rank() > 0:
        with suppress(ConfigurationError):  # of all ranks: the first one says so
            deque(weights, 0)
    return work


def announced(weights: Iterator[tuple[str, Tensor]]) -> list[tuple[str, str, list[int]]]:
    """Return what vLLM is told of a stream of weights before it comes: names, dtypes and shapes."""
    return [(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in weights]


_AGAIN = "start one with this model (vllm serve), and go on from the newest checkpoint"


def said(error: Exception) -> str:
    """Return what vLLM said, in one line."""
    return " ".join(str(error).split())[:_LONGEST].rstrip(".")


class _OnEachRank:
    """An accelerator whose ranks all take the main process's way in TRL's code; `values` stand before its own."""

    def __init__(self, accelerator: Any, **values: Any) -> None:
        self.is_main_process, self._accelerator = True, accelerator
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def served(trainer: Any) -> dict[str, Callable[..., Any]]:
    """Return what takes the place of TRL's classes, by their names, for a trainer whose model will be boosted."""
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    def client(base_url: str, **options: Any) -> _ClientOfFirstRank:
        connect = partial(VLLMClient, base_url=base_url, **options)
        return _ClientOfFirstRank(base_url, connect, trainer.accelerator.replicas)

    generation = type("BoostedGeneration", (_BoostedGeneration, VLLMGeneration), {"_trainer": trainer})
    return {"VLLMClient": client, "VLLMGeneration": generation}


class _BoostedGeneration:
    """What vLLM needs of a boosted model, before TRL's `VLLMGeneration`; raises ServerError on all ranks."""

    _trainer: Any

    def __init__(self, accelerator: Any, **options: Any) -> None:
        super().__init__(accelerator=_OnEachRank(accelerator), **options)

    def _init_vllm(self) -> None:
        """Connect to the server, or start this rank's engine; an engine of several ranks has them one by one."""
        if self.mode == "server":
            return super()._init_vllm()
        accelerator, ranks = self.accelerator, ranks_of_replica(self._trainer.plugin)
        self._firsts = ranks[:: self.tensor_parallel_size]  # ranks of the engines of this replica
        self._engine = ranks.index(dist.get_rank()) // self.tensor_parallel_size
        # A process of vLLM is a rank. TRL would join the prompts of an engine's ranks, which have the same.
        place = {"num_processes": dist.get_world_size(), "process_index": dist.get_rank()}
        self.accelerator = _OnEachRank(accelerator, wait_for_everyone=lambda: None, **place)
        with self._on_all_ranks("LLM"):
            super()._init_vllm()
        self.accelerator, self.tensor_parallel_size = accelerator, 1

    def sync_weights(self) -> None:
        """Give vLLM what `save_model` would write, merged; raises on all ranks if it fails."""
        if self.mode == "server":
            return super().sync_weights()
        self._stream = self._weights(None)
        with self._on_all_ranks("load_weights"):
            try:
                super().sync_weights()
            finally:
                deque(self._stream, 0)

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights(0) if self.mode == "server" else self._stream

    def _weights(self, to_rank: int | None) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self._trainer, to_rank)

    def generate(self, prompts: list[Any], images: list[Any] | None, *args: Any, **options: Any) -> tuple[Any, ...]:
        """Generate as TRL does; a replica's engines share its prompts, and all of its ranks get all completions."""
        if self.mode == "server":
            return super().generate(prompts, images, *args, **options)
        size, found = -(-len(prompts) // len(self._firsts)), None
        share = slice(self._engine * size, (self._engine + 1) * size)
        with self._on_all_ranks("generate"):
            found = super().generate(prompts[share], images and images[share], *args, **options)
        of_all = all_gather_json(found)
        joined = zip(*(of_all[rank] for rank in self._firsts), strict=True)
        return tuple(None if parts[0] is None else [row for part in parts for row in part] for parts in joined)

    @contextmanager
    def _on_all_ranks(self, name: str) -> Iterator[None]:
        """Raise on all ranks what the engine of one raises in `name`."""
        problem = cause = None
        try:
            yield
        except ServerError:  # raised on all of them already
            raise
        except Exception as error:  # of vLLM, of any kind
            problem, cause = f"the vLLM engine of rank {dist.get_rank()} failed in {name}: {said(error)}", error
            problem += "; look at its log, or use vllm_mode='server'"
        self._trainer.accelerator.replicas.raise_on_all_ranks(problem, cause, ServerError)


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
