"""`auto_accelerate`: turn a model, a dataset and a loss into training objects, by a strategy or the fastest layout.

The interface is that of ATorch's function of this name, except that strategies are JSON instead of pickles.
"""

from __future__ import annotations

import copy
import difflib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from booster import Booster, launch_from_torch
from booster.errors import ConfigurationError, check_names
from booster.logging import get_logger
from plugins.hybrid_parallel.compat.deepspeed_3d.config import DeepSpeed3DParallelConfig
from plugins.hybrid_parallel.data.microbatch import to_device
from plugins.hybrid_parallel.distributed.mesh import control_group
from plugins.hybrid_parallel.planner.device import Device, preset
from plugins.hybrid_parallel.planner.plan import Job, build_again, plan_for_all_ranks
from plugins.hybrid_parallel.plugin import HybridParallelPlugin
from shardformer.distributed.random import random_numbers_apart

Strategy = str | Path | Mapping[str, Any] | Sequence[Any]

_AXES = {"tensor": "tp_size", "data": "dp_size", "pipeline": "pp_size", "pipe": "pp_size"}
_PRECISIONS = {"float16": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}
_OF_THE_WHOLE = ("parallel_mode", "deepspeed_3d_parallel")  # handled by `plugin_of` itself
_NOT_HERE = {
    "fp8": "amp_native",
    "native_dynamo": "module_replace",
    "auto_ddp": "parallel_mode",
}


def plugin_of(strategy: Strategy) -> HybridParallelPlugin:
    """Create the plugin of a strategy: for `from_config`, or (method, settings) pairs; refuses unknown ones."""
    if isinstance(strategy, str | Path | Mapping):
        return HybridParallelPlugin.from_config(dict(strategy) if isinstance(strategy, Mapping) else strategy)
    options: dict[str, Any] = {}
    groups, three_d = None, None
    for each in strategy:
        name, settings = (each, None) if isinstance(each, str) else _pair(each)
        if name == "parallel_mode":
            groups = settings
        elif name in ("deepspeed_3d_parallel", "ds_3d_parallel"):
            three_d = settings if settings is not None else DeepSpeed3DParallelConfig()
        else:
            options |= _options_of(name, settings)
    if three_d is not None:
        if groups is None:
            raise ConfigurationError(
                "deepspeed_3d_parallel also needs parallel_mode; "
                'use ("parallel_mode", ([("tensor", 2), ("data", 1), ("pipeline", 2)], None))'
            )
        return HybridParallelPlugin.from_3d_config(three_d, groups, **options)
    return HybridParallelPlugin(**_sizes(groups), **options)


def _pair(each: Any) -> tuple[str, Any]:
    if not isinstance(each, Sequence) or len(each) != 2 or not isinstance(each[0], str):
        raise ConfigurationError(
            f"{each!r} is no method of a strategy; use a name, or (name, settings), as in "
            '("amp_native", {"dtype": "bf16"})'
        )
    return each[0], each[1]


def _options_of(name: str, settings: Any) -> dict[str, Any]:
    """Return the plugin options of a method."""
    if name in _NOT_HERE:
        raise ConfigurationError(f"the method '{name}' is not available; use '{_NOT_HERE[name]}'")
    if name not in _METHODS:
        near = difflib.get_close_matches(name, [*_METHODS, *_OF_THE_WHOLE], n=1, cutoff=0.0)[0]
        raise ConfigurationError(f"the method '{name}' is not known; use '{near}'")
    return _METHODS[name](name, settings)


def _amp(name: str, settings: Any) -> dict[str, Any]:
    """Return the options for mixed precision; as in ATorch, the default is fp16."""
    settings = _known(name, settings, ("dtype", "skip_if_nonfinite"))
    dtype = str(settings.get("dtype", "fp16")).removeprefix("torch.")
    if dtype not in _PRECISIONS:
        raise ConfigurationError(f"{name} with dtype={dtype!r} is not available; use 'fp16' or 'bf16'")
    skips = {"nonfinite": "skip"} if settings.get("skip_if_nonfinite") else {}
    return {"precision": _PRECISIONS[dtype], **skips}


def _half(name: str, settings: Any) -> dict[str, Any]:
    """Return the options for 16-bit parameters without fp32 master weights."""
    dtype = "fp16" if settings is None else str(settings).removeprefix("torch.")
    if _PRECISIONS.get(dtype) not in ("fp16", "bf16"):
        raise ConfigurationError(f"{name} with {settings!r} is not available; use 'fp16' or 'bf16'")
    return {"precision": _PRECISIONS[dtype], "master_weights": False}


def _zero(stage: int) -> Callable[[str, Any], dict[str, Any]]:
    def options(name: str, settings: Any) -> dict[str, Any]:
        _known(name, settings, ())
        return {"zero_stage": stage}

    return options


def _checkpoint(name: str, settings: Any) -> dict[str, Any]:
    """Return the options for recomputation; ATorch's settings name layer classes, here all layers are recomputed."""
    return {
        "gradient_checkpointing": settings
        if isinstance(settings, float) or settings in ("operators", "selective")
        else "full"
    }


def _module_replace(name: str, settings: Any) -> dict[str, Any]:
    """Return the options for optimized kernels."""
    _known(name, settings, ())
    return {"enable_fused_normalization": True, "enable_flash_attention": True, "enable_jit_fused": True}


def _size(option: str) -> Callable[[str, Any], dict[str, Any]]:
    keys = {"tp_size": "tensor", "pp_size": "pipeline"}

    def read(name: str, settings: Any) -> dict[str, Any]:
        found = _known(name, settings, ("size",)).get("size")
        if not isinstance(found, int):
            raise ConfigurationError(
                f"{name} needs a size; use ({name!r}, {{'size': 2}}), or parallel_mode with a group '{keys[option]}'"
            )
        return {option: found}

    return read


def _sequence(name: str, settings: Any) -> dict[str, Any]:
    _known(name, settings, ())
    return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}


def _mixed(name: str, settings: Any) -> dict[str, Any]:
    """Return the sizes of several axes, given in the form of `parallel_mode`."""
    return _sizes(settings)


_METHODS: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "amp_native": _amp,
    "half": _half,
    "zero1": _zero(1),
    "zero2": _zero(2),
    "fsdp": _zero(3),
    "fsdp2": _zero(3),
    "checkpoint": _checkpoint,
    "module_replace": _module_replace,
    "tensor_parallel": _size("tp_size"),
    "pipeline_parallel": _size("pp_size"),
    "sequence_parallel": _sequence,
    "mixed_parallel": _mixed,
}


def _known(name: str, settings: Any, keys: Sequence[str]) -> Mapping[str, Any]:
    settings = {} if settings is None else settings
    unknown = list(settings) if not isinstance(settings, Mapping) else sorted(set(settings) - set(keys))
    if unknown or not isinstance(settings, Mapping):
        allowed = " and ".join(keys) if keys else "no settings"
        raise ConfigurationError(f"{name} has no setting {unknown[0]!r}; use {allowed}")
    return settings


def _sizes(groups: Any) -> dict[str, int]:
    """Parse axis sizes from `([("tensor", t), ("data", d), ("pipeline", p)], None)`."""
    if groups is None:
        return {}
    try:
        axes, order = groups
        sizes = {name: size for name, size in axes}
    except (TypeError, ValueError):
        raise ConfigurationError(
            f'parallel_mode={groups!r} is none; use ([("tensor", 2), ("data", 1), ("pipeline", 2)], None)'
        ) from None
    unknown = sorted(name for name, size in sizes.items() if name not in _AXES and size != 1)
    if unknown:
        raise ConfigurationError(f"parallel_mode has no group '{unknown[0]}'; use tensor, data and pipeline")
    if order is not None:
        raise ConfigurationError(
            "parallel_mode with an order of ranks also needs deepspeed_3d_parallel; use it, or None for the order"
        )
    return {_AXES[name]: size for name, size in sizes.items() if name in _AXES}


@dataclass(kw_only=True)
class AccelerateOptions:
    """Further options of `auto_accelerate`.

    Attributes:
        optim_args, optim_param_func: the optimizer is `optim_func(optim_param_func(model), **optim_args)`.
        optimizer: an optimizer, or its class, instead of `optim_func`.
        prepare_input: called as `prepare_input(batch, device)`; None moves tensors to the device.
        dataloader_args: arguments of the `DataLoader`; `batch_size` is the **global** batch (default: 8 per rank).
        lr_scheduler_cls, lr_scheduler_args: the schedule is `lr_scheduler_cls(optimizer, **lr_scheduler_args)`.
        device: device to plan for, a `Device` or the name of a preset; None measures this machine.
        precision: training precision; None for "bf16" on GPUs and "fp32" on CPUs.
        sequence_length: tokens of a sample; None for the length of the dataset's first sample.
        excluded: layouts for which `excluded(options)` is true are skipped.
    """

    optim_args: Mapping[str, Any] | None = None
    optim_param_func: Callable[[nn.Module], Any] | None = None
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None
    prepare_input: Callable[[Any, torch.device], Any] | None = None
    dataloader_args: Mapping[str, Any] | None = None
    lr_scheduler_cls: Callable[..., Any] | None = None
    lr_scheduler_args: Mapping[str, Any] | None = None
    device: str | Device | None = None
    precision: str | None = None
    sequence_length: int | None = None
    num_candidates: int = 3
    num_steps: int = 3
    excluded: Callable[[Mapping[str, Any]], bool] | None = None

    @staticmethod
    def of(options: Mapping[str, Any]) -> AccelerateOptions:
        """Create the options by name; raises ConfigurationError with the nearest name for one that does not exist."""
        check_names(options, [each.name for each in fields(AccelerateOptions)], "auto_accelerate")
        return AccelerateOptions(**options)

    @property
    def global_batch(self) -> int:
        """Samples of a step, over all replicas."""
        return dict(self.dataloader_args or {}).get("batch_size") or 8 * dist.get_world_size()


_WARM_UPS = 2


@dataclass(frozen=True)
class Trial:
    """Setup with which every layout is tried."""

    build: Callable[[], nn.Module]  # builds a new copy of the model, on the meta device or with values
    optimizer: Callable[[Any], torch.optim.Optimizer]  # builds an optimizer of its parameters
    criterion: Callable[[Any, Any], Any] | None
    batches: Callable[[HybridParallelPlugin], Any]  # plugin -> iterable of the batches of one replica
    steps: int


def seconds_of(options: Mapping[str, Any], trial: Trial) -> float | None:
    """Measure the median seconds of a step on the slowest rank; None if any rank fails. All ranks call it."""
    try:
        times = _run(options, trial)
    except (ConfigurationError, torch.OutOfMemoryError, RuntimeError) as error:
        _logger.warning("the layout %s fails: %s", dict(options), " ".join(str(error).split())[:200])
        times = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    slowest = torch.tensor(float("inf") if times is None else statistics.median(times))
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control_group())
    return None if slowest.isinf() else float(slowest)


def _run(options: Mapping[str, Any], trial: Trial) -> list[float]:
    plugin = HybridParallelPlugin.from_config(dict(options))
    booster = Booster(plugin=plugin)
    model = trial.build()
    model, optimizer = booster.boost(model, trial.optimizer(model.parameters()))
    batches, times = iter(trial.batches(plugin)), []
    for _ in range(_WARM_UPS + trial.steps):
        batch = next(batches, None)
        if batch is None:
            batches = iter(trial.batches(plugin))
            batch = next(batches)
        began = time.perf_counter()
        booster.execute_pipeline(iter([batch]), model, trial.criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if plugin.grid.device.type == "cuda":
            torch.cuda.synchronize(plugin.grid.device)
        times.append(time.perf_counter() - began)
    return times[_WARM_UPS:]


def alike(optimizer: torch.optim.Optimizer) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that builds an optimizer of the same class with the same defaults."""
    defaults = copy.deepcopy(optimizer.defaults)

    def make(params: Any) -> torch.optim.Optimizer:
        made = type(optimizer)(params, lr=defaults.get("lr", 1e-3))
        for group in made.param_groups:
            group |= defaults
        return made

    return make


_logger = get_logger(__name__)


@dataclass
class AccelerateResult:
    """Result of `auto_accelerate`."""

    # model, optim, dataloader, lr_scheduler: the boosted objects; None for those that were not given
    model: nn.Module
    optim: torch.optim.Optimizer | None
    dataloader: DataLoader | None
    loss_func: Callable[[Any, Any], Any] | None  # the user's loss, or None for the model's own
    prepare_input: Callable[[Any], Any]  # `prepare_input(batch)` moves a batch to this rank's device
    lr_scheduler: Any
    # booster, plugin: the booster and the plugin, for `execute_pipeline`, checkpoints and so on
    booster: Booster
    plugin: HybridParallelPlugin
    # further results; if a layout was searched, "tried" lists the tried layouts with their "predicted" and "measured"
    # seconds
    args: dict[str, Any] = field(default_factory=dict)

    def train_step(self, batches: Iterator[Any]) -> Tensor:
        """Run one training step (passes, update, schedule) on the next batch; return the global loss, 0-d."""
        loss = self.booster.execute_pipeline(batches, self.model, self.loss_func, self.optim).loss
        self.optim.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.optim.zero_grad()
        return loss


def auto_accelerate(
    model: nn.Module,
    optim_func: Callable[..., torch.optim.Optimizer] | None = None,
    dataset: Dataset | None = None,
    loss_func: Callable[[Any, Any], Any] | None = None,
    load_strategy: Strategy | None = None,
    *,
    save_strategy_to_file: str | Path | None = None,
    **options: Any,
) -> tuple[bool, AccelerateResult | None, dict[str, Any] | Strategy | None]:
    """Boost a model by a strategy, or find one: plan, try the best few on the real devices, and keep the fastest.

    All ranks of a job must call this. Outside of a job, this process becomes the only rank of one.

    Args:
        model: unmodified model; on the meta device under `record_module_init`, or with values.
        optim_func: builds the optimizer, see `AccelerateOptions`; alternatively, give `optimizer`.
        dataset: dataset of mappings of tensors.
        loss_func: (outputs, batch) -> mean over samples, or (sum, count); None for the model's own loss.
        load_strategy: the strategy from an earlier call, a file with it, options of the plugin, or a list of methods;
            None to search for one.
        save_strategy_to_file: file to which the strategy is written as JSON; None to write none.
        options: fields of `AccelerateOptions`.

    Returns:
        (whether a layout was found, the result, the strategy for `load_strategy` and `from_config`);
        (False, None, None) if no layout fits.

    Raises:
        ConfigurationError: the arguments are inconsistent, or the strategy is invalid.
    """
    chosen = AccelerateOptions.of(options)
    if optim_func is None and callable(chosen.optimizer) and not isinstance(chosen.optimizer, torch.optim.Optimizer):
        optim_func, chosen.optimizer = chosen.optimizer, None
    make = _optimizer_maker(model, optim_func, chosen)
    if not dist.is_initialized():
        launch_from_torch()
    strategy, tried = load_strategy, {}
    if strategy is None:
        with random_numbers_apart():  # trials draw, and the training that follows must not notice
            strategy, tried = _find(_trial(model, optim_func, dataset, loss_func, chosen), model, dataset, chosen)
        if strategy is None:
            return False, None, None
    plugin = plugin_of(strategy)
    boosted = _boosted(plugin, model, make(), chosen)
    loader = None if dataset is None else _loader(plugin, dataset, chosen)
    result = replace(boosted, dataloader=loader, loss_func=loss_func, args=tried)
    if save_strategy_to_file is not None and dist.get_rank() == 0:
        _save(strategy, Path(save_strategy_to_file))
    return True, result, strategy


def _boosted(
    plugin: HybridParallelPlugin, model: nn.Module, optim: torch.optim.Optimizer, options: AccelerateOptions
) -> AccelerateResult:
    booster, schedule = Booster(plugin=plugin), None
    if options.lr_scheduler_cls is not None:
        schedule = options.lr_scheduler_cls(optim, **(options.lr_scheduler_args or {}))
    model, optim, schedule = booster.boost(model=model, optimizer=optim, lr_scheduler=schedule)
    prepare = _preparing(options.prepare_input, plugin.grid.device)
    return AccelerateResult(model, optim, None, None, prepare, schedule, booster, plugin)


def _trial(
    model: nn.Module,
    optim_func: Callable[..., torch.optim.Optimizer] | None,
    dataset: Dataset | None,
    loss_func: Callable[[Any, Any], Any] | None,
    options: AccelerateOptions,
) -> Trial:
    if options.optimizer is not None:
        make = alike(options.optimizer)
    else:
        make = partial(optim_func, **(options.optim_args or {}))
    return Trial(
        build=partial(build_again, type(model), getattr(model, "config", None)),
        optimizer=make,
        criterion=loss_func,
        batches=lambda plugin: _loader(plugin, dataset, options),
        steps=options.num_steps,
    )


def _find(
    trial: Trial, model: nn.Module, dataset: Dataset | None, options: AccelerateOptions
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Try the best planned layouts; return the options of the fastest, and the predicted and measured times."""
    job = _job(model, dataset, options)
    device = preset(options.device) if isinstance(options.device, str) else options.device
    rows = plan_for_all_ranks(trial.build, job, device)
    rows = [row for row in rows if options.excluded is None or not options.excluded(row["options"])]
    tried = []
    for row in _different(rows, options.num_candidates):
        seconds = seconds_of(row["options"], trial)
        tried.append({**row, "measured": seconds})
        _logger.info("%s: predicted %.4g s, measured %s", row["layout"], row["predicted"], seconds)
    fitting = [row for row in tried if row["measured"] is not None]
    if not fitting:
        _logger.warning("no layout of %d ranks fits; use more devices, or a smaller batch", job.world_size)
        return None, {"tried": tried}
    return min(fitting, key=lambda row: row["measured"])["options"], {"tried": tried}


def _different(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Select `count` layouts, first the best of each mesh: those of one differ by less than the prediction errs."""
    names = ("sharding_size", "stage_cnt", "enable_sequence_parallelism")
    firsts: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        firsts.setdefault(tuple(row["options"].get(name) for name in names), row)
    rest = [row for row in rows if row not in firsts.values()]
    return [*firsts.values(), *rest][:count]


def _job(model: nn.Module, dataset: Dataset | None, options: AccelerateOptions) -> Job:
    if dataset is None:
        raise ConfigurationError("without a strategy layouts are tried with batches; give a dataset, or load_strategy")
    if not hasattr(model, "config"):
        raise ConfigurationError(f"a {type(model).__name__} cannot be built again to try layouts; give load_strategy")
    length = options.sequence_length
    if length is None:
        sample = dataset[0]
        ids = sample.get("input_ids") if isinstance(sample, Mapping) else None
        length = len(ids) if ids is not None else 1
    precision = options.precision or ("bf16" if torch.cuda.is_available() else "fp32")
    return Job(dist.get_world_size(), options.global_batch, int(length), precision)


def _optimizer_maker(
    model: nn.Module, optim_func: Callable[..., torch.optim.Optimizer] | None, options: AccelerateOptions
) -> Callable[[], torch.optim.Optimizer]:
    if (optim_func is None) == (options.optimizer is None):
        which = "none is given" if optim_func is None else "both are given"
        raise ConfigurationError(f"auto_accelerate needs optimizer or optim_func, and {which}; use one of them")
    if optim_func is None:
        return lambda: options.optimizer
    select = options.optim_param_func or (lambda each: each.parameters())
    return lambda: optim_func(select(model), **(options.optim_args or {}))


def _loader(plugin: HybridParallelPlugin, dataset: Dataset, options: AccelerateOptions) -> DataLoader:
    total = options.global_batch
    if total % plugin.dp_size:
        raise ConfigurationError(
            f"a global batch of {total} samples does not divide by dp_size={plugin.dp_size}; use "
            f"batch_size={-(-total // plugin.dp_size) * plugin.dp_size}"
        )
    loading = {name: value for name, value in (options.dataloader_args or {}).items() if name != "batch_size"}
    return plugin.prepare_dataloader(dataset, total // plugin.dp_size, **loading)


def _preparing(prepare_input: Callable[[Any, torch.device], Any] | None, device: torch.device) -> Callable[[Any], Any]:
    if prepare_input is None:
        return lambda batch: to_device(batch, device)
    return lambda batch: prepare_input(batch, device)


def _save(strategy: Strategy, path: Path) -> None:
    if not isinstance(strategy, Mapping):
        raise ConfigurationError(f"a strategy that is no mapping is not written to {path}; save its own file")
    path.write_text(json.dumps(dict(strategy), indent=2) + "\n")
