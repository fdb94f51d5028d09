"""Checks of the objects given to `boost`: harmless wrappers are removed, objects of other engines are refused."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from booster.errors import ConfigurationError
from booster.logging import get_logger
from booster.wrappers import ModelWrapper, OptimizerWrapper

_logger = get_logger(__name__)
_COMPILED = "_orig_mod"  # attribute in which torch.compile keeps the original module
_BOOSTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that were given, and changed


def model_as_given(model: nn.Module) -> nn.Module:
    """Return the model to shard, without `torch.compile` wrappers; wrappers of sub-modules are removed in place.

    Raises:
        ConfigurationError: if another engine has changed the model.
    """
    if isinstance(model, ModelWrapper):
        raise ConfigurationError("boost() got a model that boost() has returned before; boost a model once")
    if torch.empty(0).device.type == "meta":
        raise ConfigurationError(
            "the default device of torch is 'meta', on which what boost() makes has no values; leave the context of "
            'torch.device("meta"), or call torch.set_default_device(None); build large models in LazyInitContext'
        )
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    engines = (DistributedDataParallel, DataParallel, *([fsdp] if fsdp else []))
    for path, module in model.named_modules():
        if module in _BOOSTED:
            raise ConfigurationError(
                f"boost() got a model that was boosted before{f' (at {path})' if path else ''}; boost a model once, "
                "and use what boost() returned"
            )
        if isinstance(module, engines):
            raise ConfigurationError(
                f"boost() got a model in {type(module).__name__}{f' (at {path})' if path else ''}; leave that out: "
                "boost() shares out batches and averages gradients by itself"
            )
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    name = next((name for name, param in model.named_parameters() if dtensor and isinstance(param, dtensor)), None)
    if name is not None:
        raise ConfigurationError(
            f"{name} is already cut over ranks (a DTensor); give boost() the whole model, without fully_shard, "
            "tp_plan or device_mesh"
        )
    devices = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        raise ConfigurationError(
            f"device_map has spread the model over {', '.join(devices)}; load it without device_map: boost() puts "
            "each rank's share on its device"
        )
    return _without_compiler(model)


def remember_as_boosted(model: nn.Module) -> None:
    """Have later calls of `boost` refuse a model that this one has changed."""
    _BOOSTED.add(model)


def check_optimizers_as_given(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that another engine steps.

    Raises:
        ConfigurationError: if one was boosted before, or comes from accelerate.
    """
    for optim in optimizers:
        if isinstance(optim, OptimizerWrapper):
            raise ConfigurationError("boost() got an optimizer that boost() has returned before; boost a model once")
        if hasattr(optim, "accelerator_state"):
            raise ConfigurationError(
                "boost() got an optimizer that Accelerator.prepare returned; give the one inside, optimizer.optimizer"
            )


def _without_compiler(model: nn.Module) -> nn.Module:
    found = _inside(model)
    compiled = found is not model
    for module in list(found.modules()):
        for name, child in module._modules.items():
            if child is not None and _inside(child) is not child:
                module._modules[name], compiled = _inside(child), True
        if module._compiled_call_impl is not None:  # set by `module.compile()`
            module._compiled_call_impl, compiled = None, True
    if compiled:
        _logger.warning(
            "%s was compiled and is trained uncompiled: torch.compile cannot trace communication between ranks; "
            "compile_layers=True compiles each layer between these",
            type(found).__name__,
        )
    return found


def _inside(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers of `torch.compile`."""
    while _COMPILED in module._modules:
        module = module._modules[_COMPILED]
    return module
