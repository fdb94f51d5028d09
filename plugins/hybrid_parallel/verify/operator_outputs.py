"""Record what the lines of one module's code return, to find the first that differs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plugins.hybrid_parallel.verify.module_outputs import OutputLog
from shardformer.utils.outer_call import call_through


class OperatorLog(OutputLog):
    """Recorder of what the lines of a file return during the calls of one module.

    Operators that other files call are left out: those are this library's, or torch's, and may divide values in a way
    of their own.

    Args:
        model: the whole model or a rank's part.
        path: path of the module; nothing is recorded if it is on another stage.
        file: the modeling code of the module.
    """

    def __init__(self, model: nn.Module, path: str, file: str) -> None:
        self._outputs = {}
        self.begin_microbatch(0)
        mode = _Lines(file, self._add)

        def call(own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            with mode:
                return own(*args, **kwargs)

        module = dict(model.named_modules()).get(path)
        if module is not None:
            call_through(module, call)

    def _add(self, line: str, output: Any) -> None:
        if isinstance(output, Tensor):
            self._after(line, _NOTHING, (), output.detach())


class _Lines(TorchFunctionMode):
    def __init__(self, file: str, add: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._file, self._add = file, add

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = function(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if frame.f_code.co_filename == self._file:
            with torch._C.DisableTorchFunction():
                name = getattr(function, "__name__", "operator")
                self._add(f"{name} in line {frame.f_lineno}", output)
        return output


_NOTHING = nn.Module()  # whose weight is not divided
_TORCH = os.path.dirname(torch.__file__)
