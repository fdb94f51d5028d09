"""Losses of transformers that sum the numbers of boxes of all ranks, made to count those of their own batch.

The sum is over all ranks of the job, of which only those with the last pipeline stage compute a loss: the others would
never join. Micro-batches and replicas are put together by `HeadLoss`, which knows the counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, update_wrapper
from types import FunctionType
from typing import Any

from torch import nn

from shardformer.utils.source import names_read_by, with_globals

# Names in transformers' losses that ask whether there are other ranks; both losses have a way without them.
_ASKS = ("_is_torch_distributed_initialized", "is_accelerate_available")


class LossOfOneProcess:
    """A loss function of transformers that does not look for other ranks.

    Args:
        function: the function, which is called with other globals.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        update_wrapper(self, function)  # the loss is known by the name of its function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns in a job of one process."""
        return _copied(self.function)(*args, **kwargs)


def count_own_boxes(model: nn.Module) -> None:
    """Replace the loss function of `model` if it sums numbers over all ranks of the job."""
    function = getattr(model, "loss_function", None)
    if isinstance(function, FunctionType) and any(True for _ in _criteria(function)):
        model.loss_function = LossOfOneProcess(function)


@cache
def _copied(function: FunctionType) -> FunctionType:
    return with_globals(function, {name: _derived(each) for name, each in _criteria(function)})


def _criteria(function: FunctionType) -> Iterator[tuple[str, type[nn.Module]]]:
    """Yield the modules, and their names, that the function creates and whose forward asks for other ranks."""
    if not function.__module__.startswith("transformers.loss."):
        return
    for name in names_read_by(function):
        found = inspect.unwrap(function).__globals__.get(name)
        if isinstance(found, type) and issubclass(found, nn.Module) and set(_ASKS) & names_read_by(found.forward):
            yield name, found


def _derived(criterion: type[nn.Module]) -> type[nn.Module]:
    forward = with_globals(criterion.forward, dict.fromkeys(_ASKS, lambda: False))
    return type(criterion.__name__, (criterion,), {"forward": forward})
