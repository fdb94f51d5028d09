"""Options of accelerate's `Accelerator` that cannot hold next to a plugin, and the environment that it reads."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)

from booster.errors import ConfigurationError
from booster.logging import get_logger
from shardformer.distributed.process_groups import world_group

_log = get_logger(__name__)

OLDEST = "1.1"  # the oldest release of accelerate that the integration runs with

_ENGINES = {
    "deepspeed_plugin": "DeepSpeed is another engine; leave it out, and give HybridParallelPlugin(zero_stage=1)",
    "deepspeed_plugins": "DeepSpeed is another engine; leave it out, and give HybridParallelPlugin(zero_stage=1)",
    "fsdp_plugin": "FSDP is another engine; leave it out, and give HybridParallelPlugin(zero_stage=1)",
    "megatron_lm_plugin": "Megatron-LM is another engine; leave it out, and give HybridParallelPlugin(tp_size=2)",
    "torch_tp_plugin": "accelerate's parallelism is another engine; leave it out, and give tp_size to the plugin",
    "parallelism_config": "accelerate's parallelism is another engine; leave it out, and give tp_size, cp_size to the "
    "plugin",
}
# Variables by which `accelerate launch` asks for the same.
_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin",
    "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}


def check_version(found: str) -> None:
    """Refuse a release of accelerate that lacks what the integration uses."""
    from packaging.version import Version

    if Version(found) < Version(OLDEST):
        raise ConfigurationError(
            f"accelerate {found} is too old for booster.integrations.accelerate; install accelerate>={OLDEST}"
        )


def check_options(options: dict[str, Any], precision: str, on_gpu: bool) -> None:
    """Refuse options that would train otherwise than they say; `precision`: the plugin's."""
    for name, reason in _ENGINES.items():
        if options.get(name) is not None:
            raise ConfigurationError(f"Accelerator({name}=...): {reason}")
    for variable, name in _VARIABLES.items():
        if _is_set(variable):
            raise ConfigurationError(f"{variable}={os.environ[variable]} asks for {name}: {_ENGINES[name]}")
    _check_precision(options.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION"), precision)
    _check_compilation(options)
    for handler in options.get("kwargs_handlers") or ():
        _check_handler(handler, precision)
    if options.get("rng_types") not in (None, ["generator"]):
        raise ConfigurationError(
            f"Accelerator(rng_types={options['rng_types']!r}) would give all ranks the same random numbers; leave it "
            "out: the order of samples is the same on all ranks in any case"
        )
    if options.get("cpu") and on_gpu:
        raise ConfigurationError(
            "Accelerator(cpu=True) while torch finds GPUs, which the plugin trains on; set CUDA_VISIBLE_DEVICES='' to "
            "hide them"
        )
    if getattr(options.get("dataloader_config"), "dispatch_batches", None):
        _say_once("dispatch_batches=True has no effect: each replica reads its own samples, which are the same")


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes")


def _check_precision(wanted: Any, precision: str) -> None:
    if str(wanted or "no") in ("no", "no" if precision == "fp32" else precision):
        return
    raise ConfigurationError(
        f"mixed_precision={str(wanted)!r} is not the plugin's precision {precision!r}; use "
        f"HybridParallelPlugin(precision={str(wanted)!r})"
    )


def _check_compilation(options: dict[str, Any]) -> None:
    plugin = options.get("dynamo_plugin")
    asked = options.get("dynamo_backend") or os.environ.get("ACCELERATE_DYNAMO_BACKEND")
    backend = DynamoBackend(str(asked or "no").upper()) if plugin is None else plugin.backend
    if backend != DynamoBackend.NO:
        raise ConfigurationError(
            f"dynamo_backend={backend.value.lower()!r}: torch.compile cannot trace the communication of a boosted "
            "model; leave it out, and give HybridParallelPlugin(compile_layers=True)"
        )


def _check_handler(handler: Any, precision: str) -> None:
    reason = f"the plugin's precision {precision!r} holds everywhere; leave it out"
    if isinstance(handler, DistributedDataParallelKwargs):
        if handler.comm_hook == DDPCommunicationHookType.NO:
            _say_once("DistributedDataParallelKwargs has no effect: boost() sums gradients, and wraps no model in DDP")
            return
        reason = f"boost() sends gradients, without the hook {handler.comm_hook.value!r}; leave comm_hook out"
    elif isinstance(handler, GradScalerKwargs):
        reason = "the plugin scales the loss; leave it out, and give HybridParallelPlugin("
        reason += "precision='fp16', initial_scale=...)"
    elif isinstance(handler, ProfileKwargs | InitProcessGroupKwargs) or (
        isinstance(handler, AutocastKwargs) and precision == "fp32"
    ):
        return
    raise ConfigurationError(f"Accelerator(kwargs_handlers=[{type(handler).__name__}(...)]): {reason}")


def _say_once(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        _log.warning(line)


def asked_of_launch(options: dict[str, Any]) -> dict[str, float]:
    """Return what `InitProcessGroupKwargs` asks `launch_from_torch` for: the time limit alone."""
    handlers = options.get("kwargs_handlers") or ()
    asked = next((each for each in handlers if isinstance(each, InitProcessGroupKwargs)), None)
    if asked is not None and dist.is_initialized():
        _say_once("InitProcessGroupKwargs has no effect: the process group exists already")
    return {} if asked is None else {"timeout_s": asked.timeout.total_seconds()}


@contextmanager
def variables_of_this_rank() -> Iterator[None]:
    """Set `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE` unless all are set; all ranks call it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    known = {name: os.environ.get(name) for name in names}
    missing = torch.tensor(int(None in known.values()))
    dist.all_reduce(missing, dist.ReduceOp.MAX, group=world_group())
    if not missing:
        yield
        return
    rank, machines = dist.get_rank(), _machines()
    here = [each for each, machine in enumerate(machines) if machine == machines[rank]]
    values = (rank, len(machines), here.index(rank), len(here))
    os.environ.update({name: str(value) for name, value in zip(names, values, strict=True)})
    try:
        yield
    finally:
        for name, value in known.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _machines() -> list[int]:
    """Return a number of the machine of each rank."""
    own = torch.tensor(zlib.crc32(socket.gethostname().encode()))
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own, group=world_group())
    return [int(each) for each in found]
