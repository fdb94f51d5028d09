"""record_module_init: a context in which models are built without values, and their initialization is recorded.

In it, `from_pretrained` runs transformers' loader with tensors without values, whose steps in the log read the files
later. The loader renames, converts, casts, ties, initializes and reports as usual, and all of that is logged.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardformer.lazy import weight_files
from shardformer.lazy.materialize import InitLog, RecordedValues, StorageView, remember, undisturbed
from shardformer.shard_spec import ShardSpec

_aten = torch.ops.aten
_OVERWRITING = {
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
    _aten.copy_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.bernoulli_.float,
}
_UNSET = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_SEED = 0  # for values read while the model is built, when no other seed is known


class DispatchRecorder(TorchDispatchMode):
    """Logs every operation that makes or changes a tensor."""

    def __init__(self, log: InitLog) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # here tensors report their real device
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is _aten.lift_fresh.default:
            return self._constant(args[0])
        if any(map(self.log.knows, inputs)):
            return self._record_known(func, args, kwargs, inputs)
        if inputs or not _takes(func, "device") or kwargs.get("generator") is not None:
            return func(*args, **kwargs)  # depends on real values only, such as a numpy table
        return self._record(func, args, kwargs, inputs)

    def overwrite(self, function: Callable[..., Any], tensor: Tensor, *args: Any) -> None:
        """Log a function that overwrites all of `tensor` with random values."""
        place = StorageView.of(tensor)
        overwrites = place.storage if place.is_whole else None
        self.log.add(
            function, (place, *args), {}, results=(), writes=[place.storage], overwrites=overwrites, draws=True
        )

    def constant(self, make: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Return a tensor without values whose values `make` returns; `like` has its shape and dtype."""
        made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
        self.log.add(make, (), {}, results=[(0, StorageView.of(made))], writes=[made.untyped_storage()])
        return made

    def value_of(self, tensor: Tensor) -> Tensor:
        """Return the values of a logged tensor; return any other tensor unchanged."""
        return self.log.values([StorageView.of(tensor)], _SEED)[0] if self.log.knows(tensor) else tensor

    def _constant(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor  # created on the meta device by user code
        values = tensor.detach().clone()
        return self.constant(values.clone, values)

    def _record_known(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        if _is_view(func):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if any(not tensor.is_meta for tensor in written) or not _returns_tensors(func):
            return func(*tree_map_only(Tensor, self.value_of, args), **tree_map_only(Tensor, self.value_of, kwargs))
        try:
            return self._record(func, args, kwargs, inputs)
        except (NotImplementedError, RuntimeError):
            # The output shape depends on values (nonzero), or the operator has no meta kernel.
            if written:
                raise
            values = [tree_map_only(Tensor, self.value_of, each) for each in (args, kwargs)]
            return tree_map_only(Tensor, self._constant, func(*values[0], **values[1]))

    def _record(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        if "generator" in kwargs:
            kwargs["generator"] = None  # a generator's draws would depend on the order of draws
        if _takes(func, "device"):
            kwargs["device"] = torch.device("meta")
            kwargs.pop("pin_memory", None)
        places = {id(tensor): StorageView.of(tensor) if tensor.is_meta else tensor.clone() for tensor in inputs}
        before = [tensor.untyped_storage() for tensor in inputs]
        written = _written(func, args, kwargs)
        returned = func(*_without_values(args), **_without_values(kwargs))
        fresh = [
            (position, StorageView.of(tensor))
            for position, tensor in enumerate(tree_leaves(returned))
            if isinstance(tensor, Tensor) and all(tensor.untyped_storage() is not storage for storage in before)
        ]
        if not inputs and _takes(func, "dtype") and len(fresh) == 1:
            kwargs["dtype"] = fresh[0][1].dtype  # the default dtype may differ at replay
        self._log(func, args, kwargs, places, fresh, written)
        return returned

    def _log(self, func: Any, args: Any, kwargs: Any, places: Any, fresh: Any, written: list[Tensor]) -> None:
        writes = [place.storage for _, place in fresh] + [tensor.untyped_storage() for tensor in written]
        if not writes:
            return
        whole = func in _OVERWRITING and places[id(args[0])].is_whole
        source_is_other = all(each is not args[0].untyped_storage() for each in _sources(args)) if whole else False
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        logged_args, logged_kwargs = tree_map_only(Tensor, lambda tensor: places[id(tensor)], (args, kwargs))
        self.log.add(
            _zeros_for(func) if func in _UNSET else func,
            logged_args,
            logged_kwargs,
            results=fresh,
            writes=writes,
            overwrites=writes[0] if whole and source_is_other else None,
            draws=torch.Tag.nondeterministic_seeded in func.tags,
        )


class FunctionRecorder(TorchFunctionMode):
    """Answers queries of tensors that are not operations, such as `device` and `tolist`."""

    def __init__(self, recorder: DispatchRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS and self.recorder.log.knows(args[0]):
            return _QUESTIONS[func](self.recorder, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _of_values(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda recorder, tensor, *args, **kwargs: method(recorder.value_of(tensor), *args, **kwargs)


# Property getters and methods that are not operations: function -> answer.
_QUESTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda recorder, tensor: torch.device("cpu"),
    Tensor.is_meta.__get__: lambda recorder, tensor: False,
    Tensor.is_cpu.__get__: lambda recorder, tensor: True,
    Tensor.tolist: _of_values(Tensor.tolist),
    Tensor.numpy: _of_values(Tensor.numpy),
    Tensor.__array__: _of_values(Tensor.__array__),
}


def _zeros_for(func: Any) -> Callable[..., Tensor]:
    """Return `func` followed by zeroing: uninitialized memory becomes 0, so that it is the same everywhere."""
    return lambda *args, **kwargs: func(*args, **kwargs).zero_()


def _without_values(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor if tensor.is_meta else tensor.to("meta"), tree)


def _sources(args: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(args[1:]) if isinstance(leaf, Tensor)]


def _takes(func: Any, name: str) -> bool:
    return any(argument.name == name for argument in func._schema.arguments)


def _returns_tensors(func: Any) -> bool:
    returns = func._schema.returns
    return not returns or any("Tensor" in str(each.type) for each in returns)


def _is_view(func: Any) -> bool:
    infos = [each.alias_info for each in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation changes."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return written


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


@contextmanager
def files_are_read_later(recorder: DispatchRecorder, allow_bin: bool) -> Iterator[None]:
    """Give transformers' loader tensors whose values are still in the files."""
    from transformers import PreTrainedModel

    original = PreTrainedModel._load_pretrained_model

    def loading(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        if state_dict is None and checkpoint_files:
            if load_config.hf_quantizer is not None:
                raise ValueError(
                    f"{type(model).__name__} is quantised, and quantised weights cannot be read later; build it "
                    "outside of record_module_init()"
                )
            paths = [Path(file) for file in checkpoint_files]
            weight_files.check_paths(paths, Path(load_config.pretrained_model_name_or_path), allow_bin)
            with undisturbed():
                state_dict = {name: tensor for path in paths for name, tensor in _tensors_of(path, recorder)}
        # No loader threads: the recorder sees only the operations of its own thread.
        with mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"):
            return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    PreTrainedModel._load_pretrained_model = staticmethod(loading)
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(original)


@dataclass(frozen=True)
class FileTensor:
    """Reads one tensor of a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def __call__(self) -> Tensor:
        """Read the whole tensor."""
        return self.piece(ShardSpec(self.shape))

    def piece(self, spec: ShardSpec) -> Tensor:
        """Read the piece that `spec` defines, and only that."""
        return weight_files.read_piece(self.path, self.name, spec)


@dataclass(frozen=True)
class BinTensor:
    """Reads one tensor of a file written by torch.save."""

    path: Path
    name: str

    def __call__(self) -> Tensor:
        """Read the whole tensor."""
        return self._mapped().clone()

    def piece(self, spec: ShardSpec) -> Tensor:
        """Read the piece that `spec` defines; the file is memory-mapped."""
        return spec.shard(self._mapped())

    def _mapped(self) -> Tensor:
        return _load_bin(self.path)[self.name]


def _load_bin(path: Path) -> dict[str, Tensor]:
    with weight_files.refuses_code(str(path)):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _tensors_of(path: Path, recorder: DispatchRecorder) -> Iterator[tuple[str, Tensor]]:
    """Yield name and a tensor without values for every tensor of a file."""
    if path.suffix != ".safetensors":
        for name, values in _load_bin(path).items():
            yield name, recorder.constant(BinTensor(path, name), values)
        return
    with weight_files.open_tensors(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            view = file.get_slice(name)
            shape = tuple(view.get_shape())
            dtype = (view[:0] if shape else view[...]).dtype
            like = torch.empty(shape, dtype=dtype, device="meta")
            yield name, recorder.constant(FileTensor(path, name, shape), like)


@dataclass(frozen=True)
class Opened:
    """The weights of a directory, matched to a model."""

    values: RecordedValues  # values of the model's parameters and buffers, read piece by piece
    missing: list[str]  # names that the files lack
    unexpected: list[str]  # names that the model lacks
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # (name, shape in the files, shape in the model)


def open_directory(model_class: type, config: Any, directory: Path, dtype: torch.dtype, allow_bin: bool) -> Opened:
    """Open a directory's weights as `from_pretrained` of a model class does, or raise WeightFileError."""
    if not (allow_bin and weight_files.has_bin_files(directory)):
        weight_files.weight_files(directory)  # given a missing directory, transformers would search its hub
    try:
        with record_module_init(allow_bin), _without_progress_bar():
            model, info = model_class.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
            )
    except (RuntimeError, KeyError) as error:
        raise weight_files.WeightFileError(
            f"{directory} cannot be read as a {model_class.__name__}: {error}"
        ) from error
    mismatched = [(name, tuple(found), tuple(expected)) for name, found, expected in info["mismatched_keys"]]
    return Opened(
        RecordedValues(model, seed=0), sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), sorted(mismatched)
    )


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Hide the progress bar: no value is read here, and every rank would show one."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
