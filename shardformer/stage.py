"""Pipeline stages cut from an unmodified transformers model.

A stage runs the model's own forward. Layers before its range are `Skipped`, the embedding of a later stage is
`Received` (it returns what arrived), and the first layer after the range is a `Boundary`, which ends the pass with the
hidden state, so that no head ever sees one. Names stay `layers.7.*` on every stage. Masks, positions and rotary
tables are recomputed from the batch, which every stage has; only hidden states travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class PipelineStageManager:
    """Which stage is here.

    Attributes:
        stage: index of this stage.
        num_stages: stages of the pipeline.
        layers_per_stage: an explicit split of the layers; None for an even one.
    """

    stage: int = 0
    num_stages: int = 1
    layers_per_stage: tuple[int, ...] | None = None

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def split(self, num_layers: int) -> list[range]:
        """The layers of each stage, in order.

        Raises:
            ValueError: fewer layers than stages, or an explicit split that does not fit.
        """
        if num_layers < self.num_stages:
            raise ValueError(
                f"pp_size={self.num_stages} is larger than the model's {num_layers} layers; "
                f"use a pp_size of at most {num_layers}"
            )
        counts = list(self.layers_per_stage or self._even_counts(num_layers))
        if len(counts) != self.num_stages or sum(counts) != num_layers or min(counts) < 1:
            raise ValueError(
                f"layers_per_stage={counts} does not split {num_layers} layers over {self.num_stages} stages; "
                f"use for example {self._even_counts(num_layers)}"
            )
        starts = [sum(counts[:stage]) for stage in range(self.num_stages)]
        return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]

    def _even_counts(self, num_layers: int) -> list[int]:
        base, rest = divmod(num_layers, self.num_stages)
        # The first and the last stage also hold the embedding and the head: surplus layers go to the middle, and of
        # two stages to the first, whose embedding costs less than a head.
        middle_out = sorted(range(self.num_stages), key=lambda s: (min(s, self.num_stages - 1 - s) == 0, s))
        surplus = set(middle_out[:rest])
        return [base + (stage in surplus) for stage in range(self.num_stages)]


@dataclass(frozen=True)
class StageLayout:
    """Where a family may be cut. Paths are relative to the base model.

    Attributes:
        layers: path of the layer list.
        first: modules of the first stage and what stands in for them on later stages.
        every: modules that every stage needs.
        last: modules behind the layers; the modules of a head class around the base model always are.
        tuple_output: whether a layer returns a tuple whose first element is the hidden state.
    """

    layers: str
    first: Mapping[str, type[nn.Module]]
    every: Sequence[str] = ()
    last: Sequence[str] = ()
    tuple_output: bool = False


class StageBoundary(Exception):
    """Ends the forward pass of a stage; carries the hidden state that the next stage receives."""

    def __init__(self, hidden_states: Tensor) -> None:
        super().__init__("end of the pipeline stage")
        self.hidden_states = hidden_states


class StandIn(nn.Module):
    """Stands for a module that lives on another stage."""


class Received(StandIn):
    """Stands for the embedding on a later stage: the first call of a pass returns what arrived, others add nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.activation: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        activation, self.activation = self.activation, None
        return activation if activation is not None else torch.zeros(())


class AddsNothing(StandIn):
    """Stands for an embedding that is added to another: its share is already in what arrived."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


class PassedThrough(StandIn):
    """Stands for a module that the first stage has already applied (an embedding's norm or dropout)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


class Skipped(StandIn):
    """Stands for a layer of an earlier stage."""

    def __init__(self, tuple_output: bool) -> None:
        super().__init__()
        self.tuple_output = tuple_output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states = _hidden_states(args, kwargs)
        return (hidden_states,) if self.tuple_output else hidden_states


class Boundary(StandIn):
    """Stands for the first layer of the next stage."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StageBoundary(_hidden_states(args, kwargs))


class Elsewhere(StandIn):
    """Stands for a module of another stage that this stage's pass never reaches."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("this module lives on another pipeline stage; its family's StageLayout lets a pass reach it")


def _hidden_states(args: tuple, kwargs: dict) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def replace_module(root: nn.Module, path: str, new: nn.Module) -> None:
    """Put `new` in the place of the module at `path`."""
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, new)


def cut_stage(model: nn.Module, base_path: str, layout: StageLayout, manager: PipelineStageManager) -> None:
    """Keep this stage's modules of `model` and put stand-ins in the place of all others.

    Args:
        model: the whole model, changed in place.
        base_path: path of the base model inside it ("" for a bare base model).
        layout: where the family may be cut.
        manager: which stage this is.
    """
    base = model.get_submodule(base_path)
    layers = base.get_submodule(layout.layers)
    held = manager.split(len(layers))[manager.stage]
    for index in range(len(layers)):
        if index < held.start:
            layers[index] = Skipped(layout.tuple_output)
        elif index >= held.stop:
            layers[index] = Boundary() if index == held.stop else Elsewhere()
    if not manager.is_first:
        for path, stand_in in layout.first.items():
            if has_module(base, path):
                replace_module(base, path, stand_in())
    if not manager.is_last:
        for path in last_modules(model, base_path, layout):
            replace_module(model, path, Elsewhere())


def last_modules(model: nn.Module, base_path: str, layout: StageLayout) -> list[str]:
    """Paths of the modules behind the layers: those the layout names, and a head class's own."""
    prefix = f"{base_path}." if base_path else ""
    base = model.get_submodule(base_path)
    paths = [prefix + path for path in layout.last if has_module(base, path)]
    if base_path:
        paths += [name for name, _ in model.named_children() if name != base_path.split(".")[0]]
    return paths


def unassigned_modules(base: nn.Module, layout: StageLayout) -> list[str]:
    """Leaf modules with parameters outside the layers that the layout names nowhere."""
    named = [layout.layers, *layout.first, *layout.every, *layout.last]
    return [
        path
        for path, module in base.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and not any(path == name or path.startswith(f"{name}.") for name in named)
    ]


def has_module(root: nn.Module, path: str) -> bool:
    """Whether `path` names a module below `root`; an attribute that is None (a pooler left out) does not count."""
    try:
        root.get_submodule(path)
    except AttributeError:
        return False
    return True


def received_modules(model: nn.Module) -> Iterator[Received]:
    """The entrance of this stage."""
    return (module for module in model.modules() if isinstance(module, Received))


def run_stage(model: nn.Module, arrived: Tensor | None, inputs: Mapping[str, Any]) -> Any:
    """Run one pass of the stage that `model` is.

    Args:
        model: the model, cut by `cut_stage`.
        arrived: hidden state from the stage before, [batch, seq, hidden]; None on the first stage.
        inputs: the keyword arguments of the model's forward, the same on every stage.

    Returns:
        The hidden state for the next stage, or the model's own output on the last stage.
    """
    if arrived is not None:
        for module in received_modules(model):
            module.activation = arrived
    try:
        return model(**inputs)
    except StageBoundary as boundary:
        return boundary.hidden_states
