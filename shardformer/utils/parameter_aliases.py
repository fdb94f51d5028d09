"""Other tensors than its parameters for a module, while it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

Aliases = Callable[[nn.Module, tuple[Any, ...]], Mapping[str, Tensor]]


def alias_parameters(module: nn.Module, aliases_of: Aliases, during: nn.Module | None = None) -> None:
    """Let the forward of `module` read other tensors than its own parameters.

    Args:
        aliases_of: (module, all inputs of a call) -> the tensors of this call, by paths of parameters in the module;
            nothing for a call that reads the parameters.
        during: the module that reads the parameters of `module` in its own forward; None for `module` itself.
    """
    _alias(module, "_parameters", aliases_of, during or module)


def alias_buffers(module: nn.Module, aliases_of: Aliases) -> None:
    """Let the forward of `module` read other tensors than its own buffers, see `alias_parameters`."""
    _alias(module, "_buffers", aliases_of, module)


def _alias(module: nn.Module, kind: str, aliases_of: Aliases, during: nn.Module) -> None:
    calls: list[dict[str, Tensor | None]] = []  # the tensors themselves, by nested calls

    def exchange(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        native = {}
        for path, tensor in tensors.items():
            owner, _, name = path.rpartition(".")
            held = getattr(module.get_submodule(owner), kind)
            native[path], held[name] = held[name], tensor
        return native

    def enter(_: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        calls.append(exchange(aliases_of(module, (*args, *kwargs.values()))))

    def leave(*_: Any) -> None:
        exchange(calls.pop())

    during.register_forward_pre_hook(enter, with_kwargs=True)
    during.register_forward_hook(leave, always_call=True)
