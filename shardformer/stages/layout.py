"""StageLayout: where a model can be cut into pipeline stages, and what later stages need of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardformer.stages.placeholders import StagePlaceholder
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
        inputs_between: inputs of the module around the layers that it reads between them, see `between_layers.py`.
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
