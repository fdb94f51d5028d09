"""A small training job in which a rank dies, stops, raises or skips something: `job.py FAULT PLACE RANK LAYOUT`.

FAULT is a key of `FAULTS`, PLACE one of `PLACES`, LAYOUT options of HybridParallelPlugin as JSON; RANK -1 is all ranks.
Where torchrun starts the ranks again, nothing happens to them. Pauses are what must not be taken for a fault.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import Booster, launch_from_torch
from booster.failure import peers
from booster.failure.hooks import _Process
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.policies.base import ModulePolicyDescription, Policy
from shardformer.policies.rules import ShardingRules
from shardformer.stages.placeholders import Received
from shardformer.stages.stage import StageLayout

# Place -> the operation, and in which call of it the fault strikes.
PLACES = {
    "boost": ("booster.boost", 1),
    "execute_pipeline": ("booster.execute_pipeline", 3),
    "step": ("optimizer.step", 3),
    "save": ("booster.save_checkpoint", 2),
    "loader": ("", 3),
    "metric": ("", 3),  # a sum of the script's own that nobody waits for, so that the wrong ones meet
}
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "gather", "scatter")
NUM_STEPS = 30
PAUSE_S = float(os.environ.get("PAUSE_S", "30"))


class Skip(Exception):
    """Raised to where a collective is skipped."""


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raising() -> None:
    raise IndexError("sample 7 is missing")


def skipping() -> None:
    raise Skip


def sleeping() -> None:
    time.sleep(PAUSE_S)


def holding_the_gil() -> None:
    """As long C code that does not let other threads run."""
    ctypes.PyDLL(None).usleep(int(PAUSE_S * 1e6))


def computing() -> None:
    until = time.monotonic() + PAUSE_S
    while time.monotonic() < until:
        torch.rand(200, 200) @ torch.rand(200, 200)


def nothing() -> None:
    """What the campaign does to the job from outside: the job reports, and goes on for long."""


FAULTS: dict[str, Callable[[], None]] = {
    "killed": killed,
    "stopped": stopped,
    "raising": raising,
    "skipping": skipping,
    "sleeping": sleeping,
    "holding": holding_the_gil,
    "computing": computing,
    "nothing": nothing,
}


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Tokens in, a number for each token out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(16, 1)

    def forward(self, ids: Tensor, wanted: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return {"found": self.last(x)}


class ModelPolicy(Policy):
    """Tensor and pipeline parallelism for `Model`."""

    stages = StageLayout(layers="blocks", first={"tokens": Received}, last=("last",))

    def head_counts(self) -> dict[str, int]:
        return {}

    def module_policy(self) -> dict[str, ModulePolicyDescription]:
        rules = ShardingRules(self.shard_config)
        return {"Block": ModulePolicyDescription(sub_module_replacement=[*rules.column("up"), *rules.row("down")])}


class Striker:
    """Lets the fault happen, once, at a collective of the chosen operation's chosen call.

    Args:
        fault: what happens.
        operation, call: when.
    """

    def __init__(self, fault: Callable[[], None], operation: str, call: int) -> None:
        self.fault, self.operation, self.call, self.is_armed = fault, operation, call, True
        for name in COLLECTIVES:
            setattr(dist, name, self._striking(getattr(dist, name)))

    def strike(self) -> None:
        """Now."""
        self.is_armed = False
        report(f"strikes at {time.time()}")
        self.fault()

    def _striking(self, collective: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            operations = _Process.operations
            if self.is_armed and operations and self.operation in operations.calls and self._is_time(operations):
                try:
                    self.strike()
                except Skip:
                    return None
            return collective(*args, **kwargs)

        return call

    def _is_time(self, operations: Any) -> bool:
        inside = any(name == self.operation for name in operations._inside)
        return inside and operations.calls[self.operation] == self.call


def batches(striker: Striker | None, at: int) -> Iterator[dict[str, Tensor]]:
    """One for each step; the fault of the loader strikes when the one for step `at` is asked for."""
    for step in range(NUM_STEPS):
        if striker is not None and step == at and striker.fault is not skipping:
            striker.strike()
        yield {"ids": torch.randint(64, (8, 5)), "wanted": torch.rand(8, 5, 1)}


def metric(group: dist.ProcessGroup, striker: Striker | None) -> None:
    """Sum something over the ranks; the fault may strike instead, in which case this rank leaves the sum out."""
    if striker is None:
        dist.all_reduce(torch.zeros(()), group=group, async_op=True)
        return
    try:
        striker.strike()
    except Skip:
        return


def criterion(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return (outputs["found"] - batch["wanted"]).square().mean()


def report(line: str) -> None:
    """One write, so that lines of two ranks cannot mix."""
    os.write(1, f"rank {os.environ.get('RANK')}: {line}\n".encode())


def main() -> None:
    fault, place, rank = FAULTS[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    options = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {"tp_size": 2}
    if "MACHINES" in os.environ:  # every rank takes itself for alone on its machine
        peers.machine = lambda: f"machine{os.environ['RANK']}"
    launch_from_torch(
        timeout_s=float(os.environ.get("TIMEOUT_S", "1800")), heartbeat_s=float(os.environ.get("HEARTBEAT_S", "60"))
    )
    operation, call = PLACES[place]
    is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    striker = Striker(fault, operation, call) if rank in (dist.get_rank(), -1) and is_first_attempt else None
    skips_call = fault is skipping and place == "save" and striker is not None
    if skips_call:
        striker.is_armed = False
    torch.manual_seed(1)
    model = Model()
    plugin = HybridParallelPlugin(**options, max_norm=1.0, custom_policy=ModelPolicy())
    booster = Booster(plugin=plugin)
    model, optimizer, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion)
    directory = Path(tempfile.gettempdir()) / f"fault-job-{os.environ.get('MASTER_PORT')}"
    own_group = dist.new_group()
    data = batches(striker if place == "loader" else None, call)
    has_less = fault is skipping and place == "loader" and striker is not None
    for step in range(NUM_STEPS - has_less):
        booster.execute_pipeline(data, model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if place == "metric":
            metric(own_group, striker if step == call else None)
        if step % 4 == 1 and place == "save":
            if skips_call and step > 4:
                report(f"strikes at {time.time()}")  # as in `if rank == 0: booster.save_checkpoint(...)`
                skips_call = False
                continue
            booster.save_checkpoint(str(directory), model=model, optimizer=optimizer)
        if "STEP_S" in os.environ:
            time.sleep(float(os.environ["STEP_S"]))
    report(f"strikes at {time.time()}" if has_less else "ends well")


if __name__ == "__main__":
    main()
