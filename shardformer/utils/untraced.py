"""Functions that `torch.compile` never traces: it calls them between its graphs, or once, while it traces.

Whether code runs in a backward pass, where layers are recomputed; and recomputation by operators.

The latter saves the results of a layer's matrix products and attention, and computes the rest again. Batched products
are of the rest: those of attention that is written out make scores, which grow with the square of the sequence. The
contexts are for `torch.utils.checkpoint`. Its own selective checkpointing detects a write to a saved result by the
version of a tensor, which `F.linear` renews, so that layers that write there (DeBERTa, ConvBERT) get other gradients.

Changes of a module that keep its identity: the only places where a module gets another class.

Elsewhere a layer that works differently is replaced (`derived_modules.py`). The modules here are the user's: the model
that was handed in, or a customized layer that the user's own code may call by a reference that no replacement reaches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_UNTRACED: list[Any] = []
_CONSTANT: list[Callable[..., Any]] = []
_OPERATORS: list[Callable[[], None]] = []


def untraced(function: Callable[..., Any]) -> Any:
    """Keep a function out of the graphs of compiled layers: it communicates, or writes to memory that they do not know.

    A traced collective is replaced by another one (`collectives.py` has those that are traced), and a gradient buffer
    would be written while it is traced. `torch.compiler.disable` imports the compiler, which takes longer than this
    package; `prepare_tracing` calls it.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call.between_graphs(*args, **kwargs)
        return function(*args, **kwargs)

    call.between_graphs = function
    _UNTRACED.append(call)
    return call


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have `torch.compile` call a function of constants while it traces, and take what it returns for a constant."""
    _CONSTANT.append(function)
    return function


def prepare_tracing() -> None:
    """Import the compiler, and exclude the functions that `untraced` has marked; call this before anything compiles."""
    for call in _UNTRACED:
        if call.between_graphs is call.__wrapped__:  # another object would make graphs that call it invalid
            call.between_graphs = torch.compiler.disable(call.__wrapped__)
    for function in _CONSTANT:
        torch.compiler.assume_constant_result(function)


def defines_operators(function: Callable[[], None]) -> Callable[[], None]:
    """Let `define_operators` call a function once: `torch.library` loads all modules that load themselves when used."""
    _OPERATORS.append(cache(function))
    return _OPERATORS[-1]


def define_operators() -> None:
    """Define the operators of graphs; call this before anything compiles."""
    for define in _OPERATORS:
        define()


def is_compiler_loaded() -> bool:
    """Return whether something has imported the compiler, as most models of transformers do."""
    return "torch._dynamo" in sys.modules


_PRODUCTS = {"mm", "addmm", "convolution", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm"}


def current_pass() -> int:
    """Return the number of the backward pass that autograd runs on this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread."""
    return current_pass() != -1


def contexts_by_operators() -> tuple[SavedResults, SavedResults]:
    """Return the contexts of the forward pass and of the recomputation of one call of a layer, for `checkpoint`."""
    results: list[Any] = []
    return SavedResults(results, replays=False), SavedResults(results, replays=True)


def computed_once(function: Callable[[], Any]) -> Any:
    """Return what `function` does: tensors, without gradients; recomputation by operators saves them and skips it.

    It may communicate: all ranks skip it.
    """
    running = saved_results.get()
    return function() if running is None else running.result(function)


class SavedResults(TorchDispatchMode):
    """The context of a forward pass, which saves results, or of a recomputation, which takes them instead of computing.

    Args:
        results: the saved results, in the order of the operators; both contexts have the same list.
        replays: whether this is a recomputation.
    """

    supports_higher_order_operators = True

    def __init__(self, results: list[Any], *, replays: bool) -> None:
        super().__init__()
        self._results, self._replays = results, replays
        self._tokens: list[Token] = []

    def __enter__(self) -> SavedResults:
        """Begin at the first operator: a graph that is retained is recomputed several times."""
        self._next, self._computes_once = 0, False
        self._places: dict[int, list[int]] = {}  # memory -> the results that are in it
        self._tokens.append(saved_results.set(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        saved_results.reset(self._tokens.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._computes_once:
            return func(*args, **kwargs)
        for memory in _written(func, args, kwargs):
            for place in self._places.pop(memory, ()):
                self._results[place] = tree_map_only(Tensor, torch.clone, self._results[place])
        return (
            self._result(partial(func, *args, **kwargs)) if is_saved(func, *args, **kwargs) else func(*args, **kwargs)
        )

    def result(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function whose operators are not looked at, see `computed_once`."""
        self._computes_once = True
        try:
            return self._result(function)
        finally:
            self._computes_once = False

    def _result(self, compute: Callable[[], Any]) -> Any:
        if self._replays:
            found = tree_map_only(Tensor, torch.detach, self._results[self._next])
        else:
            found = compute()
            self._results.append(tree_map_only(Tensor, torch.detach, found))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._places.setdefault(tensor.untyped_storage()._cdata, []).append(self._next)
        self._next += 1
        return found


# Of the layer that runs, or is recomputed; None if it does not save results.
saved_results: ContextVar[SavedResults | None] = ContextVar("saved_results", default=None)


def is_saved(operator: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether recomputation by operators saves the results of an operator that is called like this."""
    can_be, place, _ = _facts(operator)
    # A kernel that is skipped draws no numbers, so that later dropout would see others than in the forward pass.
    draws = place is not None and (kwargs.get("dropout_p") or args[place : place + 1] > (0.0,))
    return can_be and not draws


def _written(operator: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[int]:
    """Yield the memory that an operator writes to."""
    for place, name in _facts(operator)[2]:
        for tensor in tree_leaves(kwargs.get(name, args[place] if place < len(args) else None)):
            if isinstance(tensor, Tensor):
                yield tensor.untyped_storage()._cdata


@cache
def _facts(operator: Any) -> tuple[bool, int | None, tuple[tuple[int, str], ...]]:
    """Return whether results of an operator can be saved, the place of its `dropout_p`, and the arguments it writes."""
    schema = getattr(operator, "_schema", None)
    if schema is None:  # an operator that calls functions, such as FlexAttention
        return False, None, ()
    (namespace, name), arguments = schema.name.split("::"), schema.arguments
    names = [each.name for each in arguments]
    is_attention = any(word in f"{namespace} {name}" for word in ("attention", "attn"))
    communicates = namespace == "c10d"  # whose schemas do not tell
    writes = (each.alias_info is not None and each.alias_info.is_write or communicates for each in arguments)
    return (
        is_attention or (namespace == "aten" and name in _PRODUCTS),
        names.index("dropout_p") if "dropout_p" in names else None,
        tuple((place, each) for place, (each, is_written) in enumerate(zip(names, writes, strict=True)) if is_written),
    )


# (the module's own call, args, kwargs) -> what the caller gets
OuterCall = Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]


def call_through(module: nn.Module, outer: OuterCall) -> None:
    """Route every call of `module` through `outer`, outside of all of its hooks, including those registered later.

    Python looks up `__call__` on the class, so this needs a derived class.
    """
    native = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return outer(partial(native.__call__, self), args, kwargs)

    set_class(module, type(native.__name__, (native,), {"__call__": call, "__module__": native.__module__}))


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give `module` the methods of another class."""
    module.__class__ = cls
