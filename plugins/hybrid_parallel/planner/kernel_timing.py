"""Time the parts of a model on one device of this machine, with the other tensor-parallel ranks simulated."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.inspect.shard_report import fake_rank
from plugins.hybrid_parallel.planner.op_recorder import Part
from plugins.hybrid_parallel.planner.proxy_model import build_proxy_model, training_loss, watch_layers
from plugins.hybrid_parallel.planner.synthetic_batch import batch_of
from plugins.hybrid_parallel.step.passes import Pass, PassKind, in_pass


@dataclass(frozen=True)
class Case:
    """Measured case: a way of sharding layers, and a micro-batch size."""

    tp_size: int
    sequence: bool
    rows: int


@dataclass(frozen=True)
class PartTimes:
    """Seconds that one part takes for one micro-batch."""

    forward: float
    backward: float


@dataclass(frozen=True)
class MeasuredParts:
    """Measured times for one micro-batch size."""

    parts: Mapping[Part, PartTimes]  # part of the pruned model -> its times
    optimizer: float  # seconds after the passes (mainly the update) per trained element


class PartTimer:
    """Listener that adds up the time of each part; the hooks of `watch_layers` call it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, {}
        self.backwards, self.part = False, ("gap", 0)
        self._since = 0.0

    def begin(self) -> None:
        """Start a forward pass."""
        self.backwards, self.part = False, ("gap", 0)
        self._since = self.now()

    def enter(self, part: Part) -> None:
        """Book the time since the last call on the previous part, and switch to `part`."""
        now = self.now()
        key = (self.part, self.backwards)
        self.seconds[key] = self.seconds.get(key, 0.0) + now - self._since
        self.part, self._since = part, now

    def turn(self) -> None:
        """Start the backward pass."""
        self.enter(self.part)
        self.backwards = True

    def give(self, hidden: Tensor) -> None:
        """Ignore the hidden state: timing does not need sizes."""

    def now(self) -> float:
        """Return the current time in seconds, after all launched kernels are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def measure_parts(
    build: Callable[[], nn.Module],
    config: HybridParallelConfig,
    device: torch.device,
    rows: int,
    length: int,
    repeats: int = 5,
    pause: Callable[[], None] = lambda: None,
) -> MeasuredParts:
    """Train the pruned model of a model on one device for a few steps, and time its parts.

    Args:
        build: builds the whole model.
        config: only its tensor parallelism is simulated, in its precision; the prediction accounts for the rest.
        device: device of this machine.
        rows: samples of a micro-batch.
        length: tokens of a sample.
        repeats: number of timed steps, after one warm-up step; the median is taken.
        pause: called before every step, so that several processes can synchronize.
    """
    tp_size, sequence = config.parallel.tp_size, config.parallel.enable_sequence_parallelism
    config = HybridParallelConfig.from_options(
        tp_size=tp_size, enable_sequence_parallelism=sequence, precision=config.mixed_precision.precision
    )
    with fake_rank(0, tp_size):
        model, lists, wrapped = build_proxy_model(build, config, optimizer=torch.optim.AdamW, device=device)
        (optimizer,) = wrapped.optimizers
        batch = batch_of(model, rows, length, str(device))
        if "input_ids" in batch:  # random tokens, so that they are routed to different experts
            batch["input_ids"] = torch.randint_like(batch["input_ids"], model.config.get_text_config().vocab_size)
        timer = PartTimer(device)
        watch_layers(model, lists, timer)
        found: list[dict[tuple[Part, bool], float]] = []
        updates = []
        for _ in range(repeats + 1):
            pause()
            timer.seconds = {}
            timer.begin()
            with in_pass(wrapped, Pass(PassKind.STEP)):
                loss = training_loss(wrapped, batch)
                timer.turn()
                loss.backward()
                timer.enter(("gap", 0))
            began = timer.now()
            optimizer.reducer.finish()
            optimizer.step()
            optimizer.zero_grad()
            updates.append(timer.now() - began)
            found.append(timer.seconds)
    elements = sum(bucket.flat.numel() for bucket in optimizer.buckets)
    median = {key: statistics.median(each.get(key, 0.0) for each in found[1:]) for key in found[-1]}
    parts = {part: PartTimes(median.get((part, False), 0.0), median.get((part, True), 0.0)) for part, _ in median}
    return MeasuredParts(parts, statistics.median(updates[1:]) / elements)
