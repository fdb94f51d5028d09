"""The oracle: plays a script by plain transformers and torch, in a process that never imports this library."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zoo_tests.campaigns.fuzz.case import Action, Case
from zoo_tests.campaigns.fuzz.script import Freezes, Player, Records, Side, quietly
from zoo_tests.campaigns.fuzz.setup import build_model, build_optimizer, build_scheduler, fingerprint, head_of
from zoo_tests.harness.case import LOSS_SCALE
from zoo_tests.harness.reference import inputs_of, loss_of
from zoo_tests.zoo import Batch

_SIXTEEN_BIT = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LIBRARY = ("booster", "shardformer", "plugins")
_REPOSITORY = Path(__file__).parents[3]
_NOISE = 1e-11  # of the largest gradient


class Plain(Side):
    """A model, or under 16 bit a 16-bit copy that works and the fp32 original that the optimizer steps.

    Attributes:
        largest: name -> the largest absolute values of its gradients so far.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.head = case, head_of(case)
        self.model = self.master = build_model(case)
        if case.precision in _SIXTEEN_BIT:
            self.model = build_model(case)
            for param in self.model.parameters():
                param.data = param.data.to(_SIXTEEN_BIT[case.precision])  # buffers keep their precision
        self.scale = LOSS_SCALE if case.precision == "fp16" else 1.0
        self.optimizer = build_optimizer(case, self.master)
        self.scheduler = build_scheduler(case, self.optimizer)
        self.first_weights = copies(self.master)
        self.largest: dict[str, Tensor] = {}

    @property
    def modules(self) -> list[nn.Module]:
        return list({id(each): each for each in (self.model, self.master)}.values())

    def backward(self, batch: Batch, way: str, parts: int, is_last: bool) -> float:
        loss = loss_of(self.model, self.head, self._cast(batch))
        (loss * self.scale / (parts if way == "ordinary" else 1)).backward()
        if self.model is not self.master:
            for master, param in zip(self.master.parameters(), self.model.parameters(), strict=True):
                if param.grad is not None:
                    gradient = param.grad.float() / self.scale
                    master.grad = gradient if master.grad is None else master.grad + gradient
                param.grad = None
        return loss.item()

    def step(self) -> float | None:
        for name, param in self.master.named_parameters():
            if param.grad is not None:
                size = param.grad.abs()
                self.largest[name] = torch.maximum(self.largest.get(name, size), size)
        trained = [param for group in self.optimizer.param_groups for param in group["params"]]
        max_norm = self.case.plugin.get("max_norm")
        norm = torch.nn.utils.clip_grad_norm_(trained, float("inf") if max_norm is None else max_norm)
        self.optimizer.step()
        self._publish()
        return norm.item()

    def evaluate(self, batch: Batch, way: str) -> tuple[float, Tensor]:
        batch = self._cast(batch)
        with torch.no_grad():
            outputs = self.model(**inputs_of(self.head, batch))
            return loss_of(self.model, self.head, batch).item(), fingerprint(outputs, batch, 0)

    def forward(self, batch: Batch, way: str) -> float:
        return loss_of(self.model, self.head, self._cast(batch)).item()

    def generate(self, prompt: Batch, **options: Any) -> list[int]:
        with torch.no_grad():
            return self.model.generate(**prompt, **options).flatten().tolist()

    def reload(self, action: Action, freezes: Freezes) -> None:
        """Nothing is lost by it."""

    def files(self) -> None:
        """Nothing is lost by it."""

    def fail(self, batch: Batch) -> bool:
        return True

    def state_dicts(self) -> None:
        super().state_dicts()
        self._publish()

    def noisy(self) -> list[str]:
        """Parameters with gradients that are rounding of zeros, which Adafactor blows up to whole steps."""
        threshold = _NOISE * max((value.max().item() for value in self.largest.values()), default=0.0)
        return [name for name, value in self.largest.items() if ((value > 0) & (value <= threshold)).any()]

    def _publish(self) -> None:
        with torch.no_grad():
            for master, param in zip(self.master.parameters(), self.model.parameters(), strict=True):
                if param is not master:
                    param.copy_(master)

    def _cast(self, batch: Batch) -> Batch:
        dtype = _SIXTEEN_BIT.get(self.case.precision)
        if dtype is None:
            return batch
        return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}


def play_plainly(case: Case, directory: Path) -> tuple[Records, list[str]]:
    """Play the case; leaves the first and the last weights in `directory`."""
    side = Plain(case)
    records = Player(case, side).play()
    save_file(side.first_weights, directory / "first.safetensors")
    save_file(copies(side.master), directory / "plain.safetensors")
    return records, side.noisy()


class PlainWorker:
    """The process of the oracle, which plays case after case.

    A Python of its own: a process forked from one that has imported the library would have imported it, too.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def submit(self, case: Case, directory: Path) -> None:
        """Begin to play a case."""
        if self._process is None:
            self._connection, theirs = Pipe()
            command = [sys.executable, "-m", "zoo_tests.campaigns.fuzz.plain", str(theirs.fileno())]
            self._process = subprocess.Popen(command, cwd=_REPOSITORY, pass_fds=[theirs.fileno()])
            theirs.close()
        self._connection.send((case.to_json(), str(directory)))

    def answer(self, timeout_s: float) -> tuple[str | None, Any]:
        """(error, None), or (None, records and noisy parameters) of the case that was submitted."""
        if self._connection.poll(timeout_s):
            with contextlib.suppress(EOFError):
                return self._connection.recv()
        self.stop()
        return f"no answer in {timeout_s:g} s", None

    def stop(self) -> None:
        """End the process; the next case starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            self._process = None


def serve(connection: Connection) -> None:
    """Play the cases that come, until nobody is at the other end."""
    torch.set_num_threads(1)
    while True:
        try:
            text, directory = connection.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            with quietly():
                answer = (None, play_plainly(Case.from_json(text), Path(directory)))
        except Exception:
            answer = (traceback.format_exc(), None)
        strangers = [name for name in sys.modules if name.partition(".")[0] in _LIBRARY]
        connection.send((f"the oracle has imported {strangers[0]}", None) if strangers else answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
