"""StageLayout: where a model can be cut into pipeline stages, and what later stages need of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

from torch import nn

from shardformer.stages.placeholders import StageInput, StageMessage, StagePlaceholder
from shardformer.utils.module_paths import join

T = TypeVar("T")


@dataclass(frozen=True)
class StageLayout:
    """The layer list where a family can be split into stages, and the modules around it.

    All paths are relative to the base model.

    Attributes:
        layers: path of the layer list.
        first: modules that run before these layers -> their placeholders on later stages.
        every: modules or single parameters that every stage needs; the stages share these parameters.
        last: modules that run after the layers. Modules of a head class outside the base model always do. A child of a
            module of `first` runs before the layers, and with the head (an embedding whose weight it reads).
        tuple_output: whether a layer returns a tuple whose first element is the hidden state; a number gives the
            length of the tuple.
        carried_inputs: names of layer inputs that an earlier layer computes and layers pass on (T5's position bias);
            they are sent between stages.
        head_inputs: those of `carried_inputs` that a tensor-parallel rank has for its own heads, [batch, heads, ...].
        finished_towers: towers that are finished after these layers: path -> output fields that the next list reads.
        first_inputs: inputs of the model that only the first stage reads (images, which become embeddings there).
        sublayer_lists: lists of further parts of the same layers (XLM's norms and feed-forwards), in the order in
            which they run; the last part returns the hidden state.
        kept_outputs: modules, or single layers, whose outputs later stages read too (a residual over many layers):
            path -> number of tensors in the output of the module; 0 for a bare tensor.
        shared_states: dictionaries that layers write for later layers (keys and values): name of the layer's input ->
            its keys. Each value is a pair of tensors.
        inputs_between: inputs of the module around the layers that it reads between them, see `earlier_modules.py`.
        changes_shapes: whether modules change the shape of the hidden state. Later stages then compute the shapes that
            the model's code between modules sees on the meta device, see `MetaModule`.
        calls_forward: whether the model calls `forward` of its layers, which cannot be wrapped. A stage then starts
            with the received hidden state as the output of the layer before it; that output has a single tensor.
        skips_layers: whether a layer keeps the shape of the hidden state although `changes_shapes`, so that later
            stages skip earlier layers.
        optional_layers: numbers of the layers that a batch may skip (Mllama's cross-attention to images). None of them
            begins a stage, because the call of its first layer is what a stage starts and ends with.
        layer_parts: modules that run after a layer of the list, before the next one -> the number of the layer.
        next_layers: the layout of the layer list that runs next.
    """

    layers: str
    first: Mapping[str, Callable[[], StagePlaceholder]] = field(default_factory=dict)
    every: Sequence[str] = ()
    last: Sequence[str] = ()
    tuple_output: bool | int = False
    carried_inputs: Sequence[str] = ()
    head_inputs: Sequence[str] = ()
    finished_towers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    first_inputs: Sequence[str] = ()
    sublayer_lists: Sequence[str] = ()
    kept_outputs: Mapping[str, int] = field(default_factory=dict)
    shared_states: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    inputs_between: Sequence[str] = ()
    changes_shapes: bool = False
    calls_forward: bool = False
    skips_layers: bool = False
    optional_layers: Collection[int] = ()
    layer_parts: Mapping[str, int] = field(default_factory=dict)
    next_layers: StageLayout | None = None

    @property
    def chain(self) -> list[StageLayout]:
        """This layout and all layouts that follow it."""
        return [self, *(self.next_layers.chain if self.next_layers is not None else ())]

    def below(self, base: str) -> StageLayout:
        """Return the layout of this list alone for a model that has the base model at the path `base`.

        All stages then get all inputs of the forward around it, which may read any.
        """

        def paths(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(join(base, name) for name in names)

        def keys(table: Mapping[str, T]) -> dict[str, T]:
            return {join(base, path): value for path, value in table.items()}

        return replace(
            self,
            layers=join(base, self.layers),
            first=keys(self.first),
            every=paths(self.every),
            last=paths(self.last),
            finished_towers=keys(self.finished_towers),
            first_inputs=(),
            sublayer_lists=paths(self.sublayer_lists),
            kept_outputs=keys(self.kept_outputs),
            layer_parts=keys(self.layer_parts),
            next_layers=None,
        )

    def keeping_hidden_states(self, numbers: Collection[int]) -> StageLayout:
        """Return the layout of a head that reads hidden states of several stages.

        Args:
            numbers: of the hidden states that it reads: 0 for the output of the modules before the layers, 1 for that
                of the first layer.
        """
        layers = {f"{self.layers}.{number - 1}": 0 for number in numbers if number}
        kept = layers | (dict.fromkeys(self.first, 0) if 0 in numbers else {})
        return replace(self, kept_outputs={**self.kept_outputs, **kept}, changes_shapes=True, skips_layers=True)


def chained(layouts: Sequence[StageLayout]) -> StageLayout:
    """Return the layout of layer lists that run in this order."""
    chain = layouts[-1]
    for layout in layouts[-2::-1]:
        chain = replace(layout, next_layers=chain)
    return chain


def balanced_split(
    costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0, never_first: Collection[int] = ()
) -> list[int]:
    """Split consecutive layers into stages so that the cost of the most expensive stage is minimal.

    Every stage gets at least one layer. Ties are broken by the smallest sum of squared stage costs.

    Args:
        first, last: additional costs of the first and the last stage.
        never_first: numbers of layers that cannot be the first of a stage.

    Returns:
        Number of layers in each stage.

    Raises:
        ValueError: fewer layers than stages may begin a stage.
    """
    starts = len(set(range(len(costs))) - {*never_first} | {0})
    if starts < num_stages:
        raise ValueError(
            f"pp_size={num_stages} is larger than the number of layers that may begin a stage, {starts} of "
            f"{len(costs)}; use a pp_size of at most {starts}"
        )
    until = list(accumulate(costs, initial=0.0))
    count = len(costs)
    # best[stage][end]: `end` layers in `stage + 1` stages -> ((largest cost, sum of squares), start of the last stage).
    best: list[dict[int, tuple[tuple[float, float], int]]] = []
    for stage in range(num_stages):
        extra = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        row: dict[int, tuple[tuple[float, float], int]] = {}
        for end in range(stage + 1, count - (num_stages - stage - 1) + 1):
            choices = []
            for begin in [0] if stage == 0 else best[-1]:
                if begin < end and (begin == 0 or begin not in never_first):
                    cost = until[end] - until[begin] + extra
                    largest, squares = (0.0, 0.0) if stage == 0 else best[-1][begin][0]
                    choices.append(((max(largest, cost), squares + cost * cost), begin))
            if choices:
                row[end] = min(choices, key=lambda choice: (choice[0], -choice[1]))
        best.append(row)
    counts, end = [], count
    for row in reversed(best):
        begin = row[end][1]
        counts.append(end - begin)
        end = begin
    return counts[::-1]


def matrix_cost(module: nn.Module, counts: Callable[[str], bool] = lambda name: True) -> float:
    """Estimate the cost of a forward pass for one token: the number of elements of all weight matrices.

    Embedding tables are excluded, because a lookup takes almost no time. Attention scores are excluded, because their
    cost depends on the sequence length and is the same in all layers.

    Args:
        counts: whether to include the module of a given name.
    """
    return float(
        sum(
            param.numel()
            for name, each in module.named_modules()
            if not isinstance(each, nn.Embedding) and counts(name)
            for param in each.parameters(recurse=False)
            if param.dim() > 1
        )
    )


# A parent module, and the name or index of its child.
Place = tuple[nn.Module, str | int]


@dataclass
class VirtualStage:
    """One stage of a rank."""

    carried_inputs: Sequence[str] = ()  # names of the layer inputs that the stage receives
    keeps: Sequence[tuple[str, str]] = ()  # (path, field) of the outputs of finished modules that the stage receives
    ignored_inputs: frozenset[str] = frozenset()  # inputs of the model that the stage does not use
    # whether the forward of the model returns here, and does not end at the next stage's first layer
    is_last: bool = True
    # place -> placeholder, in the order in which they are installed
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
