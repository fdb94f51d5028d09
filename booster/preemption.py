"""A notice that machines will be taken away: a signal to some ranks, acted on by all of them in the same step."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist

from shardformer.distributed.process_groups import world_group


class Preemption:
    """Catch the signals by which an engine says that the job will be ended soon.

        preemption = Preemption()               # before launch_from_torch()
        for batch in dataloader:
            ...
            if preemption.is_announced():
                booster.save_checkpoint(...)
                break

    Args:
        signals: the signals; SLURM sends the one of `sbatch --signal`, Kubernetes SIGTERM, which torchrun passes on.

    Raises:
        ValueError: this is not the main thread, the only one in which Python allows handlers of signals.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self._received = False
        for number in signals or (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def is_announced(self) -> bool:
        """Return whether any rank has received a signal, the same on all ranks, which must all call this."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._received
        found = torch.tensor(int(self._received))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=world_group())
        return bool(found)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = True
