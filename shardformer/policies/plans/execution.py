"""Derivation of a model's `ExecutionOrder` from forward passes of a small model.

One pass records when each module runs. Then the modules are replayed: each returns what it has returned before, so that
a pass runs only the code between modules. If the output of one module is changed in a replay, exactly those modules
change their inputs that read it, whatever lies in between: masks, indices, residuals, several lists of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from shardformer.policies.plans.stages import ExecutionOrder, units_of
from shardformer.stages.placeholders import LayerInputs
from shardformer.utils.module_paths import starred

Forward = Callable[[], Any]


@dataclass
class Call:
    """A call of a module."""

    path: str  # of the module
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)  # name of an input, "" for the first -> its tensors
    output: Any = None  # what the module returned, detached
    # path of the module inside of which it ran, of those that are recorded; None if there is none
    outer: str | None = None
    is_direct: bool = False  # whether `forward` was called instead of the module


def recorded_calls(model: nn.Module, paths: Sequence[str], run: Forward) -> list[Call]:
    """Return the calls of the modules at `paths` in the order in which they begin."""
    calls: list[Call] = []
    running: list[str] = []
    begun: list[nn.Module] = []

    def recorded(path: str, module: nn.Module) -> Callable[..., Any]:
        names, forward = LayerInputs(module), module.forward

        def record(*args: Any, **kwargs: Any) -> Any:
            call = Call(path, _inputs(names, args, kwargs), None, running[-1] if running else None)
            call.is_direct = not (begun and begun[-1] is module)
            calls.append(call)
            running.append(path)
            try:
                output = forward(*args, **kwargs)
            finally:
                running.pop()
            call.output = tree_map_only(Tensor, lambda each: each.detach().clone(), output)
            return output

        return record

    hooks = [
        model.get_submodule(path).register_forward_pre_hook(lambda module, _: begun.append(module)) for path in paths
    ]
    try:
        with _replaced_forwards(model, paths, recorded):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def replay(
    model: nn.Module, batch: Mapping[str, Any], calls: Sequence[Call], changed: int | None = None
) -> tuple[list[dict[str, list[Tensor]]], Any]:
    """Run only the code between modules: each returns what it has returned before.

    Args:
        changed: number of the call that returns another output.

    Returns:
        The inputs of each call, empty if it was not reached, and the outputs of the model.
    """
    generator = torch.Generator().manual_seed(0)
    queues: dict[str, list[int]] = {}
    for index, call in enumerate(calls):
        queues.setdefault(call.path, []).append(index)
    found: dict[int, dict[str, list[Tensor]]] = {}

    def replayed(path: str, module: nn.Module) -> Callable[..., Any]:
        names, forward = LayerInputs(module), module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if not queues[path]:  # the code between modules has taken another branch
                return forward(*args, **kwargs)
            index = queues[path].pop(0)
            found[index] = _inputs(names, args, kwargs)
            output = calls[index].output
            if index == changed:
                return tree_map_only(Tensor, lambda each: _other(each, generator), output)
            return tree_map_only(Tensor, torch.clone, output)

        return run

    with _replaced_forwards(model, queues, replayed):
        outputs = model(**batch)
    return [found.get(index, {}) for index in range(len(calls))], outputs


@contextmanager
def _replaced_forwards(
    model: nn.Module, paths: Sequence[str] | Mapping[str, Any], replacement: Callable[[str, nn.Module], Any]
) -> Iterator[None]:
    modules = {path: model.get_submodule(path) for path in paths}
    own = {path: vars(module).get("forward") for path, module in modules.items()}
    for path, module in modules.items():
        if "forward" not in vars(module) or own[path] is not None:
            module.forward = replacement(path, module)
    try:
        yield
    finally:
        for path, module in modules.items():
            del module.forward
            if own[path] is not None:
                module.forward = own[path]


def _inputs(names: LayerInputs, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Return the tensors of each input, that of the first input called ""; clones, as models change them in place."""
    given = {str(index): value for index, value in enumerate(args)} | dict(kwargs)
    first = names.names[0] if names.names else ""
    found = {"" if name in ("0", first) else name: tensors_of(value) for name, value in given.items()}
    return {name: [tensor.clone() for tensor in tensors] for name, tensors in found.items()}


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in their order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _other(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return another tensor of the same shape and dtype."""
    if tensor.dtype == torch.bool:
        return ~tensor
    if not tensor.is_floating_point():
        return tensor.flatten().flip(0).view(tensor.shape) if tensor.unique().numel() > 1 else tensor + 1
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
    return tensor * (1 + noise / 2) + noise / 4


def different_inputs(one: Mapping[str, list[Tensor]], two: Mapping[str, list[Tensor]]) -> set[str]:
    """Return the names of the inputs that differ between two calls."""
    return {name for name in one.keys() | two.keys() if differ(one.get(name, []), two.get(name, []))}


def differ(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    """Return whether two lists of tensors differ; two values that are no numbers are equal."""
    return len(one) != len(two) or any(
        a.shape != b.shape or not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(one, two, strict=False)
    )


_SMALL = 0.02  # share of the parameters of the largest list below which a list is no place to cut


def execution_order(model: nn.Module, batch: Mapping[str, Any]) -> ExecutionOrder | None:
    """Derive the order in which the parts of a model run; None if it has no list of layers that run one by one.

    The result is not verified: train a small model in stages before you trust it.

    Args:
        model: the whole model, small enough for some dozens of forward passes, without dropout.
        batch: inputs of its forward, with labels.
    """
    calls = recorded_calls(model, [path for path, _ in model.named_modules() if path], lambda: model(**batch))
    lists = _layer_lists(model, calls)
    if not lists:
        return None
    layers = {f"{path}.{index}": path for path in lists for index in range(len(model.get_submodule(path)))}
    called = {call.path for call in calls}
    opened = [
        path
        for path, module in model.named_modules()
        if path and path not in called and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if any(_has_parameters(child) for child in module.children())
    ]
    return _Search(model, batch, layers, opened, list(units_of(model, lists, opened))).order()


def _layer_lists(model: nn.Module, calls: Sequence[Call]) -> list[str]:
    """Return the outermost lists whose modules run once each and in order, those of one list before those of another.

    A module of a list has modules with parameters below it. Of two lists that run in turn, the larger counts.
    """
    when: dict[str, list[int]] = {}
    for index, call in enumerate(calls):
        when.setdefault(call.path, []).append(index)
    found: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(path.startswith(f"{each}.") for each in found):
            continue
        runs = [when.get(f"{path}.{index}", []) for index in range(len(module))]
        is_once = bool(runs) and all(len(run) == 1 for run in runs)
        if is_once and all(any(_has_parameters(each) for each in layer.children()) for layer in module):
            starts = [run[0] for run in runs]
            if starts == sorted(starts):
                found[path] = (starts[0], starts[-1])
    kept: list[str] = []
    sizes = {path: sum(each.numel() for each in model.get_submodule(path).parameters()) for path in found}
    for path in sorted(found, key=lambda path: -sizes[path]):
        start, end = found[path]
        if sizes[path] < _SMALL * max(sizes.values()):
            continue
        if all(end < found[other][0] or found[other][1] < start for other in kept):
            kept.append(path)
    return sorted(kept, key=lambda path: found[path])


class _Search:
    """Replays of a model whose layers (path -> path of their list) and other modules (`units`) are known."""

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        layers: Mapping[str, str],
        opened: Sequence[str],
        units: Sequence[str],
    ) -> None:
        self.model, self.batch, self.layers, self.opened, self.units = model, batch, layers, opened, list(units)
        self.numbers = {path: number for number, path in enumerate(layers)}
        self.every: set[str] = set()
        self.calls: list[Call] = []

    def order(self) -> ExecutionOrder | None:
        self._place()
        self.every |= self._read_directly()
        self._place()
        while further := self._no_place():
            self.every |= further
            self._place()
        groups, parts, ahead = self._groups(), *self._around_layers()
        last = max(i for i, group in enumerate(groups) if set(group) & {self._name(p) for p in self.layers.values()})
        order = [[each for each in group if each not in {**parts, **ahead}] for group in groups[: last + 1]]
        placed = {*parts, *ahead, *sum(order, []), *map(self._name, self.every)}
        return ExecutionOrder(
            order=order,
            layers=self._lengths(),
            parts=parts,
            ahead=ahead,
            every=sorted({self._name(path) for path in self.every}),
            kept=self._kept_by_name(self._kept_outputs()),
            opened=sorted(
                {self._name(path) for path in self.opened if any(u.startswith(f"{path}.") for u in self.units)}
            ),
            calls_forward=any(call.is_direct for call in self.calls if call.path in self.layers),
            behind=sorted({self._name(path) for path in self.units} - placed),
        )

    def _groups(self) -> list[list[str]]:
        return _grouped([self._name(self.layers.get(call.path, call.path)) for call in self._in_turn()])

    def _no_place(self) -> set[str]:
        """Return units that no stage can run alone: called several times, of which one output is kept; in mid-list."""
        times = Counter(call.path for call in self.calls)
        found = {path for path in self._kept_outputs() if times[path] > 1 and path not in self.layers}
        parts, ahead = self._around_layers()
        lists = {self._name(path) for path in self.layers.values()}
        for group in self._groups():
            if len(group) > 1 and lists & set(group):
                placed = {*lists, *parts, *ahead}
                found |= {path for path in self.units if self._name(path) in group and self._name(path) not in placed}
        return found

    def _place(self) -> None:
        """Record the calls of layers and units; units that run in several places run on all stages."""
        self.calls = recorded_calls(self.model, [*self.layers, *self.units], lambda: self.model(**self.batch))
        places: dict[str, set[int]] = {}
        for call, place in zip(self.calls, self._places(), strict=True):
            places.setdefault(call.path, set()).add(place)
            if call.outer is not None:
                self.every.add(call.path)
        self.every |= {path for path, found in places.items() if len(found) > 1}
        self.calls = [call for call in self.calls if call.path not in self.every]

    def _places(self) -> list[int]:
        """Return the number of the layer that last began, for each call."""
        places, number = [], 0
        for call in self.calls:
            number = self.numbers.get(call.path, number)
            places.append(number)
        return places

    def _in_turn(self) -> Iterator[Call]:
        seen = set()
        for call in self.calls:
            if call.path not in seen and self.layers.get(call.path) not in seen:
                yield call
            seen |= {call.path}

    def _name(self, path: str) -> str:
        return starred(path.removeprefix(f"{getattr(self.model, 'base_model_prefix', '')}."))

    def _read_directly(self) -> set[str]:
        """Return units whose parameters the code between modules uses without calling them."""
        inputs, outputs = replay(self.model, self.batch, self.calls)
        read = [tensor for found in inputs for tensors in found.values() for tensor in tensors]
        sums = [tensor.sum() for tensor in [*read, *tensors_of(outputs)] if tensor.requires_grad]
        named = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        grads = torch.autograd.grad(sums, list(named.values()), allow_unused=True) if sums else ()
        used = [name for name, grad in zip(named, grads, strict=False) if grad is not None]
        return {unit for unit in self.units if any(name.startswith(f"{unit}.") for name in used)}

    def _kept_outputs(self) -> dict[str, int]:
        """Return the modules whose outputs stages read that begin after the next layer: path -> number of tensors."""
        places, kept = self._places(), {}
        base, outputs = replay(self.model, self.batch, self.calls)
        for index, (call, place) in enumerate(zip(self.calls, places, strict=True)):
            try:
                inputs, changed = replay(self.model, self.batch, self.calls, changed=index)
                readers = {
                    other: different_inputs(one, two)
                    for other, (one, two) in enumerate(zip(base, inputs, strict=True))
                    if other > index
                }
                is_end = differ(tensors_of(outputs), tensors_of(changed))
            except Exception:  # code between modules may fail for arbitrary values
                readers, is_end = {other: {"", "?"} for other in range(index + 1, len(base))}, True
            needed = is_end and place < len(self.layers) - 1
            for other, names in readers.items():
                reader = self.calls[other].path
                enters = place == places[other] - 1 and reader in self.layers and names <= {""}
                needed |= bool(names) and place < places[other] and not enters
            if needed:
                kept[call.path] = 0 if isinstance(call.output, Tensor) else len(tensors_of(call.output))
        return kept

    def _kept_by_name(self, kept: Mapping[str, int]) -> dict[str, int]:
        """Return `ExecutionOrder.kept`."""
        found = {}
        ends = {path: layer for layer, path in self.layers.items()}  # the last layer of each list
        for path, count in sorted(kept.items()):
            others = [layer for layer, each in self.layers.items() if each == self.layers.get(path) and layer in kept]
            is_last = others == [path] and ends[self.layers[path]] == path
            found[f"{self._name(self.layers[path])}.-1" if is_last else self._name(path)] = count
        return found

    def _around_layers(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return units that run after, and before, a layer with the same number: name -> name of the layers' list."""
        found: dict[str, set[tuple[str, bool] | None]] = {}
        inside: set[str] = set()  # between two layers of one list
        layers = ["", *(call.path for call in self.calls if call.path in self.layers), ""]
        begun = 0
        for call in self.calls:
            if call.path in self.layers:
                begun += 1
                continue
            name, number = self._name(call.path), call.path.rpartition(".")[2]
            after, before = layers[begun : begun + 2]
            same = [path for path in (after, before) if number.isdecimal() and path.rpartition(".")[2] == number]
            found.setdefault(name, set()).add((self.layers[same[0]], same[0] == after) if same else None)
            if self.layers.get(after) == self.layers.get(before):
                inside.add(name)
        places = {name: next(iter(each)) for name, each in found.items() if len(each) == 1 and name in inside}
        return tuple(
            {name: self._name(place[0]) for name, place in places.items() if place and place[1] is is_after}
            for is_after in (True, False)
        )

    def _lengths(self) -> dict[str, int]:
        """Return `ExecutionOrder.layers`."""
        found: dict[str, int] = {}
        for call in (each for each in self.calls if each.path in self.layers):
            name, output = self._name(self.layers[call.path]), call.output
            parts = output if isinstance(output, tuple) else (output,)
            hidden = call.inputs.get("", [None])[0]
            is_kept = isinstance(parts[0], Tensor) and hidden is not None and parts[0].shape == hidden.shape
            is_kept = is_kept and all(each is None for each in parts[1:])
            length = (len(output) if isinstance(output, tuple) else 0) if is_kept else -1
            found[name] = length if found.get(name, length) == length else -1
        return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _grouped(entries: Sequence[str]) -> list[list[str]]:
    """Return the names in the order in which they run; those that run in turn are one group."""
    groups: list[list[str]] = []
    for entry in entries:
        at = next((index for index, group in enumerate(groups) if entry in group), None)
        if at is None:
            groups.append([entry])
        elif at < len(groups) - 1:
            groups[at:] = [[each for group in groups[at:] for each in group]]
    return groups
