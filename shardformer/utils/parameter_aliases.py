"""Other tensors than its parameters for a module, while it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


def alias_parameters(
    module: nn.Module, aliases_of: Callable[[nn.Module, tuple[Any, ...]], Mapping[str, Tensor]]
) -> None:
    """Let the forward of `module` read other tensors than its own parameters.

    Args:
        aliases_of: (module, all inputs of a call) -> the tensors of this call, by names of parameters; nothing for a
            call that reads the parameters.
    """
    calls: list[dict[str, nn.Parameter | None]] = []  # the parameters themselves, by nested calls

    def enter(_: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        aliases = aliases_of(module, (*args, *kwargs.values()))
        calls.append({name: module._parameters[name] for name in aliases})
        module._parameters.update(aliases)

    def leave(*_: Any) -> None:
        module._parameters.update(calls.pop())

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
