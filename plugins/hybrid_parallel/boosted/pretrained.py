"""`save_pretrained`, `push_to_hub` and `state_dict` of a model of which each rank has a part, and of modules inside it.

Scripts call them on the boosted model, on what `unwrap` or `model.module` gives, or on an encoder inside of it. All
ranks do, as under DistributedDataParallel with `is_main_process`; or rank 0 alone, for which the others write files.
"""

from __future__ import annotations

import inspect
import shutil
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from booster import failure
from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.guards import GuardedModel, LocalState, WholeState
from shardformer.distributed.process_groups import all_gather_json
from shardformer.peft.kinds import is_a
from shardformer.shard_spec import spec_of
from shardformer.stages.placeholders import StagePlaceholder

_log = get_logger(__name__)
_METHODS = ("save_pretrained", "push_to_hub")
# Arguments of `save_pretrained` that writing from all ranks knows; with others, rank 0 writes the gathered weights.
_STREAMED = frozenset(("is_main_process", "save_function", "max_shard_size", "safe_serialization", "state_dict"))
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "safetensors", "booster")
_STATE = "_state_of_rank"  # attribute of a module whose state dict is a part


def write_whole(model: GuardedModel) -> None:
    """Let the modules of a boosted model write whole weights, and mark their state dicts that are a part of them."""
    if (requests := failure.requests()) is not None:
        model.files.number = len(requests.answers)
        requests.answers.append(partial(_write_part, weakref.ref(model)))
    for path, module in model.module.named_modules():
        for method in _METHODS:
            if hasattr(type(module), method):
                vars(module)[method] = _WholeCall(model, module, path, method)
        if not model.is_whole and (path == "" or _is_cut(module)):
            if _STATE not in vars(module):
                module._register_state_dict_hook(_mark)
            vars(module)[_STATE] = _WholeCall(model, module, path, "state_dict")


def _write_part(model: weakref.ref[GuardedModel], directory: str) -> list[Any]:
    return model().files.io().write_part(model(), directory)


def _is_cut(module: nn.Module) -> bool:
    return any(isinstance(each, StagePlaceholder) for each in module.modules()) or any(
        spec_of(param).full_shape != tuple(param.shape) for param in module.parameters()
    )


def _mark(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> LocalState | None:
    return None if prefix else LocalState(state, vars(module)[_STATE].gathered)


class _WholeCall:
    """A method of a module of a boosted model, that works on whole weights.

    Args:
        model: the boosted model.
        module: the model inside it, or a module of that.
        path: name of the module there; empty for the model itself.
        method: name of the method.
    """

    def __init__(self, model: GuardedModel, module: nn.Module, path: str, method: str) -> None:
        self.model, self.module, self.path, self.method = model, module, path, method

    def __deepcopy__(self, memo: dict[int, Any]) -> _WholeCall:
        return self  # the copy of the model replaces it by its own

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigurationError(
            "a model that boost() has sharded cannot be pickled; use model.save_pretrained(folder)"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the module's class; all ranks call it, unless each has, or is given, the whole weights.

        Raises:
            ConfigurationError: if `state_dict` is one rank's part, or the folder cannot be written; on all ranks.
        """
        plain = getattr(type(self.module), self.method).__get__(self.module)
        given = kwargs.get("state_dict")
        has_all = self.model.is_whole and not self.model.gathers
        if has_all or (given is not None and self._is_whole(given)):
            if has_all or not (isinstance(given, WholeState) and self._reads_stages()):
                return plain(*args, **kwargs)
            del kwargs["state_dict"]  # of the same weights
        if self.model.files.state is not None:  # called by push_to_hub
            return plain(*args, **kwargs | {"state_dict": self._of_module(self.model.files.state)})
        return self._save(plain, args, kwargs)

    def gathered(self) -> dict[str, Tensor]:
        """Return the whole state dict of the module, in host memory; all ranks call it, or rank 0 alone."""
        state = self._joined_alone("model")
        return dict(self._of_module(self.model.files.io().whole_state_dict(self.model)) if state is None else state)

    def _save(self, plain: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        options = inspect.signature(plain).bind(*args, **kwargs).arguments
        options |= options.pop("kwargs", {})
        state = self._joined_alone(str(options.get("save_directory", "model")))
        streams = self.method == "save_pretrained" and not self.path and self._may_stream(options)
        if self._reads_stages() and (state is not None or not streams):
            raise ConfigurationError(
                f"model.{self.method}() of peft writes the adapters of rank 0's modules, and other stages have theirs; "
                "call model.save_pretrained(folder) of the whole model on all ranks, and upload the folder"
            )
        if state is not None:
            return self._write(plain, args, kwargs, state)
        if streams:
            folder = all_gather_json(str(options["save_directory"]))[0]  # each rank may have made one of its own
            self.model.files.io().save_model(self.model, folder, _size(plain, options))
            return None
        state = self._of_module(self.model.files.io().whole_state_dict(self.model))
        return raise_on_all_ranks(lambda: self._write(plain, args, kwargs, state) if dist.get_rank() == 0 else None)

    def _joined_alone(self, folder: str) -> WholeState | None:
        """Return the module's whole state if rank 0 calls alone, from files of the others; None if all ranks call."""
        requests = failure.requests()
        if requests is None or requests.joins():
            return None
        aside = str(Path(f"{folder}-parts").resolve())
        _log.warning("rank 0 alone calls model.%s(); the other ranks write their parts to %s", self.method, aside)
        parts = requests.ask(self.model.files.number, aside)
        if problem := next((each["error"] for each in parts if isinstance(each, dict)), None):
            raise ConfigurationError(f"model.{self.method}() by rank 0 alone: {problem}; call it on all ranks")
        state = self.model.files.io().joined_parts(self.model, aside, parts)
        shutil.rmtree(aside, ignore_errors=True)
        return self._of_module(state)

    def _write(self, plain: Callable[..., Any], args: tuple, kwargs: dict[str, Any], state: WholeState) -> Any:
        if self.method == "save_pretrained":
            return plain(*args, **kwargs | {"state_dict": state})
        self.model.files.state = state
        try:
            return plain(*args, **kwargs)
        finally:
            self.model.files.state = None

    def _reads_stages(self) -> bool:
        """Return whether the method looks for adapters of peft among modules, of which each stage has its own."""
        is_adapted = is_a(self.module, "model") or bool(getattr(self.module, "modules_to_save", None))
        return self.model.mesh.size("pp") > 1 and is_adapted

    def _may_stream(self, options: Mapping[str, Any]) -> bool:
        function = options.get("save_function")
        kinds = (plain.__module__ for plain in (getattr(type(self.module), self.method), function) if plain is not None)
        return (
            set(options) - {"save_directory"} <= _STREAMED
            and options.get("safe_serialization", True)
            and all((kind or "").partition(".")[0] in _LIBRARIES for kind in kinds)
        )

    def _is_whole(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state dict has whole tensors, of the script's own making too; refuse one rank's part."""
        if isinstance(state, WholeState) or not state:
            return True
        own = dict(self.module.named_parameters(remove_duplicate=False))
        shapes = {name: spec_of(param).full_shape for name, param in own.items()}
        cut = any(tuple(value.shape) != shapes.get(name, tuple(value.shape)) for name, value in state.items())
        has_stage = self.model.mesh.size("pp") > 1 and set(state) <= set(self.module.state_dict())
        if cut or has_stage or isinstance(state, LocalState):
            raise ConfigurationError(
                f"model.{self.method}() got a state_dict that is this rank's part of the model alone; leave it out, on "
                "all ranks, or give state_dict=accelerator.get_state_dict(model)"
            )
        return True

    def _of_module(self, state: Mapping[str, Tensor]) -> WholeState:
        start = f"{self.path}." if self.path else ""
        return WholeState({name.removeprefix(start): each for name, each in state.items() if name.startswith(start)})


def _size(plain: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """Return the largest size of a file, which transformers gives in bytes or as a string."""
    size = options.get("max_shard_size")
    if size is None:
        with suppress(KeyError):
            size = inspect.signature(plain).parameters["max_shard_size"].default
    return f"{size / 1e3:f}KB" if isinstance(size, int) else size or "50GB"
