"""A healthy job beside what the failure monitor must not take for a fault: `healthy.py KIND STEPS LAYOUT`.

KIND is a key of `KINDS`, LAYOUT options of the plugin as JSON. Collectives of other threads may begin up to 5 s late,
and so may steps. Counts are compared at every look of the monitor, five times a second, not once in 2 s.
"""

from __future__ import annotations

import contextlib
import cProfile
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from booster import Booster, launch_from_torch
from booster.failure import desync, diagnosis
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.campaigns.faults.job import COLLECTIVES, Model, ModelPolicy, criterion, report

LONGEST_DELAY_S = 5.0
_CHANCE_IN_STEPS, _CHANCE_IN_THREADS = 0.001, 0.05
_EVERY = 50  # steps between two saves, snapshots or evaluations
_BATCHES = 16


class Job:
    """What trains.

    Attributes:
        booster, model, optimizer: of this rank.
        folder: of all ranks.
        waits: draws delays; another sequence on each rank.
    """

    def __init__(self, layout: dict[str, int]) -> None:
        self.waits = random.Random(dist.get_rank())
        torch.manual_seed(1)
        plain = Model()
        self.booster = Booster(plugin=HybridParallelPlugin(**layout, max_norm=1.0, custom_policy=ModelPolicy()))
        self.model, self.optimizer, _ = self.booster.boost(plain, torch.optim.AdamW(plain.parameters()), criterion)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        self.folder = Path(folder[0])
        self.batches = [{"ids": torch.randint(64, (4, 5)), "wanted": torch.rand(4, 5, 1)} for _ in range(_BATCHES)]

    @property
    def state(self) -> dict[str, Any]:
        """Arguments of `save_checkpoint` and `snapshot`."""
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, number: int) -> None:
        """Train one."""
        self.booster.execute_pipeline(iter([self.batches[number % _BATCHES]]), self.model, optimizer=self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def delay(self, chance: float) -> None:
        """Sleep, sometimes."""
        if self.waits.random() < chance:
            time.sleep(self.waits.uniform(0, LONGEST_DELAY_S))


AfterStep = Callable[[int], Any]
Kind = Callable[[Job], "contextlib.AbstractContextManager[AfterStep]"]


@contextlib.contextmanager
def asynchronous_saves(job: Job) -> Iterator[AfterStep]:
    def after(step: int) -> None:
        if step % _EVERY == 0:
            job.booster.save_checkpoint(str(job.folder / str(step)), **job.state, asynchronous=True, keep_last=2)

    yield after
    job.booster.finish_saving()


@contextlib.contextmanager
def snapshots(job: Job) -> Iterator[AfterStep]:
    yield lambda step: step % 5 or job.booster.snapshot(str(job.folder), **job.state)


@contextlib.contextmanager
def threads_with_groups(job: Job) -> Iterator[AfterStep]:
    """One thread for collectives and one for messages; the main thread sums on a third group, and never waits."""
    groups = [dist.new_group(backend="gloo") for _ in range(3)]
    other = 1 - dist.get_rank()

    def exchange_messages() -> None:
        work = dist.isend(torch.ones(1), other, group=groups[1])
        dist.recv(torch.empty(1), other, group=groups[1])
        work.wait()

    with _repeated(lambda: dist.all_reduce(torch.ones(1), group=groups[0])), _repeated(exchange_messages):
        yield lambda step: dist.all_reduce(torch.ones(()), group=groups[2], async_op=True)


@contextlib.contextmanager
def awaited_threads(job: Job) -> Iterator[AfterStep]:
    """One rank's main thread waits for the other's helper, which takes its time while the other waits for a step."""
    group = dist.new_group(backend="gloo")
    helps = threading.Event()

    def help_others() -> None:
        while True:
            helps.wait()
            helps.clear()
            if ended:
                return
            time.sleep(LONGEST_DELAY_S)
            dist.all_reduce(torch.ones(1), group=group)

    def after(step: int) -> None:
        if step % (_EVERY * 20) == 0:
            helps.set() if dist.get_rank() else dist.all_reduce(torch.ones(1), group=group)

    ended: list[bool] = []
    helper = threading.Thread(target=help_others)
    helper.start()
    yield after
    dist.barrier()
    ended.append(True)
    helps.set()
    helper.join()


@contextlib.contextmanager
def saves_of_torch(job: Job) -> Iterator[AfterStep]:
    """`async_save` of torch.distributed.checkpoint, in its thread."""
    group = dist.new_group(backend="gloo")
    saves: list[Any] = []

    def after(step: int) -> None:
        if step % (_EVERY * 10) == 0:
            for save in saves:
                save.result()
            state = {f"rank{dist.get_rank()}.{name}": each for name, each in job.model.state_dict().items()}
            saves[:] = [dcp.async_save(state, checkpoint_id=job.folder / f"dcp{step}", process_group=group)]

    yield after
    for save in saves:
        save.result()


@contextlib.contextmanager
def profilers(job: Job) -> Iterator[AfterStep]:
    """Torch's on one rank, Python's on the other."""
    if dist.get_rank() == 0:
        schedule = torch.profiler.schedule(wait=_EVERY, warmup=1, active=3)
        with torch.profiler.profile(schedule=schedule, record_shapes=True, with_stack=True) as profiler:
            yield lambda step: profiler.step()
    else:
        with cProfile.Profile():
            yield lambda step: None


@contextlib.contextmanager
def evaluation_thread(job: Job) -> Iterator[AfterStep]:
    """Evaluates a model of its own with a sum over the ranks, and the main thread evaluates the trained one."""
    group = dist.new_group(backend="gloo")
    evaluated = Model().eval()

    @torch.no_grad()
    def evaluate() -> None:
        batch = job.waits.choice(job.batches)
        dist.all_reduce(criterion(evaluated(**batch), batch), group=group)

    def after(step: int) -> None:
        if step % _EVERY == 0:
            job.model.eval()
            with torch.no_grad():
                job.booster.execute_pipeline(iter([job.batches[0]]), job.model)
            job.model.train()
            if dist.get_rank() == 0:
                job.delay(_CHANCE_IN_THREADS)  # writes what it found

    with _repeated(evaluate):
        yield after


@contextlib.contextmanager
def everything(job: Job) -> Iterator[AfterStep]:
    """All of them at once."""
    with contextlib.ExitStack() as stack:
        kinds = [kind for kind in KINDS.values() if kind is not everything]
        after = [stack.enter_context(kind(job)) for kind in kinds]
        yield lambda step: [each(step) for each in after]


KINDS: dict[str, Kind] = {
    "asynchronous saves": asynchronous_saves,
    "snapshots": snapshots,
    "threads with groups": threads_with_groups,
    "awaited threads": awaited_threads,
    "torch's async_save": saves_of_torch,
    "profilers": profilers,
    "an evaluation thread": evaluation_thread,
    "everything": everything,
}


@contextlib.contextmanager
def _repeated(work: Callable[[], Any]) -> Iterator[None]:
    """Do `work` again and again in a thread, as often on every rank."""
    times = 0
    ends_at: list[int] = []

    def repeat() -> None:
        nonlocal times
        while not ends_at or times < ends_at[0]:
            work()
            times += 1
            time.sleep(0.01)

    thread = threading.Thread(target=repeat)
    thread.start()
    yield
    last = torch.tensor(times + 2)  # of a thread that may be one ahead
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    ends_at.append(int(last))
    thread.join()


def _delay_threads(job: Job) -> None:
    """Let collectives of other threads than the main one begin late, sometimes."""
    for name in COLLECTIVES:
        collective = getattr(dist, name)

        def call(*args: Any, collective: Callable = collective, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                job.delay(_CHANCE_IN_THREADS)
            return collective(*args, **kwargs)

        setattr(dist, name, call)


def _count_comparisons() -> list[int]:
    """Have counts compared at each look; return where their number is kept."""
    desync._LOOK_S = desync._PROBE_S = 0.0
    number, compare = [0], diagnosis.compare_counts

    def counted(*args: Any) -> Any:
        number[0] += 1
        return compare(*args)

    diagnosis.compare_counts = counted
    return number


def main() -> None:
    kind, steps, layout = KINDS[sys.argv[1]], int(sys.argv[2]), json.loads(sys.argv[3])
    launch_from_torch()
    comparisons = _count_comparisons()
    job = Job(layout)
    _delay_threads(job)
    began = time.monotonic()
    with kind(job) as after:
        for step in range(steps):
            job.step(step)
            after(step)
            job.delay(_CHANCE_IN_STEPS)
    report(f"ends well after {time.monotonic() - began:.0f} s and {comparisons[0]} comparisons")


if __name__ == "__main__":
    main()
