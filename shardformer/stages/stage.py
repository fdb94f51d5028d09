"""Pipeline stages of an unmodified transformers model.

A stage runs the model's own forward. Layers before its range are `Skipped`, embeddings of earlier stages are
`Received`, and the first layer after the range is a `Boundary`, which ends the pass with the hidden state before it
reaches the head. Names stay `layers.7.*` on every stage. Masks, positions and rotary tables are recomputed from the
batch, which every stage has. Only hidden states are sent, and the outputs of an earlier tower that later layers read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardformer.stages import earlier_modules
from shardformer.stages.layout import Place, StageLayout, VirtualStage, VirtualStages, balanced_split, matrix_cost
from shardformer.stages.placeholders import (
    Boundary,
    CachedTower,
    IdentityPlaceholder,
    Key,
    LayerInputPlaceholder,
    Received,
    ReceivedByTower,
    ReceivedPatches,
    ReceivedUnpadded,
    Skipped,
    StageBoundary,
    StageInput,
    StageMessage,
    StagePlaceholder,
    UnreachablePlaceholder,
    ZeroEmbedding,
    enter_at,
    hook_captured_outputs,
    keep_output,
    state_keys,
    with_attributes,
)
from shardformer.utils.module_paths import has_module

__all__ = [
    "ZeroEmbedding",
    "UnreachablePlaceholder",
    "IdentityPlaceholder",
    "PipelineStageManager",
    "Received",
    "ReceivedByTower",
    "ReceivedPatches",
    "ReceivedUnpadded",
    "StagePartitioner",
    "StageLayout",
    "StagePlaceholder",
    "run_stage",
]


@dataclass(frozen=True)
class PipelineStageManager:
    """The pipeline stages of this rank."""

    stage: int = 0  # index of this rank's stage, or of its first stage
    num_stages: int = 1
    layers_per_stage: tuple[int, ...] | None = None  # an explicit split of the layers; None for an even split
    # the other stages of this rank, if the schedule assigns several stages to a rank
    further_stages: tuple[int, ...] = ()

    @property
    def held(self) -> tuple[int, ...]:
        """All stages of this rank."""
        return (self.stage, *self.further_stages)

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return 0 in self.held

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.num_stages - 1 in self.held

    def split(self, num_layers: int, even: Sequence[int] | None = None) -> list[range]:
        """Return the range of layers of each stage, in order.

        Args:
            even: layers per stage that balance the stage times of this model; None to balance the number of layers.

        Raises:
            ValueError: the model has fewer layers than stages, or the explicit split does not fit.
        """
        if num_layers < self.num_stages:
            chunks = len(self.held)
            if chunks == 1:
                raise ValueError(
                    f"pp_size={self.num_stages} is larger than the model's {num_layers} layers; "
                    f"use a pp_size of at most {num_layers}"
                )
            raise ValueError(
                f"pp_size={self.num_stages // chunks} with {chunks} chunks a rank makes {self.num_stages} stages, more "
                f"than the model's {num_layers} layers; use fewer chunks, or a pp_size of at most "
                f"{max(num_layers // chunks, 1)}"
            )
        even = list(even or self._even_counts(num_layers))
        counts = list(self.layers_per_stage or even)
        if len(counts) != self.num_stages or sum(counts) != num_layers or min(counts) < 1:
            raise ValueError(
                f"layers_per_stage={counts} does not split {num_layers} layers over {self.num_stages} stages; "
                f"use for example {even}"
            )
        starts = [sum(counts[:stage]) for stage in range(self.num_stages)]
        return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]

    def _even_counts(self, num_layers: int) -> list[int]:
        base, rest = divmod(num_layers, self.num_stages)
        # The first and the last stage also hold the embedding and the head, so surplus layers go to the middle stages;
        # with two stages they go to the first, because an embedding costs less than a head.
        middle_out = sorted(range(self.num_stages), key=lambda s: (min(s, self.num_stages - 1 - s) == 0, s))
        surplus = set(middle_out[:rest])
        return [base + (stage in surplus) for stage in range(self.num_stages)]


class StagePartitioner:
    """Partitions one model into stages. `holders` and `unassigned` must be called before `apply` changes the model.

    Args:
        base_path: path of the base model inside `model` ("" for a bare base model).
    """

    def __init__(self, model: nn.Module, base_path: str, layout: StageLayout, manager: PipelineStageManager) -> None:
        self.model, self.manager, self.lists = model, manager, layout.chain
        self._prefix = f"{base_path}." if base_path else ""
        base = model.get_submodule(base_path)
        sizes = [len(base.get_submodule(each.layers)) for each in self.lists]
        self.starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        self._head = [] if not base_path else [n for n, _ in model.named_children() if n != base_path.split(".")[0]]
        self.ranges = manager.split(self.starts[-1], self._even_counts())
        if skipped := [held.start for held in self.ranges[1:] if held.start in self._optional]:
            raise ValueError(
                f"layers_per_stage={manager.layers_per_stage} begins a stage with layer {skipped[0]}, which a batch "
                "may skip; begin it with another layer"
            )
        self._kept = self._kept_outputs()

    def holders(self, name: str) -> set[int]:
        """Return the stages that hold the module or parameter `name` of the full model."""
        for index, layout in enumerate(self.lists):
            start, end = self.starts[index], self.starts[index + 1] - 1
            for path in (layout.layers, *layout.sublayer_lists):
                layers = f"{self._prefix}{path}."
                if not name.startswith(layers):
                    continue
                number = int(name[len(layers) :].split(".")[0])
                # A list that runs its layers several times defines `positions_of`.
                repeated = getattr(self.model.get_submodule(layers[:-1]), "positions_of", None)
                return {self._stage_of(start + position) for position in (repeated(number) if repeated else [number])}
            if self._is_below(name, layout.first):
                with_head = {self.manager.num_stages - 1} if self._is_below(name, layout.last) else set()
                return {self._stage_of(max(start - 1, 0)), *with_head}
            if self._is_below(name, layout.last):
                return {self._stage_of(end)}
            for path, number in layout.layer_parts.items():
                if self._is_below(name, (path,)):
                    return {self._stage_of(start + number)}
        if _is_in(name, self._head):
            return {self.manager.num_stages - 1}
        for end, layout in zip(self.starts[1:], self.lists, strict=True):
            if self._is_below(name, layout.finished_towers):  # later stages have the tower's output instead
                return {stage for stage, held in enumerate(self.ranges) if held.start < end}
        return set(range(self.manager.num_stages))

    def unassigned(self) -> list[str]:
        """Return modules with parameters, and single parameters, of the base model that the layout does not name."""
        named = [path for e in self.lists for path in _named_by(e)]
        return sorted(
            {
                name.rpartition(".")[0] or name
                for name, _ in self.model.named_parameters()
                if name.startswith(self._prefix) and not self._is_below(name, named)
            }
        )

    def apply(self) -> None:
        """Keep the modules of this rank's stages and replace all others by placeholders."""
        stage_input = StageInput()
        if any(layout.changes_shapes for layout in self.lists):
            hook_captured_outputs(self.model)
        views = {stage: self._view_of(stage, stage_input) for stage in self.manager.held}
        paths = {module: path for path, module in self.model.named_modules()}
        for view in views.values():
            for (parent, name), stand_in in view.placeholders.items():
                path = f"{paths[parent]}.{name}".lstrip(".")
                holders = self.holders(path)  # none where layers repeat, of what no position runs
                stand_in.place = path, f"pipeline stage {min(holders)}" if holders else "no pipeline stage"
        entered = [self.ranges[stage].start for stage in self.manager.held]
        for index, layout in enumerate(self.lists):
            for path, fields in layout.finished_towers.items():
                if any(start < self.starts[index + 1] for start in entered):
                    keep_output(self.model.get_submodule(self._prefix + path), path, fields, stage_input)
        for path, (count, runs_with) in self._kept.items():
            if any(runs_with in self.ranges[stage] for stage in self.manager.held):
                earlier_modules.keep_tensors(self.model.get_submodule(self._prefix + path), path, count, stage_input)
        for layout in self.lists:
            if layout.inputs_between:
                around = (self._prefix + layout.layers).rpartition(".")[0]
                earlier_modules.exchange_inputs(self.model.get_submodule(around), layout.inputs_between, stage_input)
        self.model.stage_views = VirtualStages(self.model, stage_input, views)
        for layout in self.lists:
            if has_module(self.model, self._prefix + layout.layers):
                layers = self.model.get_submodule(self._prefix + layout.layers)
                if hasattr(layers, "keep_used"):
                    layers.keep_used()

    def _kept_outputs(self) -> dict[str, tuple[int, int]]:
        """Return the modules whose outputs later stages read: path -> (number of tensors, layer that it runs with)."""
        found = {}
        for start, end, layout in zip(self.starts, self.starts[1:], self.lists, strict=False):
            for path, count in layout.kept_outputs.items():
                if _is_in(path, [layout.layers]):
                    position = start + int(path[len(layout.layers) + 1 :])
                elif path in layout.layer_parts:
                    position = start + layout.layer_parts[path]
                else:
                    position = max(start - 1, 0) if _is_in(path, layout.first) else end - 1
                found[path] = (count, position)
        return found

    def held_layers(self) -> list[list[nn.Module]]:
        """Return the layers that run consecutively on this rank, one list per stage and layer list."""
        found = []
        for held in (self.ranges[stage] for stage in self.manager.held):
            for start, layout in zip(self.starts, self.lists, strict=False):
                if has_module(self.model, self._prefix + layout.layers):  # a finished encoder is replaced
                    layers = self.model.get_submodule(self._prefix + layout.layers)
                    found.append([layer for number, layer in enumerate(layers, start) if number in held])
        return found

    def _even_counts(self) -> list[int] | None:
        """Return layers per stage that balance the stage costs; None if there are fewer layers than stages."""
        if self.starts[-1] < self.manager.num_stages:
            return None
        base = self.model.get_submodule(self._prefix.rstrip("."))
        costs = [0.0] * self.starts[-1]
        for start, layout in zip(self.starts, self.lists, strict=False):
            for path in (layout.layers, *layout.sublayer_lists):
                for position, layer in enumerate(base.get_submodule(path), start):
                    costs[position] += matrix_cost(layer)
        embedding = matrix_cost(base, lambda name: _is_in(name, self.lists[0].first))
        head = matrix_cost(base, lambda name: _is_in(name, self.lists[-1].last))
        head += sum(matrix_cost(self.model.get_submodule(name)) for name in self._head)
        # Break ties in favor of fewer layers on the stage of the head, then on the stage of the embedding.
        little = 0.01 * sum(costs) / len(costs)
        return balanced_split(costs, self.manager.num_stages, embedding + little, head + 2 * little, self._optional)

    @property
    def _optional(self) -> set[int]:
        """Numbers of the layers of all lists that a batch may skip."""
        return {start + n for start, each in zip(self.starts, self.lists, strict=False) for n in each.optional_layers}

    def _view_of(self, stage: int, stage_input: StageInput) -> VirtualStage:
        """Build the view of `stage`, and let its first layer read from `stage_input`."""
        held = self.ranges[stage]
        carried_inputs, keeps = self._travels_to(held.start)
        ignored = frozenset() if held.start == 0 else frozenset(self.lists[0].first_inputs)
        view = VirtualStage(carried_inputs, keeps, ignored, is_last=stage == self.manager.num_stages - 1)
        for index, layout in enumerate(self.lists):
            self._cut_layers(view, index, held, stage_input)
            self._stand_in(view, layout, layout.first, max(self.starts[index] - 1, 0), held)
            last = {path: IdentityPlaceholder for path in layout.last if not _is_in(path, layout.first)}
            self._stand_in(view, layout, last, self.starts[index + 1] - 1, held)
            for path, number in layout.layer_parts.items():
                self._stand_in(view, layout, {path: IdentityPlaceholder}, self.starts[index] + number, held)
            for path, fields in layout.finished_towers.items():
                if self.starts[index + 1] <= held.start:
                    native = self.model.get_submodule(self._prefix + path)
                    view.placeholders[self._place(path)] = with_attributes(CachedTower(path, fields), native)
        if stage != self.manager.num_stages - 1:
            for name in self._head:
                view.placeholders[self.model, name] = UnreachablePlaceholder(name)
        return view

    def _cut_layers(self, view: VirtualStage, index: int, held: range, stage_input: StageInput) -> None:
        layout, start = self.lists[index], self.starts[index]
        layers = self.model.get_submodule(self._prefix + layout.layers)
        for position, layer in enumerate(list(layers), start=start):
            stand_in = None
            if position == held.start - 1 and layout.calls_forward:
                stand_in = earlier_modules.ReceivedOutput(layer)
            elif position < held.start:
                stand_in = self._earlier(f"{layout.layers}.{position - start}", layer, layout)
                stand_in = stand_in or Skipped(int(layout.tuple_output), layout.carried_inputs)
            elif position == held.stop:
                stand_in = Boundary(layer, *self._travels_to(held.stop), layout.shared_states)
            elif position > held.stop:
                stand_in = UnreachablePlaceholder(f"{layout.layers}.{position - start}")
            elif position == held.start and position > 0 and not layout.sublayer_lists and not layout.calls_forward:
                enter_at(layer, stage_input, layout.carried_inputs, layout.shared_states)
            if stand_in is not None:
                view.placeholders[layers, position - start] = with_attributes(stand_in, layer)
        for path in layout.sublayer_lists:
            parts = self.model.get_submodule(self._prefix + path)
            for position, part in enumerate(list(parts), start=start):
                if position < held.start:
                    ends_layer = position == held.start - 1 and path == layout.sublayer_lists[-1]
                    view.placeholders[parts, position - start] = with_attributes(
                        LayerInputPlaceholder() if ends_layer else IdentityPlaceholder(), part
                    )
                elif position >= held.stop:
                    view.placeholders[parts, position - start] = with_attributes(
                        UnreachablePlaceholder(f"{path}.{position - start}"), part
                    )

    def _stand_in(
        self,
        view: VirtualStage,
        layout: StageLayout,
        paths: Mapping[str, Callable[[], StagePlaceholder]],
        runs_with: int,
        held: range,
    ) -> None:
        """Add placeholders for modules that run on the stage of layer number `runs_with`."""
        if runs_with in held:
            return
        for path, stand_in in paths.items():
            if has_module(self.model, self._prefix + path):
                native = self.model.get_submodule(self._prefix + path)
                earlier = (self._earlier(path, native, layout) or stand_in()) if runs_with < held.start else None
                found = with_attributes(earlier or UnreachablePlaceholder(path), native)
                view.placeholders[self._place(path)] = found
                with_head = layout.last if held.stop == self.starts[-1] else ()
                for name, child in native.named_children():
                    if f"{path}.{name}" in with_head:
                        found.add_module(name, child)

    def _earlier(self, path: str, native: nn.Module, layout: StageLayout) -> StagePlaceholder | None:
        """Return the placeholder for a module of an earlier stage of which later ones need more; None for others."""
        if path in self._kept:
            return earlier_modules.KeptOutput(path, self._kept[path][0], native if layout.changes_shapes else None)
        is_skipped = layout.skips_layers and _is_in(path, [layout.layers])
        return earlier_modules.MetaModule(native) if layout.changes_shapes and not is_skipped else None

    def _place(self, path: str) -> Place:
        parent, _, name = (self._prefix + path).rpartition(".")
        return self.model.get_submodule(parent), name

    def _travels_to(self, position: int) -> tuple[list[str], list[Key]]:
        """Return the carried inputs and kept outputs that a stage starting at layer `position` receives."""
        if not 0 < position < self.starts[-1]:
            return [], []
        index = max(i for i, start in enumerate(self.starts[:-1]) if start <= position)
        layout = self.lists[index]
        finished = self.lists[max(index - 1, 0) : index]
        towers = [(path, name) for each in finished for path, names in each.finished_towers.items() for name in names]
        kept = [
            key
            for path, (count, at) in self._kept.items()
            if at < position
            for key in earlier_modules.output_keys(path, count)
        ]
        later = range(position - self.starts[index], self.starts[index + 1] - self.starts[index])
        between = earlier_modules.keys_between(layout.inputs_between, later)
        return list(layout.carried_inputs), [*towers, *kept, *state_keys(layout.shared_states), *between]

    def _stage_of(self, layer: int) -> int:
        return next(stage for stage, held in enumerate(self.ranges) if layer in held)

    def _is_below(self, name: str, paths: Sequence[str] | Mapping[str, Any]) -> bool:
        return name.startswith(self._prefix) and _is_in(name.removeprefix(self._prefix), paths)


def _is_in(name: str, paths: Iterable[str]) -> bool:
    """Return whether `name` is one of `paths` or below one of them."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _named_by(layout: StageLayout) -> tuple[str, ...]:
    """Return the paths that a layout places."""
    around = (*layout.first, *layout.every, *layout.last, *layout.layer_parts)
    return (layout.layers, *layout.sublayer_lists, *around)


def run_stage(
    model: nn.Module,
    message: StageMessage | None,
    inputs: Mapping[str, Any],
    stage: int | None = None,
    call: Callable[..., Any] | None = None,
) -> Any:
    """Run one forward pass of a pipeline stage.

    Args:
        message: the previous stage's message, the hidden state [batch, seq, hidden] first; None on the first stage.
        inputs: the keyword arguments of the model's forward, the same on every stage.
        stage: index of the stage, one of this rank's stages; None if the rank has only one.
        call: runs a part of the model, such as its encoder; None runs the model.

    Returns:
        The message for the next stage, or the output of what is called, where it ends on this stage.

    Raises:
        ValueError: the model returned before the next stage's first layer.
    """
    views, call = getattr(model, "stage_views", None), call or model
    if views is None:
        return call(**inputs)
    with views.running(stage, message) as view:
        inputs = {name: value for name, value in inputs.items() if name not in view.ignored_inputs}
        try:
            outputs = call(**inputs)
        except StageBoundary as boundary:
            return boundary.message
        if call is model and not view.is_last:
            raise ValueError(
                f"the forward of {type(model).__name__} returned without running the layers that the pipeline is cut "
                "from; run them in every pass, or use pp_size=1"
            )
        return outputs
