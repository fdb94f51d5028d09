"""Other tensors than its parameters for a module, while it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

Aliases = Callable[[nn.Module, tuple[Any, ...]], Mapping[str, Tensor]]


def alias_parameters(module: nn.Module, aliases_of: Aliases, during: nn.Module | None = None) -> None:
    """Let the forward of `module` read other tensors than its own parameters.

    Args:
        aliases_of: (module, all inputs of a call) -> the tensors of this call, by names of parameters; nothing for a
            call that reads the parameters.
        during: the module that reads the parameters of `module` in its own forward; None for `module` itself.
    """
    _alias(module, module._parameters, aliases_of, during or module)


def alias_buffers(module: nn.Module, aliases_of: Aliases) -> None:
    """Let the forward of `module` read other tensors than its own buffers, see `alias_parameters`."""
    _alias(module, module._buffers, aliases_of, module)


def _alias(module: nn.Module, held: dict[str, Tensor | None], aliases_of: Aliases, during: nn.Module) -> None:
    calls: list[dict[str, Tensor | None]] = []  # the tensors themselves, by nested calls

    def enter(_: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        aliases = aliases_of(module, (*args, *kwargs.values()))
        calls.append({name: held[name] for name in aliases})
        held.update(aliases)

    def leave(*_: Any) -> None:
        held.update(calls.pop())

    during.register_forward_pre_hook(enter, with_kwargs=True)
    during.register_forward_hook(leave, always_call=True)
