"""Several stages in one module tree: each of a rank's stages has its own placeholders for modules it does not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from shardformer.stages.placeholders import StageInput, StageMessage, StagePlaceholder

# A parent module, and the name or index of its child.
Place = tuple[nn.Module, str | int]


@dataclass
class VirtualStage:
    """One stage of a rank.

    Attributes:
        carried_inputs: names of the layer inputs that the stage receives.
        keeps: (path, field) of the outputs of finished modules that the stage receives.
        ignored_inputs: inputs of the model that the stage does not use.
        is_last: whether the forward of the model returns here, and does not end at the next stage's first layer.
        placeholders: place -> placeholder, in the order in which they are installed.
    """

    carried_inputs: Sequence[str] = ()
    keeps: Sequence[tuple[str, str]] = ()
    ignored_inputs: frozenset[str] = frozenset()
    is_last: bool = True
    placeholders: dict[Place, StagePlaceholder] = field(default_factory=dict)


class VirtualStages:
    """All stages of a rank. Between passes the model has the modules of all its stages, and placeholders elsewhere.

    Args:
        model: the full model; modules that no stage of this rank runs are dropped.
        stage_input: the input that all placeholders of the model read.
        views: stage -> its view of the model.
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
            # Drop placeholders whose parent module is gone. With a single stage all of them are installed already.
            reachable = {place: each for place, each in view.placeholders.items() if id(place[0]) in remaining}
            view.placeholders = reachable if others else {}

    @contextmanager
    def running(self, stage: int | None, message: StageMessage | None) -> Iterator[VirtualStage]:
        """Install the placeholders of `stage` (None: the only one) and its `message` for the duration of a pass."""
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
