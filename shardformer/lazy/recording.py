"""record_module_init: a context in which models are built without values, and their initialization is recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from shardformer.lazy.dispatch_mode import DispatchRecorder, FunctionRecorder
from shardformer.lazy.init_log import InitLog
from shardformer.lazy.replay import remember

_is_recording: ContextVar[bool] = ContextVar("is_recording", default=False)


@contextmanager
def record_module_init(allow_bin: bool = False) -> Iterator[None]:
    """Build models without values; `boost` then loads the shards of each rank, `materialize` loads the whole model.

    Parameters and buffers are on the meta device afterwards. Each module keeps its constructor's arguments in
    `_init_args` and `_init_kwargs`. `from_pretrained` reads only names and shapes of a directory's weights; the values
    are read, slice by slice, when they are needed. Everything else, including initialization, runs as usual.

    Args:
        allow_bin: let `from_pretrained` read `.bin` files, by `torch.load(weights_only=True)`.

    Example:
        ```python
        with record_module_init():
            model = LlamaForCausalLM(LlamaConfig())
        model, optimizer = booster.boost(model, optimizer)
        ```
    """
    if _is_recording.get():
        yield  # the outer context records
        return
    log, modules = InitLog(), []
    recorder = DispatchRecorder(log)
    with ExitStack() as stack:
        stack.callback(_is_recording.reset, _is_recording.set(True))
        if find_spec("transformers") is not None:
            from shardformer.lazy.pretrained import files_are_read_later

            stack.enter_context(files_are_read_later(recorder, allow_bin))
        stack.enter_context(_arguments_kept(modules))
        stack.enter_context(_truncated_normal_is_one_step(recorder))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(0)  # makes draws that are not logged equal on all ranks
        stack.enter_context(FunctionRecorder(recorder))
        stack.enter_context(recorder)
        yield
    for module in modules:
        remember(module, log)


LazyInitContext = record_module_init


@contextmanager
def _arguments_kept(modules: list[nn.Module]) -> Iterator[None]:
    """Collect the modules that are created, and store the constructor's arguments in each."""
    originals: list[tuple[type, Callable[..., None]]] = []

    def wrap(cls: type) -> None:
        original = cls.__dict__["__init__"]

        @functools.wraps(original)
        def keeping(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            if "_init_args" not in self.__dict__:  # skip calls of a base class's __init__
                self.__dict__.update(_init_args=args, _init_kwargs=kwargs)
                modules.append(self)
            original(self, *args, **kwargs)

        originals.append((cls, original))
        cls.__init__ = keeping

    def of_new_class(cls: type, **kwargs: Any) -> None:
        super(nn.Module, cls).__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            wrap(cls)

    try:
        for cls in _classes(nn.Module):
            if "__init__" in cls.__dict__:
                wrap(cls)
        nn.Module.__init_subclass__ = classmethod(of_new_class)
        yield
    finally:
        if "__init_subclass__" in nn.Module.__dict__:
            del nn.Module.__init_subclass__
        for cls, original in originals:
            cls.__init__ = original


def _classes(cls: type) -> set[type]:
    return {cls}.union(*map(_classes, cls.__subclasses__()))


@contextmanager
def _truncated_normal_is_one_step(recorder: DispatchRecorder) -> Iterator[None]:
    """Log truncated-normal initialization as one step: torch redraws until values fit, and there are no values here."""
    init = torch.nn.init
    original = init._no_grad_trunc_normal_

    @functools.wraps(original)
    def recorded(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        if not recorder.log.knows(tensor):
            return original(tensor, mean, std, a, b, generator)
        recorder.overwrite(original, tensor, mean, std, a, b)
        return tensor

    init._no_grad_trunc_normal_ = recorded
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original
