"""Plays a case's script on one of the two sides. What is recorded on both has to be the same.

Actions, by what they "do":
    step: `parts` batches from number `data` on, of `rows` samples, the rows `ignored` without labels, by
        `execute_pipeline` or in the "ordinary" `way`; then an optimizer step. `zero` says whose gradients are cleared.
    evaluate: loss and outputs of a batch, without gradients.
    forward: a training batch forward, and never backward.
    generate: tokens after a prompt.
    reload: a checkpoint into other objects, with other options of the plugin.
    files: model, optimizer and scheduler written and read one by one.
    state_dicts: of all objects, each loaded into the object that it came from.
    freeze, unfreeze: the parameters with a `part` in their names.
    scale: the parameters with a `part` in their names, in place, by a `factor`.
    lr: the learning rates of all groups, by a `factor`.
    hook: from now on the output of the modules that `name` ends is multiplied by `factor`; a second time it is removed.
    exception: a criterion raises at its first call, and the script goes on.
"""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from zoo_tests.campaigns.fuzz.case import Action, Case
from zoo_tests.campaigns.fuzz.setup import batch_of, freeze
from zoo_tests.zoo import Batch

Records = list[tuple[str, Any]]  # what was seen: a number, (a number, its scale), or tokens
Freezes = list[tuple[str, bool]]  # part of names, and whether those parameters were frozen or unfrozen, in order
PARTS_APART = 40  # in the numbers of batches


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings of a few hundred models that nobody reads."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class Criterion(Exception):
    """What a criterion of the script raises."""


class Side(ABC):
    """The objects of a training script, of plain torch or of this library."""

    model: nn.Module
    optimizer: Any
    scheduler: Any

    @property
    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """The modules that hold parameters, for what a script does to them by hand."""

    def whole_parameters(self) -> AbstractContextManager[None]:
        """For what a script does to values by hand."""
        return nullcontext()

    @abstractmethod
    def backward(self, batch: Batch, way: str, parts: int, is_last: bool) -> float:
        """Gradients of one of `parts` batches of a step; its loss."""

    @abstractmethod
    def step(self) -> float | None:
        """Clip and step; the norm of all gradients."""

    @abstractmethod
    def evaluate(self, batch: Batch, way: str) -> tuple[float, Tensor]:
        """Loss, and the fingerprint of the outputs."""

    @abstractmethod
    def forward(self, batch: Batch, way: str) -> float:
        """The loss of a batch whose gradients nobody wants."""

    @abstractmethod
    def generate(self, prompt: Batch, **options: Any) -> list[int]:
        """All tokens."""

    @abstractmethod
    def reload(self, action: Action, freezes: Freezes) -> None:
        """Save everything, make new objects, load everything; `freezes` are repeated on the new model."""

    @abstractmethod
    def files(self) -> None:
        """Write and read each object."""

    @abstractmethod
    def fail(self, batch: Batch) -> bool:
        """Run a criterion that raises; whether it was heard of."""

    def state_dicts(self) -> None:
        """Load what was just read."""
        self.model.load_state_dict(self.model.state_dict())
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        if self.scheduler is not None:
            self.scheduler.load_state_dict(self.scheduler.state_dict())


class Player:
    """Plays the script of a case.

    Args:
        case: what is played.
        side: what it is played on.
    """

    def __init__(self, case: Case, side: Side) -> None:
        self.case, self.side = case, side
        self.records: Records = []
        self._hooks: dict[tuple[str, float], list[Any]] = {}
        self._freezes: Freezes = []

    def play(self) -> Records:
        """Play all actions; what was recorded."""
        for number, action in enumerate(self.case.script):
            for what, value in getattr(self, f"_{action['do']}")(action):
                self.records.append((f"{number} {action['do']}: {what}", value))
        return self.records

    def _batch(self, action: Action, part: int = 0) -> Batch:
        ignored = action.get("ignored")
        return batch_of(self.case, action["data"] + PARTS_APART * part, action["rows"], ignored and tuple(ignored))

    def _step(self, action: Action) -> Records:
        parts, records = action.get("parts", 1), []
        for part in range(parts):
            batch, way = self._batch(action, part), action.get("way", "pipeline")
            records.append((f"loss {part}", self.side.backward(batch, way, parts, part == parts - 1)))
        records.append(("gradient norm", self.side.step()))
        if self.side.scheduler is not None:
            self.side.scheduler.step()
        (self.side.model if action.get("zero") == "model" else self.side.optimizer).zero_grad()
        return records

    def _evaluate(self, action: Action) -> Records:
        self.side.model.eval()
        loss, outputs = self.side.evaluate(self._batch(action), action.get("way", "pipeline"))
        self.side.model.train()
        return [("loss", loss), ("outputs", tuple(outputs.tolist()))]

    def _forward(self, action: Action) -> Records:
        return [("loss", self.side.forward(self._batch(action), action.get("way", "pipeline")))]

    def _generate(self, action: Action) -> Records:
        batch = batch_of(self.case, action["data"], action["rows"])
        prompt = {key: batch[key] for key in ("input_ids", "attention_mask") if key in batch}
        self.side.model.eval()
        tokens = self.side.generate(
            prompt, max_new_tokens=4, min_new_tokens=4, pad_token_id=0, do_sample=False, num_beams=action["beams"]
        )
        self.side.model.train()
        return [("tokens", tokens)]

    def _reload(self, action: Action) -> Records:
        self.side.reload(action, self._freezes)
        before, self._hooks = self._hooks, {}
        for handle in (each for handles in before.values() for each in handles):
            handle.remove()  # the plain model is still the same
        for name, factor in before:
            self._hook({"name": name, "factor": factor})
        return []

    def _files(self, action: Action) -> Records:
        self.side.files()
        return []

    def _state_dicts(self, action: Action) -> Records:
        self.side.state_dicts()
        return []

    def _freeze(self, action: Action) -> Records:
        self._freezes.append((action["part"], action["do"] == "freeze"))
        for module in self.side.modules:
            freeze(module, [action["part"]], action["do"] == "freeze")
        return []

    _unfreeze = _freeze

    def _scale(self, action: Action) -> Records:
        with self.side.whole_parameters():
            for module in self.side.modules:
                for name, param in module.named_parameters():
                    if action["part"] in name:
                        param.data.mul_(action["factor"])
        return []

    def _lr(self, action: Action) -> Records:
        for group in self.side.optimizer.param_groups:
            group["lr"] *= action["factor"]
        return []

    def _hook(self, action: Action) -> Records:
        key = action["name"], action["factor"]
        if key in self._hooks:
            for handle in self._hooks.pop(key):
                handle.remove()
            return []

        def scaled(module: nn.Module, args: Any, output: Any) -> Any:
            return output * action["factor"] if isinstance(output, Tensor) else output

        chosen = [
            each for module in self.side.modules for name, each in module.named_modules() if name.endswith(key[0])
        ]
        self._hooks[key] = [module.register_forward_hook(scaled) for module in chosen]
        return []

    def _exception(self, action: Action) -> Records:
        heard = self.side.fail(self._batch(action))
        self.side.optimizer.zero_grad()
        return [("heard", float(heard))]
