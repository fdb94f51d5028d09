"""Recorded calls of modules, and forward passes in which modules return what they have returned before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from shardformer.stages.placeholders import LayerInputs

Forward = Callable[[], Any]


@dataclass
class Call:
    """A call of a module.

    Attributes:
        path: of the module.
        inputs: name of an input, "" for the first -> its tensors.
        output: what the module returned, detached.
        outer: path of the module inside of which it ran, of those that are recorded; None if there is none.
        is_direct: whether `forward` was called instead of the module.
    """

    path: str
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    output: Any = None
    outer: str | None = None
    is_direct: bool = False


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
