"""One module tree, several stages: what each of a rank's stages sees in the place of modules that it does not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from shardformer.stages.placeholders import StageInput, StageMessage, StagePlaceholder

# A module, and the name of its child or the position in it.
Place = tuple[nn.Module, str | int]


@dataclass
class VirtualStage:
    """One stage.

    Attributes:
        carries: names of the inputs of layers that travel to it.
        keeps: (path, field) of the outputs of finished modules that travel to it.
        ignored_inputs: inputs of the model that it goes without.
        placeholders: place -> what stands there, in the order in which they are put there.
    """

    carried_inputs: Sequence[str] = ()
    keeps: Sequence[tuple[str, str]] = ()
    ignored_inputs: frozenset[str] = frozenset()
    placeholders: dict[Place, StagePlaceholder] = field(default_factory=dict)


class VirtualStages:
    """The stages of a rank. Between passes the model has the modules of all of them, and stand-ins for all others.

    Args:
        model: the whole model; modules that no stage runs are let go.
        arrival: what all stand-ins of the model read.
        views: stage -> what it sees.
    """

    def __init__(self, model: nn.Module, stage_input: StageInput, views: Mapping[int, VirtualStage]) -> None:
        self.stage_input, self.views = stage_input, dict(views)
        for view in self.views.values():
            for stand_in in view.placeholders.values():
                stand_in.stage_input = stage_input
        first, *others = self.views.values()
        for place, stand_in in first.placeholders.items():
            if all(place in view.placeholders for view in others):
                _put(place, stand_in)
        remaining = {id(module) for module in model.modules()}
        for view in self.views.values():
            # What stands for a module that is gone differs from stage to stage too; a single one is there already.
            reachable = {place: each for place, each in view.placeholders.items() if id(place[0]) in remaining}
            view.placeholders = reachable if others else {}

    @contextmanager
    def running(self, stage: int | None, message: StageMessage | None) -> Iterator[VirtualStage]:
        """A pass of `stage`, or of the only one, which has received `message`."""
        view = self.views[stage] if stage is not None else next(iter(self.views.values()))
        held = {place: _get(place) for place in view.placeholders}
        for place, stand_in in view.placeholders.items():
            _put(place, stand_in)
        self.stage_input.begin(message, view.carried_inputs, view.keeps)
        try:
            yield view
        finally:
            self.stage_input.begin(None)
            for place, module in held.items():
                _put(place, module)


def _get(place: Place) -> nn.Module:
    parent, key = place
    return parent[key] if isinstance(key, int) else getattr(parent, key)


def _put(place: Place, module: nn.Module) -> None:
    parent, key = place
    if isinstance(key, int):
        parent[key] = module
    else:
        setattr(parent, key, module)
