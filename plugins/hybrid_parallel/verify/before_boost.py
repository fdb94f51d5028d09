"""Layouts that stand for one of any size, and their check as `boost` runs it: on rank 0, or from a cache on disk."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import shardformer
from booster.data.rows import PackingCollator, num_rows
from booster.errors import ConfigurationError
from booster.plugin import TrainingObjects
from plugins.hybrid_parallel.boosted.forward_options import with_positions
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from shardformer.attention.backend import log_once
from shardformer.attention.packed_documents import POSITIONS, may_be_packed, restart_flag
from shardformer.distributed.process_groups import broadcast_json
from shardformer.peft import model_inside

_MOST_RANKS = 8  # of a layout that is checked as it is
_LONGEST_AXES = {"tp": 16, "cp": 16, "ep": 16, "pp": 8}  # stages have a layer each, of which each rank builds all
_EXPERTS = 4  # of a small copy
_MAX_NORM = 0.05  # of gradients that are clipped, for which those of a small copy are large enough
# Options that decide what is computed where. The others are about devices, files, memory and time.
_KEPT = (
    ("tp_size", "pp_size", "cp_size", "ep_size", "enable_sequence_parallelism", "sequence_parallelism_mode")
    + ("zero_stage", "pp_style", "num_model_chunks", "custom_policy", "tp_info", "sharding_dim")
    + ("make_vocab_size_divisible_by", "expert_capacity_factor", "contrastive", "num_microbatches")
    + ("max_norm", "enable_fused_normalization", "enable_jit_fused", "enable_all_optimization")
)


@dataclass
class LayoutReport:
    """What a check has shown: sentences, one for each layout."""

    proved: list[str] = field(default_factory=list)  # a step has the loss and the gradients of plain training
    findings: list[str] = field(default_factory=list)  # it has not
    not_checked: list[str] = field(default_factory=list)  # it could not be tried, and why

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        return [f"{each}, exact on a small copy" for each in self.proved] + self.findings + self.not_checked


class NotCheckedError(Exception):
    """Says why a model cannot be checked."""


def checked_layouts(options: Mapping[str, Any], world_size: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the layouts that stand for one of any size: options, and number of ranks.

    A layout of up to 8 ranks stands for itself, and has at most two replicas. Of a larger one all axes together are
    tried with two ranks each, and each axis alone with all of its ranks, up to 16, or 8 stages.
    """
    parallel = HybridParallelConfig.from_options(**options).parallel
    kept = {name: options[name] for name in _KEPT if name in options}
    if (kept.get("num_microbatches") or 1) > 1:
        kept["num_microbatches"] = None  # one for each stage
    if kept.get("max_norm"):
        kept["max_norm"] = _MAX_NORM
    sizes = {axis: getattr(parallel, f"{axis}_size") for axis in ("tp", "pp", "cp", "ep")}
    sizes["ep"] = math.gcd(sizes["ep"], _EXPERTS) if sizes["ep"] > _EXPERTS else sizes["ep"]
    replicas = parallel.data_parallel_size(world_size)

    def layout(chosen: Mapping[str, int], replicas: int) -> tuple[dict[str, Any], int]:
        # Experts are shared by replicas and by ranks that share sequences.
        dp_size = max(replicas, -(-chosen["ep"] // chosen["cp"]))
        dp_size += -(dp_size * chosen["cp"]) % chosen["ep"]
        made = kept | {f"{axis}_size": size for axis, size in chosen.items()} | {"dp_size": dp_size}
        made["nonfinite"] = "ignore"  # values are compared
        if chosen["tp"] * chosen["cp"] == 1:
            made["enable_sequence_parallelism"] = False
        if made.get("enable_sequence_parallelism") is False:
            made.pop("sequence_parallelism_mode", None)
        return made, dp_size * chosen["tp"] * chosen["pp"] * chosen["cp"]

    exact = layout(sizes, min(replicas, 2))
    if exact[1] <= _MOST_RANKS:
        yield exact
        return
    yield layout({axis: min(size, 2) for axis, size in sizes.items()}, 1)
    for axis, longest in _LONGEST_AXES.items():
        if (size := sizes[axis]) > 2:
            yield layout(dict.fromkeys(sizes, 1) | {axis: min(size, longest)}, 1)


_LONGEST_READ_S = 10  # of a batch
_VARIABLE = "BOOSTER_CHECK_LAYOUT"
_PACKAGES = (Path(shardformer.__file__).parent, Path(__file__).parents[1])


def check_before_boost(objects: TrainingObjects, config: HybridParallelConfig) -> list[str]:
    """Check the layout of a model that will be trained; all ranks call this.

    Returns:
        What is to be told of the check, on rank 0, once the model is sharded: if it cannot be, that is told alone.

    Raises:
        ConfigurationError: on all ranks, if a copy of the model trains otherwise and `check_layout="refuse"`.
    """
    parallel, mode = config.parallel, os.environ.get(_VARIABLE, config.debugging.check_layout)
    if max(parallel.tp_size, parallel.pp_size, parallel.cp_size, parallel.ep_size) == 1 or not objects.optimizers:
        return []
    found = None
    if dist.get_rank() == 0 and mode != "off":
        found = asdict(_report(objects, config.options(), dist.get_world_size()))
    mode, found = broadcast_json((mode, found))  # ranks may have other environments
    if found is None:
        return []
    report = LayoutReport(**found)
    if report.findings and mode == "refuse":
        raise ConfigurationError("; ".join(report.findings))
    told = [*report.findings, "; ".join(report.not_checked)]
    return [each for each in told if each and dist.get_rank() == 0]


def _report(objects: TrainingObjects, options: dict[str, Any], world_size: int) -> LayoutReport:
    try:
        loader = next(iter(objects.dataloaders), None)
        file = None if objects.criterion else _cache_file(objects.model, options, world_size, loader)
        if file is not None:
            with suppress(OSError, ValueError, TypeError):
                return LayoutReport(**json.loads(file.read_text(encoding="utf-8")))
        # Imported here: most answers are kept.
        from plugins.hybrid_parallel.verify.layout_check import CheckedModel, check_layout

        batch = partial(_first_samples, loader)
        subject = CheckedModel(objects.model, objects.criterion, batch, _packed_rows(loader, batch, objects.model))
        report = check_layout(subject, options, world_size)
        if file is not None:
            _write(file, report)
        return report
    except Exception as error:  # the other ranks wait for an answer
        return LayoutReport(
            not_checked=[f"{type(objects.model).__name__}, not checked: {type(error).__name__}: {error}"]
        )


def tell_of_criterion(config: HybridParallelConfig) -> None:
    """Say once that a criterion which `boost` has not got is no part of the layout check."""
    parallel, mode = config.parallel, os.environ.get(_VARIABLE, config.debugging.check_layout)
    is_cut = max(parallel.tp_size, parallel.pp_size, parallel.cp_size, parallel.ep_size) > 1
    if is_cut and mode != "off" and dist.get_rank() == 0:
        log_once(
            "check_layout:",
            "the criterion is not checked, because execute_pipeline() got it alone; give it to boost(), too",
        )


def _packed_rows(loader: Any, batch: Callable[[], Mapping[str, Any]], model: nn.Module) -> int:
    """Return how many rows the first batch has, if these are packed documents; 0 if not, or if it cannot be read."""
    if isinstance(getattr(loader, "collate_fn", None), PackingCollator):
        return 1
    if loader is None or POSITIONS not in inspect.signature(model_inside(model).forward).parameters:
        return 0
    with suppress(Exception):  # data sets fail with arbitrary exception types, and the check can do without
        entries = with_positions(batch())
        if may_be_packed(entries) and restart_flag(entries[POSITIONS]):
            return num_rows(entries)
    return 0


def _first_samples(loader: Any) -> Mapping[str, Any]:
    """Return a worker's first samples of a loader as a batch: its data set may count its calls."""
    dataset = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        raise NotCheckedError("boost() got no data loader over samples with numbers")
    rows = range(min(loader.batch_size or 1, len(dataset)))
    given = {"collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}
    [batch] = DataLoader(dataset, len(rows), sampler=rows, num_workers=1, timeout=_LONGEST_READ_S, **given)
    if not isinstance(batch, Mapping):
        raise NotCheckedError("its batches are no mappings")
    return batch


def _cache_file(model: nn.Module, options: Mapping[str, Any], world_size: int, loader: Any = None) -> Path | None:
    """Return the file of this check; None if its answer depends on more than can be written down."""
    if options.get("custom_policy") is not None or options.get("tp_info") is not None:
        return None
    config, files = getattr(model, "config", None), list(_source_files(model))
    if not hasattr(config, "to_dict") or None in files or has_own_forwards(model):
        return None
    import transformers

    known = (
        [type(model).__module__, type(model).__qualname__, config.to_dict()]
        + [[name, list(param.shape)] for name, param in model.named_parameters()]
        + sorted(map(_forward_of, {type(module) for module in model.modules()}))
        + [list(checked_layouts(options, world_size)), torch.__version__, transformers.__version__, _sources()]
        + [[file, os.stat(file).st_mtime_ns] for file in files]
        + [_source_of_batches(loader)]
    )
    key = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "hybrid-booster" / "layouts" / f"{key}.json"


def has_own_forwards(model: nn.Module) -> bool:
    """Return whether a forward was set on a module itself, as fused kernels are; others of its class have none."""
    return any("forward" in vars(module) for module in model.modules())


def _source_files(model: nn.Module) -> Iterator[str | None]:
    """Yield the files that define the classes of a model, but for those of installed libraries with a version."""
    modules = {type(module).__module__ for module in model.modules()}
    for name in sorted(modules):
        if name.partition(".")[0] not in ("torch", "transformers"):
            yield getattr(sys.modules.get(name), "__file__", None)


def _source_of_batches(loader: Any) -> list[Any]:
    """Return what makes the batches of a loader, which may be packed documents or not: names, files, switches."""
    data, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    given = {name: value for name, value in vars(collate).items() if isinstance(value, bool)} if collate else {}
    columns = getattr(data, "column_names", None)
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        columns = sorted(map(str, data[0]))
    found: list[Any] = [given, columns]
    for each in (type(data), collate if inspect.isfunction(collate) else type(collate)):
        file = getattr(sys.modules.get(each.__module__), "__file__", None)
        found.append([f"{each.__module__}.{each.__qualname__}", file and os.stat(file).st_mtime_ns])
    return found


def _forward_of(kind: type[nn.Module]) -> str:
    """Return the name of a class and the code of its forward, which may have been replaced."""
    code = getattr(kind.forward, "__code__", None)
    place = () if code is None else (code.co_filename, code.co_firstlineno, code.co_code.hex())
    return f"{kind.__module__}.{kind.__qualname__} {place}"


@cache
def _sources() -> int:
    """Return the time of the last change of this library."""
    walks = chain.from_iterable(map(os.walk, _PACKAGES))
    paths = (f"{folder}/{file}" for folder, _, files in walks for file in files if file.endswith((".py", ".json")))
    return max(os.stat(path).st_mtime_ns for path in paths)


def _write(file: Path, report: LayoutReport) -> None:
    with suppress(OSError):  # a home without room or rights
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(report)), encoding="utf-8")
        part.replace(file)
