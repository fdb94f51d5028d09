"""The parts of `Accelerator` that join values over replicas, and write and open folders of training states."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from booster.booster import Booster
from booster.errors import ConfigurationError
from booster.integrations.arguments import check_number, refuse_options
from booster.integrations.replicas import Replicas, holds_tensors, map_tensors
from booster.plugin import take_state
from shardformer.distributed.process_groups import world_group
from shardformer.utils.typed_json import from_json, read_json_object, to_json

_STATE = "booster"  # folder of the first model's checkpoint; those of others have a number


class StateFolders:
    """Mixin before accelerate's `Accelerator`."""

    booster: Booster
    step: int  # number of batches since the last complete group of accumulated ones
    project_configuration: Any
    project_dir: str | None
    save_iteration: int
    is_main_process: bool
    use_stateful_dataloader: bool
    step_scheduler_with_optimizer: bool
    gradient_accumulation_steps: int
    wait_for_everyone: Callable[[], None]
    _models: list[nn.Module]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]
    _custom_objects: list[Any]

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Write the whole training state, which opens under any layout; return its folder. All ranks call it.

        It holds models, optimizers, schedulers, loaders, random states, and objects of `register_for_checkpointing`.

        Raises:
            ConfigurationError: if a model has several optimizers, the folder exists already under automatic naming, or
                for options of another engine.
        """
        refuse_options("save_state", options)
        folder = self._new_folder(output_dir)
        self._save(folder)
        self._remove_oldest()
        self.project_configuration.iteration += 1
        return str(folder)

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **options: Any) -> None:
        """Load what `save_state` wrote, under this layout or another.

        Loaders begin the epoch that was under way from its start, in the same order of samples; `skip_first_batches`
        skips what was seen, or `DataLoaderConfiguration(use_stateful_dataloader=True)` does.

        Raises:
            ConfigurationError: if there is no such state, or it is of other objects.
        """
        refuse_options("load_state", options | (load_kwargs or {}))
        self._load(self._latest_folder() if input_dir is None else Path(input_dir))

    def register_save_state_pre_hook(self, hook: Any) -> NoReturn:
        """Refuse hooks, which expect the whole weights of each model."""
        raise ConfigurationError(
            "register_save_state_pre_hook() gives a hook the weights of whole models, which no rank has while a state "
            "is saved; call accelerator.save_model(model, folder) after save_state(), or register_for_checkpointing()"
        )

    def register_load_state_pre_hook(self, hook: Any) -> NoReturn:
        """Refuse hooks, which would load whole weights."""
        raise ConfigurationError(
            "register_load_state_pre_hook() gives a hook models to load whole weights into, which no rank has; call "
            "accelerator.booster.load_model(model, folder) after load_state()"
        )

    def _save(self, folder: Path) -> None:
        """Write the state, plain data, of all prepared and registered objects; all ranks call it."""
        groups = self._groups()
        for each in self._custom_objects:
            _write_custom(each, None)
        extra = {
            "step": self.step,
            "schedulers": [each.scheduler.state_dict() for each in self._schedulers],
            "samples_per_step": self._samples_per_step(),
            "loaders": [each.state_dict() for each in self._dataloaders],
        }
        for index, group in enumerate(groups):
            self.booster.save_checkpoint(_path(folder, index), **group, **({} if index else extra))
        if self.is_main_process:
            for index, each in enumerate(self._custom_objects):
                _write_custom(each, _custom_file(folder, index))
        self.wait_for_everyone()

    def _load(self, folder: Path) -> None:
        """Load a state that `_save` wrote; raises ConfigurationError if it is of other objects."""
        groups = self._groups()
        if not _path(folder, 0).is_dir():
            raise ConfigurationError(f"{folder} holds no state of save_state(); give the folder that it returned")
        check_number("models", len(groups), len(list(folder.glob(f"{_STATE}*"))), folder)
        objects = self._custom_objects
        check_number("registered objects", len(objects), len(list(folder.glob("custom_*.json"))), folder)
        loaded = [self.booster.load_checkpoint(_path(folder, index), **each) for index, each in enumerate(groups)]
        extra = loaded[0]
        self.step = extra["step"]
        check_number("schedulers", len(self._schedulers), len(extra["schedulers"]), folder)
        factor = extra["samples_per_step"] / self._samples_per_step()
        for scheduler, state in zip(self._schedulers, extra["schedulers"], strict=True):
            scheduler.load(state, factor)
        check_number("dataloaders", len(self._dataloaders), len(extra["loaders"]), folder)
        for loader, state in zip(self._dataloaders, extra["loaders"], strict=True):
            loader.load_state_dict(state, continues=self.use_stateful_dataloader)
        for index, each in enumerate(objects):
            take_state(each, _read_custom(_custom_file(folder, index)), "registered object")

    def _new_folder(self, output_dir: str | None) -> Path:
        """Return the next state's folder, given or named automatically; refuses to overwrite one."""
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ConfigurationError("save_state() got no folder; give one, or automatic_checkpoint_naming=True")
            return Path(output_dir)
        folder = self._checkpoints() / f"checkpoint_{self.save_iteration}"
        if folder.exists():
            raise ConfigurationError(
                f"{folder} exists already; set accelerator.project_configuration.iteration to the next number"
            )
        self.wait_for_everyone()  # another rank must not find what this one is about to create
        return folder

    def _latest_folder(self) -> Path:
        """Return the newest folder of automatic naming; raises ConfigurationError if there is none."""
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigurationError("load_state() got no folder; give the one that save_state() returned")
        found = self._by_age()
        if not found:
            raise ConfigurationError(
                f"load_state() finds no checkpoint in {self._checkpoints()}; give the folder of one"
            )
        return found[-1]

    def _remove_oldest(self) -> None:
        """Keep the newest `total_limit` folders of automatic naming."""
        project = self.project_configuration
        if project.automatic_checkpoint_naming and project.total_limit is not None:
            if self.is_main_process:
                for folder in self._by_age()[: -project.total_limit]:
                    shutil.rmtree(folder)
            self.wait_for_everyone()

    def _groups(self) -> list[dict[str, Any]]:
        """Return each prepared model with its optimizer, as `save_checkpoint` takes them."""
        groups = []
        for model in self._models:
            own = [each.optimizer for each in self._optimizers if each.model is model]
            if len(own) > 1:
                raise ConfigurationError(
                    f"save_state() and load_state() take one optimizer of each model, and {len(own)} are prepared with "
                    "one; save each with accelerator.booster.save_optimizer(optimizer, folder)"
                )
            groups.append({"model": model} | ({"optimizer": own[0]} if own else {}))
        if not groups:
            raise ConfigurationError("save_state() and load_state() find no model; prepare one before")
        return groups

    def _samples_per_step(self) -> float:
        """Return the samples of a schedule's step: of the first loader, by replica; 1 if unknown."""
        first = next(iter(self._dataloaders), None)
        if first is None or first.batch_size is None or not self.step_scheduler_with_optimizer:
            return 1.0
        samples = first.total_batch_size * self.gradient_accumulation_steps
        return samples / next((each.repeats for each in self._schedulers), 1)

    def _checkpoints(self) -> Path:
        if self.project_dir is None:
            raise ConfigurationError(
                "automatic_checkpoint_naming=True without project_dir; give Accelerator(project_dir=)"
            )
        return Path(self.project_dir) / "checkpoints"

    def _by_age(self) -> list[Path]:
        folders = self._checkpoints().glob("checkpoint_*")
        return sorted(folders, key=lambda path: int(path.name.rpartition("_")[2]))


def _write_custom(custom: Any, file: Path | None) -> None:
    """Write an object's state as JSON, its tensors as safetensors; without a file, check it alone."""
    tensors: list[Tensor] = []
    try:
        state = to_json(custom.state_dict(), f"the state_dict() of the registered {type(custom).__name__}", tensors)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    if file is not None:
        save_file({str(number): each.clone() for number, each in enumerate(tensors)}, file.with_suffix(".safetensors"))
        file.write_text(json.dumps({"state": state}), encoding="utf-8")


def _read_custom(file: Path) -> Any:
    try:
        state = read_json_object(file)["state"]
        tensors = load_file(file.with_suffix(".safetensors"))
        return from_json(state, [tensors[str(number)] for number in range(len(tensors))])
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise ConfigurationError(f"{file} cannot be read ({error}); give what save_state() wrote") from error


def _path(folder: Path, index: int) -> Path:
    return folder / (f"{_STATE}_{index}" if index else _STATE)


def _custom_file(folder: Path, index: int) -> Path:
    return folder / f"custom_checkpoint_{index}.json"


class ReplicaValues:
    """Mixin before accelerate's `Accelerator`.

    Attributes:
        losses_by_rows: whether replicas count by the rows of their shares in means of the script's own. They do not in
            a loss that is made of sums over all replicas: one that `reduce` has added up, or that the script multiplies
            by `num_processes`, which it reads after its model's call.
    """

    losses_by_rows = True
    replicas: Replicas
    gradient_state: Any
    device: torch.device
    flag_tensor: Tensor | None

    def gather(self, tensor: Any) -> Any:
        """Return tensors of all replicas, joined along dim 0."""
        return self.replicas.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return values of all replicas: each sample once, in the order of the dataset."""
        is_short = self.gradient_state.end_of_dataloader and self.gradient_state.remainder > 0
        # What has a row for each sample is as long as that already; accelerate cuts other rows too.
        rows = self.gradient_state.remainder if is_short else None
        if use_gather_object or not holds_tensors(input_data):
            return self.replicas.gather_objects(input_data)[:rows]

        def gathered(tensor: Tensor) -> Tensor:
            found = self._gather_rows(tensor)
            return found[:rows] if found.dim() else found

        if isinstance(input_data, Mapping) and any(isinstance(value, list) for value in input_data.values()):
            lists = set(self.replicas.gather_objects(_lists_of_samples(input_data)))
            joined = copy(input_data)
            for name, value in input_data.items():
                joined[name] = self.gather_for_metrics(value, True) if name in lists else map_tensors(gathered, value)
            return joined
        return map_tensors(gathered, input_data)

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        return self.replicas.gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return tensors combined over replicas: "sum", "mean", "max" or "none"; `scale` is for TPUs."""
        if reduction == "sum" and getattr(tensor, "requires_grad", False):
            self.losses_by_rows = False
        return self.replicas.reduce(tensor, reduction)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this replica's part of a list, tuple, tensor, dict or dataset."""
        place = SimpleNamespace(num_processes=self.num_processes, process_index=self.process_index, device=self.device)
        with PartialState.split_between_processes(place, inputs, apply_padding) as part:
            yield part

    def check_trigger(self) -> bool:
        """Return whether any rank has called `set_trigger` since the last check; all ranks call it."""
        flag = torch.tensor(0 if self.flag_tensor is None else int(self.flag_tensor))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=world_group())
        if flag:
            self.flag_tensor = None
        return bool(flag)


def _lists_of_samples(batch: Mapping[str, Any]) -> list[str]:
    """Return the names of lists in a batch that hold an item for each sample, such as masks of different numbers."""
    if hasattr(batch, "to_tuple"):  # outputs of a model, whose lists are of layers
        return []
    rows = next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), None)
    return [name for name, value in batch.items() if isinstance(value, list) and len(value) == rows]
