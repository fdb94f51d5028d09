"""What other libraries ask of a model before they call it: the signature of its forward, its embeddings, its size."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn

from torch import nn

from booster.errors import ConfigurationError

_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)


class method_as_declared:  # noqa: N801 (a decorator)
    """Decorator of a method whose signature, on each object, is `declared(object)`.

    `inspect.signature(model.forward)` is how Trainer finds the columns of a dataset that a model reads.

    Args:
        declared: object -> signature to show, without `self`; None to show the method's own.
    """

    def __init__(self, declared: Callable[[Any], inspect.Signature | None]) -> None:
        self.declared = declared

    def __call__(self, method: Callable[..., Any]) -> method_as_declared:
        """Take the method."""
        self.method = method
        functools.update_wrapper(self, method)
        return self

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        """Return the method, bound to `instance`; it is made once and kept in the instance's attributes."""
        if instance is None:
            return self.method
        signature, method = self.declared(instance), self.method
        if signature is None:
            return MethodType(method, instance)

        @functools.wraps(method)
        def shown(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        shown.__signature__ = signature.replace(parameters=[_SELF, *signature.parameters.values()])
        return vars(instance).setdefault(method.__name__, MethodType(shown, instance))


class OnAnotherStage(nn.Module):
    """Stands for a module that another pipeline stage holds; it can be asked for, and every use of it is refused.

    Args:
        what: the module, as the model names it.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._problem = f"the {what} of this model lies on another pipeline stage; change or read it before boost()"

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(self._problem)

    forward = register_forward_hook = register_forward_pre_hook = register_full_backward_hook = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._problem)


def size_asked_of(model: nn.Module) -> dict[tuple[bool, bool], int]:
    """Return what `model.num_parameters` says: (only trainable, without embeddings) -> number; empty if it cannot."""
    if not hasattr(model, "num_parameters"):
        return {}
    flags = (False, True)
    return {(trainable, inner): model.num_parameters(trainable, inner) for trainable in flags for inner in flags}
