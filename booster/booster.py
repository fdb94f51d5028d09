"""Booster: the facade that a training script uses."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import dropwhile
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from booster import failure
from booster.errors import ConfigurationError, check_names, checks_arguments
from booster.launch import elastic_place, take_profile_request
from booster.meter import Meter
from booster.plugin import (
    PipelineResult,
    Plugin,
    SavedCheckpoint,
    TrainingObjects,
    check_lr_scheduler,
    load_lr_scheduler,
    load_plugin,
    save_lr_scheduler,
)

# What other libraries call it -> what to write.
_INSTEAD = {
    **dict.fromkeys(("initialize", "prepare", "configure"), "model, optimizer, … = booster.boost(model, optimizer, …)"),
    **dict.fromkeys(("save", "save_state"), "booster.save_model(model, directory) or booster.save_checkpoint(…)"),
    **dict.fromkeys(("load", "load_state"), "booster.load_model(model, directory) or booster.load_checkpoint(…)"),
    **dict.fromkeys(("step", "zero_grad"), "the optimizer's, optimizer.step() and optimizer.zero_grad()"),
    **dict.fromkeys(("clip_grad_norm", "clip_grad_norm_"), "model.clip_grad_norm_(1.0), or max_norm=1.0 of the plugin"),
    **dict.fromkeys(("is_main_process", "print"), "if torch.distributed.get_rank() == 0:"),
    **dict.fromkeys(
        ("process_index", "local_process_index", "num_processes", "rank", "world_size"),
        "torch.distributed.get_rank() and torch.distributed.get_world_size()",
    ),
    **dict.fromkeys(
        ("gather", "gather_for_metrics", "reduce"),
        "result.loss, the mean of all ranks, or torch.distributed.all_reduce of your own sum and count",
    ),
    "accumulate": "with booster.no_sync(model, optimizer): around all passes of a step but the last",
    "autocast": "precision='bf16' of the plugin",
    **dict.fromkeys(
        ("train", "eval", "evaluate", "generate"), "the model's, as model.train(), model.eval(), model.generate(…)"
    ),
    "log": "booster.meter(model)",
    "set_seed": "booster.launch_from_torch(seed=42)",
    "device": "next(model.parameters()).device",
    **dict.fromkeys(("unwrap", "unwrap_model"), "model.unwrap()"),
    **dict.fromkeys(("barrier", "wait_for_everyone"), "torch.distributed.barrier()"),
}
_KEYWORDS = ("model", "optimizer", "criterion", "dataloader", "lr_scheduler")
_OF_STEP = ("data_iter", "model", "criterion", "optimizer", "return_loss", "return_outputs")
_OF_METER = tuple(inspect.signature(Meter).parameters)[1:]
_BETWEEN = (__name__, "booster.errors", "contextlib")  # modules of the frames between a script and its call of `boost`


class Booster:
    """Facade that turns ordinary training objects into parallel ones, and runs them.

    Example:
        ```python
        booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=2))
        model, optimizer, dataloader = booster.boost(model, optimizer, dataloader)
        ```

    Args:
        plugin: a parallel training strategy, or the name of an installed one.
    """

    @partial(checks_arguments, example="Booster(plugin=HybridParallelPlugin(tp_size=2))")
    def __init__(self, plugin: Plugin | str) -> None:
        self.plugin = load_plugin(plugin) if isinstance(plugin, str) else plugin
        if not isinstance(self.plugin, Plugin):
            name = plugin.__name__ if isinstance(plugin, type) else "HybridParallelPlugin"
            raise ConfigurationError(
                f"Booster() got {_what(plugin)} for its plugin; write Booster(plugin={name}(tp_size=2))"
            )
        self._criterion: Callable[[Any, Any], Any] | None = None

    @failure.guard("booster.boost")
    def boost(self, *objects: Any, **named: Any) -> Any:
        """Prepare training objects for parallel training.

        Args:
            objects: one module, optimizers, learning-rate schedulers, dataloaders and one criterion, in any order.
            named: the same objects by keyword: `model=`, `optimizer=`, `criterion=`, `dataloader=`, `lr_scheduler=`.

        Returns:
            The boosted objects in the order given; a single object is returned without a tuple.

        Raises:
            ConfigurationError: an object is of another kind, there are two models or criteria, or the model does not
                allow the layout.
        """
        return self._prepared("boost", self.plugin.configure, objects, named)

    @failure.guard("booster.relayout")
    def relayout(self, plugin: Plugin, *objects: Any, **named: Any) -> Any:
        """Continue a running job under another layout of the same ranks, without files; all ranks must call this.

        Weights, optimizer states, the loss scale, random states and the position of loaders move from the ranks that
        have them to those that need them. The result is that of a checkpoint saved before and loaded after, bit for
        bit. The global batch stays the same. The objects given cannot be used any more.

        Args:
            plugin: the new layout.
            objects: what `boost` returned: the model, all of its optimizers; schedulers, dataloaders, the criterion.
            named: the same objects by keyword, as for `boost`.

        Returns:
            The new objects in the order given; a single object is returned without a tuple.

        Raises:
            ConfigurationError: the objects cannot move, or the model does not allow the layout; raised on every rank,
                and training can continue with the objects given.
        """
        if not isinstance(plugin, Plugin):
            raise ConfigurationError(
                f"relayout() got {_what(plugin)} for its plugin; give the plugin of the new layout first, "
                "then the objects"
            )
        result = self._prepared("relayout", partial(self.plugin.relayout, plugin), objects, named)
        self.plugin = plugin
        return result

    @checks_arguments
    def backward(
        self, loss: Tensor | tuple[Tensor, Any], optimizer: torch.optim.Optimizer, by_rows: bool = True
    ) -> None:
        """Compute gradients in an ordinary loop; call this instead of `loss.backward()`.

        Args:
            loss: a mean over the rows of this replica's share, 0-d, to which the loss that the model returned (one of
                all replicas) may be added; or (sum, count), whose gradient is that of the sums of all replicas, and of
                all calls within `no_sync`, over their counts. A replica may have a count of 0.
            optimizer: a boosted optimizer of the model.
            by_rows: whether replicas whose shares have other numbers of rows count by these. False takes the plain
                mean over replicas, for a loss that is divided by a count of the global batch already.

        Raises:
            ConfigurationError: the loss is neither; it is of another form on another replica, or than those that
                `no_sync` has accumulated.
        """
        self.plugin.backward(loss, optimizer, by_rows)

    @partial(checks_arguments, example="booster.execute_pipeline(batches, model, optimizer=optimizer)")
    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
        **unknown: Any,
    ) -> PipelineResult:
        """Run the forward pass of one batch, and the backward pass if an optimizer is given, under any layout.

        Args:
            data_iter: an iterator over batches (mappings of tensors, samples along dim 0), or one batch.
            model: the boosted model.
            criterion: (outputs, batch) -> mean over the samples, or (sum, count); None for the criterion given to
                `boost`, or without one the model's own loss (`labels` in the batch).
            optimizer: the boosted optimizer; None to evaluate only.
            return_loss: whether to compute the global mean of the loss on every rank.
            return_outputs: whether to return the model's outputs for this replica's batch, on every rank.

        Returns:
            An object with `.loss` (0-d) and `.outputs`.
        """
        if unknown:
            check_names(unknown, _OF_STEP, "booster.execute_pipeline")
        return self.plugin.execute_pipeline(
            data_iter, model, criterion or self._criterion, optimizer, return_loss, return_outputs
        )

    def __getattr__(self, name: str) -> NoReturn:
        instead = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"Booster has no {name}{instead}", name=name, obj=self)

    @checks_arguments
    def meter(self, model: nn.Module, total_steps: int | None = None, **options: Any) -> Meter:
        """Return a meter of loss, speed, utilization, memory and time left; see `Meter` for its options."""
        check_names(options, _OF_METER, "booster.meter")
        if not isinstance(model, nn.Module):
            raise ConfigurationError(
                f"booster.meter() got {model!r:.40} for its model; write booster.meter(model, total_steps=100)"
            )
        return Meter(self.plugin, model, total_steps, **options)

    @checks_arguments
    def no_sync(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> AbstractContextManager[None]:
        """Return a context in which `backward` accumulates gradients without communication."""
        return self.plugin.no_sync(model, optimizer)

    @failure.guard("booster.check_synchrony")
    @checks_arguments
    def check_synchrony(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Compare the values that ranks must share: parameters, tied weights, learning rates, loss scale, RNG states.

        Collective: call it on all ranks.

        Raises:
            SynchronyError: the values differ; raised on every rank, with the first difference.
        """
        self.plugin.check_synchrony(model, optimizer)

    @failure.guard("booster.save_model")
    @checks_arguments
    def save_model(self, model: nn.Module, directory: str, **options: Any) -> None:
        """Write a Hugging Face directory that plain `from_pretrained` opens."""
        self.plugin.checkpoint_io.save_model(model, str(directory), **options)

    @checks_arguments
    def weights(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        bucket_size_in_mb: float = 512,
        to_rank: int | None = None,
        merge_adapters: bool = False,
        shards: bool = False,
    ) -> Iterator[tuple[str, Any]]:
        """Return an iterator over the names and whole tensors that `save_model` would write, under any layout.

        Every rank iterates. A rank that leaves the loop early takes part in the gathers that are left. Tensors are on
        the device of the ranks, and may be kept. Where all ranks step an optimizer between two turns of the loop, the
        stream goes on with the weights that it began with: each rank first copies those of its shards that are still
        to come to host memory. Nothing else may change the weights meanwhile.

        Args:
            dtype: dtype of floating-point tensors; None for their own.
            bucket_size_in_mb: memory that the stream takes beyond the model; a tensor that is larger comes alone. The
                next tensors are gathered while these are used.
            to_rank: the rank that gets the tensors, and the loop of the others has no turns; None for all ranks. Such a
                stream is read to its end before another begins.
            merge_adapters: add LoRA's products to the weights of the base model, instead of yielding the adapters.
            shards: yield each rank's own pieces instead: `shape` of the whole, and `rectangles` with `offsets`,
                `sizes` and `values`. Replicas have the same pieces, but under `zero_stage=3` others.

        Raises:
            ConfigurationError: an argument is invalid, an adapter cannot be merged, an optimizer has stepped since the
                first piece of `shards=True`, or a stream to one rank and another are read in turns.
        """
        return self.plugin.checkpoint_io.weights(model, dtype, bucket_size_in_mb, to_rank, merge_adapters, shards)

    @failure.guard("booster.load_model")
    @checks_arguments
    def load_model(self, model: nn.Module, directory: str, **options: Any) -> None:
        """Load the weights from a Hugging Face directory."""
        self.plugin.checkpoint_io.load_model(model, str(directory), **options)

    @failure.guard("booster.save_optimizer")
    @checks_arguments
    def save_optimizer(self, optimizer: torch.optim.Optimizer, directory: str) -> None:
        """Write the full optimizer state, which can be loaded under any layout."""
        self.plugin.checkpoint_io.save_optimizer(optimizer, str(directory))

    @failure.guard("booster.load_optimizer")
    @checks_arguments
    def load_optimizer(self, optimizer: torch.optim.Optimizer, directory: str) -> None:
        """Load a state written by `save_optimizer`."""
        self.plugin.checkpoint_io.load_optimizer(optimizer, str(directory))

    @checks_arguments
    def save_lr_scheduler(self, lr_scheduler: Any, path: str) -> None:
        """Write the scheduler's state as JSON."""
        check_lr_scheduler(lr_scheduler)
        save_lr_scheduler(lr_scheduler, str(path))

    @checks_arguments
    def load_lr_scheduler(self, lr_scheduler: Any, path: str) -> None:
        """Load a state written by `save_lr_scheduler`."""
        check_lr_scheduler(lr_scheduler)
        load_lr_scheduler(lr_scheduler, str(path))

    @failure.guard("booster.save_checkpoint")
    @checks_arguments
    def save_checkpoint(
        self,
        directory: str,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: DataLoader | None = None,
        asynchronous: bool = False,
        keep_last: int | None = None,
        **extra: Any,
    ) -> SavedCheckpoint:
        """Write the full training state; it appears under its name once it is complete, checked and on disk.

        Args:
            asynchronous: copy the state, and write it while training continues; an error surfaces at the next call that
                saves or loads, or at `finish_saving`.
            keep_last: number of newest checkpoints to keep in the parent folder of `directory`; older ones are removed.
            extra: plain values, tensors and containers of them, which come back equal in type and value.

        Returns:
            A handle: `.stall_s` is how long training waited; `.wait()` blocks until the save is finished.

        Raises:
            ConfigurationError: the checkpoint cannot be written, or the previous asynchronous save failed; raised on
                every rank.
        """
        objects = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "dataloader": dataloader}
        return self.plugin.checkpoint_io.save_checkpoint(str(directory), objects, extra, asynchronous, keep_last)

    @failure.guard("booster.load_checkpoint")
    @checks_arguments
    def load_checkpoint(
        self,
        directory: str,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: DataLoader | None = None,
        resume: str | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint written by `save_checkpoint`, under this layout or another; return the extras.

        Args:
            resume: "latest" treats `directory` as a folder of checkpoints and loads the newest intact one.

        Raises:
            ConfigurationError: there is no checkpoint, a file is damaged, or the checkpoint belongs to other objects;
                raised on every rank.
        """
        objects = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "dataloader": dataloader}
        return self.plugin.checkpoint_io.load_checkpoint(str(directory), objects, resume)

    @checks_arguments
    def snapshot(
        self,
        folder: str,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: DataLoader | None = None,
        **extra: Any,
    ) -> None:
        """Leave the training state in the memory of the machines, from where the next round of an elastic job goes on.

        Call it after each step, or each N steps, on all ranks. Without `booster run --elastic` it does nothing. Ranks
        that are asked to let others join end in it.

        Args:
            folder: folder of the checkpoints, where `load_checkpoint(folder, resume="latest")` finds it.
            extra: plain values, tensors and containers of them, which come back equal in type and value.

        Raises:
            ConfigurationError: the objects cannot be saved, or the memory is full.
        """
        if elastic_place() is not None:
            objects = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "dataloader": dataloader}
            self.plugin.checkpoint_io.snapshot(str(folder), objects, extra)

    @checks_arguments
    def latest_checkpoint(self, folder: str) -> str | None:
        """Return the newest complete checkpoint in `folder`, the same on all ranks; None if there is none yet."""
        return self.plugin.checkpoint_io.latest_checkpoint(str(folder))

    def finish_saving(self) -> None:
        """Wait for an asynchronous save to finish; raises ConfigurationError on every rank if it failed."""
        self.plugin.checkpoint_io.finish_saving()

    def _prepared(
        self, call: str, prepare: Callable[[TrainingObjects], TrainingObjects], objects: Any, named: dict[str, Any]
    ) -> Any:
        """Return what `prepare` makes of the objects, in the order given."""
        unknown = sorted(set(named) - set(_KEYWORDS))
        if unknown:
            raise ConfigurationError(f"{call}() got the keyword '{unknown[0]}'; use {', '.join(_KEYWORDS)}")
        given = (*objects, *named.values())
        if not given:
            before = "" if call == "boost" else "plugin, "
            raise ConfigurationError(
                f"{call}() got no objects; write model, optimizer = booster.{call}({before}model, optimizer)"
            )
        kinds = ["_" if value is None else _kind(value, call) for value in given]
        _check_targets(call, kinds)
        of_kind = {kind: [value for value, its in zip(given, kinds, strict=True) if its == kind] for kind in _KEYWORDS}
        models, optimizers, criteria, dataloaders, lr_schedulers = of_kind.values()
        for kind, found in (("model", models), ("criterion", criteria)):
            if len(found) > 1:
                raise ConfigurationError(f"{call}() got {len(found)} objects of the kind '{kind}'; give one")
        self._criterion = criteria[0] if criteria else self._criterion
        model = models[0] if models else None
        boosted = prepare(TrainingObjects(model, optimizers, lr_schedulers, dataloaders, self._criterion))
        if boosted.optimizers:
            self._profile_if_asked(boosted)
        before = [model, *optimizers, *lr_schedulers, *dataloaders, *criteria]
        after = [boosted.model, *boosted.optimizers, *boosted.lr_schedulers, *boosted.dataloaders, *criteria]
        made = {id(old): new for old, new in zip(before, after, strict=True)} | {id(None): None}
        results = tuple(made[id(value)] for value in given)
        return results[0] if len(results) == 1 else results

    @staticmethod
    def _profile_if_asked(boosted: TrainingObjects) -> None:
        """Trace the first steps of the first optimizer, if the job was started with `booster run --profile`."""
        request = take_profile_request()
        if request is not None:
            # Imported here: torch's profiler is no part of training.
            from booster.profiling import StepProfile

            StepProfile(*request, boosted.model).begin(boosted.optimizers[0])


def _check_targets(call: str, kinds: list[str]) -> None:
    """Refuse a line of a script that assigns the results of `call` to variables of other `kinds` than it returns."""
    names, is_tuple = _targets()
    miscounted = len(names) != len(kinds) if is_tuple else names == ["model"] and len(kinds) > 1
    if miscounted or any({*pair} == {"model", "optimizer"} for pair in zip(names, kinds, strict=False)):
        right = ", ".join(kinds)
        raise ConfigurationError(
            f"{call}() returns what it is given, in the order given, and this line assigns it to {', '.join(names)}; "
            f"write {right} = booster.{call}({right})"
        )


def _targets() -> tuple[list[str], bool]:
    """Return the names that the script's line assigns a call's result to, and whether it unpacks it."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    following = dropwhile(lambda each: each.offset <= frame.f_lasti, dis.get_instructions(frame.f_code))
    first = next(following, None)
    if first is None or not first.opname.startswith(("UNPACK_SEQUENCE", "STORE_")):
        return [], False
    is_tuple = first.opname == "UNPACK_SEQUENCE"
    count, stores, names = first.arg if is_tuple else 1, following if is_tuple else iter((first,)), list[str]()
    for each in stores:
        if each.opname.startswith("STORE_") and len(names) < count:
            both = each.argval if isinstance(each.argval, tuple) else (each.argval,)  # Python 3.13 joins instructions
            names += map(str, both[:1] if "LOAD" in each.opname else both)
        elif not each.opname.startswith("LOAD_"):  # of an object whose attribute is assigned
            break
    return names[:count], is_tuple


def _what(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _kind(value: Any, call: str) -> str:
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, LRScheduler | ReduceLROnPlateau):
        return "lr_scheduler"
    if isinstance(value, DataLoader):
        return "dataloader"
    # A loss module (nn.CrossEntropyLoss) has no parameters: it is a criterion, not a model.
    if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
        return "model"
    if isinstance(value, type):
        raise ConfigurationError(f"{call}() got {_what(value)}; make an object of it: {value.__name__}(…)")
    if callable(value):
        return "criterion"
    is_data = isinstance(value, Dataset | list | tuple)
    raise ConfigurationError(
        f"{call}() cannot take {_what(value)}; give a module, optimizers, learning-rate schedulers, dataloaders or a "
        f"criterion{'; a list of samples goes in DataLoader(…, batch_size=8)' if is_data else ''}"
    )
