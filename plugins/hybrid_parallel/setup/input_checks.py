"""Checks of what `boost` is given: wrappers, objects of other engines, contents and modules that a layout excludes."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from booster.errors import ConfigurationError
from booster.logging import get_logger
from booster.wrappers import ModelWrapper, OptimizerWrapper
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.agreement import checksum_of
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from plugins.hybrid_parallel.features.feature import Feature
from plugins.hybrid_parallel.zero.granularity import Granularity, granularity_of, steps_in_parts
from shardformer import TPInfo
from shardformer.distributed.process_groups import all_gather_json, world_group
from shardformer.lazy import is_recorded, waits_for_values, weight_reader_of
from shardformer.peft import adapter_configs, check_adapters, model_inside
from shardformer.utils.source import reads_of_forward

_logger = get_logger(__name__)
_COMPILED = "_orig_mod"  # attribute in which torch.compile keeps the original module
_BOOSTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that were given, and changed


def model_as_given(model: nn.Module) -> nn.Module:
    """Return the model to shard, without `torch.compile` wrappers; wrappers of sub-modules are removed in place."""
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
    """Refuse optimizers that another engine steps."""
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


_ENOUGH = 1_000_000  # tokens that no batch has


def _capacity(router: nn.Module) -> tuple[str, str] | None:
    capacity = router.expert_capacity
    if capacity is not None and capacity >= _ENOUGH:
        return None
    drops = f"drops tokens of the whole batch that an expert has no place for (expert_capacity={capacity})"
    return drops, f", or expert_capacity={_ENOUGH}, which drops none"


def _statistics(_: nn.Module) -> tuple[str, str]:
    return "normalises latents by statistics of the whole batch", ""


def _halves(xlnet: nn.Module) -> tuple[str, str] | None:
    backwards = "gives the second half of a batch other positions than the first (bi_data=True)"
    return (backwards, ", or bi_data=False") if xlnet.bi_data else None


# Class of a module -> what it does to a batch, and what else the user can do; None where it keeps samples apart.
_MIXERS: Mapping[str, Callable[[nn.Module], tuple[str, str] | None]] = {
    "DogeCDMoE": lambda _: ("routes all tokens of a batch together (is_moe=True)", ", or is_moe=False"),
    "GradiumPhononTTSForConditionalGeneration": _statistics,
    "NllbMoeTop2Router": _capacity,
    "PocketTTSForConditionalGeneration": _statistics,
    "XLNetModel": _halves,
}


def cuts_batch(config: HybridParallelConfig, num_replicas: int) -> bool:
    """Return whether a batch becomes several micro-batches, or shares of `num_replicas`."""
    parts = config.pipeline.num_microbatches or config.parallel.pp_size
    return num_replicas > 1 or parts > 1 or config.pipeline.microbatch_size is not None


def has_batch_norms(model: nn.Module) -> bool:
    """Return whether a module normalises over its batch: parts of it then have statistics of their own."""
    return any(isinstance(each, _BatchNorm) for each in model.modules())


def mixed_samples(model: nn.Module) -> tuple[str, str] | None:
    """Return how outputs for one sample depend on the others, and a way out; None if nothing but losses does.

    Batch norms are not meant: everyone expects statistics of a part from them, and `boost` logs it.
    """
    found = (_MIXERS[type(each).__name__](each) for each in model.modules() if type(each).__name__ in _MIXERS)
    return next((each for each in found if each is not None), None)


def refuse_mixed_samples(config: HybridParallelConfig, model: nn.Module, num_replicas: int) -> None:
    """Check that no module mixes the samples of a batch which is cut."""
    found = mixed_samples(model)
    if found is not None and cuts_batch(config, num_replicas):
        reason, way_out = found
        raise ConfigurationError(
            f"{type(model).__name__} {reason}; use one replica and num_microbatches=1 (tp_size or pp_size takes the "
            f"ranks){way_out}"
        )


def check_contents(model: nn.Module, config: HybridParallelConfig) -> None:
    """Check that the layout supports what the model contains, before anything is changed."""
    parallel = config.parallel
    sizes = {name: getattr(parallel, name) for name in ("tp_size", "pp_size", "cp_size", "ep_size")}
    check_adapters(model, [f"{name}={size}" for name, size in sizes.items() if size > 1])
    _check_head(model_inside(model), parallel.tp_size)


def _check_head(model: nn.Module, tp_size: int) -> None:
    """Refuse a forward of the user's, or of a kernel library, that multiplies by the weight of the head itself."""
    forward = getattr(vars(model).get("forward"), "__func__", type(model).forward)
    is_known = getattr(forward, "__module__", "").startswith("transformers.")  # its policy knows what it reads
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") and not is_known else None
    if tp_size == 1 or head is None:
        return
    path = next(path for path, module in model.named_modules() if module is head)
    try:
        paths = {read.path for read in reads_of_forward(model)}
    except OSError:  # no source
        return
    for weight in (f"{path}.weight", "get_output_embeddings.weight"):
        if any(f"{each}.".startswith(f"{weight}.") and not each.endswith((".dtype", ".device")) for each in paths):
            raise ValueError(
                f"the forward of this {type(model).__name__} reads {path}.weight, as fused losses do, and tp_size="
                f"{tp_size} leaves a rank a part of it; call self.{path}(hidden_states), or use tp_size=1 (dp, pp work)"
            )


def check_options_against_model(
    config: HybridParallelConfig,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, Sequence[str]],
    mesh: HybridMesh,
    features: Sequence[Feature] = (),
) -> None:
    """Refuse what does not fit this model, before any change; `names`: id -> names; `features`: attach to it."""
    parallel = config.parallel
    num_replicas = mesh.size(DP_CP)
    num_shards = config.zero.num_shards(num_replicas)
    check_gradients(model)
    _check_embeddings(config, model, num_replicas)
    refuse_mixed_samples(config, model, num_replicas)
    with as_configuration_error():
        check_contents(model, config)
    for optim in optimizers:
        check_optimizer(optim, names)
        check_granularity(optim, parallel.tp_size, parallel.ep_size, parallel.pp_size, num_shards)
        check_step_in_parts(optim, config.offload.offload_optimizer)
        check_zero_size(optim, config.zero.zero_size, num_replicas, parallel.tp_size * parallel.ep_size)
    check_shared_parameters(optimizers, names)
    check_memory(optimizers, model)
    warn_of_untrained(optimizers, model.named_parameters())
    for feature in features:
        feature.check(model, optimizers, mesh)
    if (names := waits_for_values(model)) and weight_reader_of(model) is None and not is_recorded(model):
        raise ConfigurationError(
            f"{names[0]} of the {type(model).__name__} is on the meta device, without values; build the model on a "
            "device, or in shardformer.record_module_init()"
        )


def _check_embeddings(config: HybridParallelConfig, model: nn.Module, replicas: int) -> None:
    """Refuse options of embeddings that depend on all ids of a batch, or change weights in the forward pass."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            continue
        if module.sparse:
            raise ConfigurationError(f"{path} has sparse=True, whose gradients cannot be reduced; use sparse=False")
        if module.scale_grad_by_freq and cuts_batch(config, replicas):
            raise ConfigurationError(
                f"{path} has scale_grad_by_freq=True, which counts the ids of a whole batch; use one replica and "
                "num_microbatches=1 (tp_size takes the ranks), or scale_grad_by_freq=False"
            )
        if module.max_norm is not None and (replicas > 1 or config.mixed_precision.precision != "fp32"):
            raise ConfigurationError(
                f"{path} has max_norm={module.max_norm}, which changes weights where a replica looks them up; use one "
                "replica in fp32 (tp_size or pp_size takes the ranks), or max_norm=None"
            )


@contextmanager
def as_configuration_error() -> Iterator[None]:
    """Turn errors of shardformer into ConfigurationError: they are mistakes of the user."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ConfigurationError(str(error)) from error


def check_granularity(optim: torch.optim.Optimizer, tp_size: int, ep_size: int, pp_size: int, num_shards: int) -> None:
    """Refuse an optimizer that reads values of others, which the layout or `num_shards` put on other ranks."""
    if granularity_of(optim) is not Granularity.MODEL:
        return
    sizes = {"tp_size": tp_size, "ep_size": ep_size, "pp_size": pp_size}
    reasons = [f"{option}={size}" for option, size in sizes.items() if size > 1]
    if num_shards > 1:
        reasons.append(f"zero_stage=1 or more with {num_shards} replicas")
    if reasons:
        raise ConfigurationError(
            f"{type(optim).__name__} updates each parameter from the values of others, which {reasons[0]} has on other "
            "ranks; use zero_stage=0 with pp_size=1, tp_size=1 and ep_size=1, or AdamW"
        )


def check_zero_size(optim: torch.optim.Optimizer, zero_size: int | None, num_replicas: int, num_parts: int) -> None:
    """Refuse to repeat states over replicas where an optimizer reads whole parameters, each of which has one owner.

    Args:
        num_parts: number of ranks over which tensor and expert parallelism cut parameters.
    """
    if zero_size in (None, num_replicas) or num_parts == 1 or granularity_of(optim) is not Granularity.PARAMETER:
        return
    raise ConfigurationError(
        f"{type(optim).__name__} reads whole parameters, which tp_size or ep_size cuts and one replica in "
        f"{num_replicas} owns, so that zero_size={zero_size} cannot repeat their states; leave zero_size out"
    )


def check_step_in_parts(optim: torch.optim.Optimizer, place: str | Path | None) -> None:
    """Refuse to offload, to `place`, states of a step that gives other numbers one parameter at a time."""
    if place is None:
        return
    is_known = type(optim).__module__.startswith("torch.optim")
    if granularity_of(optim) is not Granularity.MODEL and (is_known or steps_in_parts(optim)):
        return
    raise ConfigurationError(
        f"{type(optim).__name__} updates parameters together, and offload_optimizer={str(place)!r} steps on those of "
        "one bucket after the other; use offload_optimizer=None, or AdamW"
    )


def check_gradients(model: nn.Module) -> None:
    """Refuse gradients from before `boost`, and hooks that would read them before they are complete."""
    for name, param in model.named_parameters():
        if param._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"{name} has a hook of register_post_accumulate_grad_hook, which would run before its gradient is "
                "summed over micro-batches and ranks; use register_hook, which runs on the whole gradient"
            )
        if param.grad is not None:
            raise ConfigurationError(
                f"{name} has a gradient from before boost(); call model.zero_grad() before boost(), or run the "
                "backward pass after it"
            )


def check_shared_parameters(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, Sequence[str]]) -> None:
    """Refuse a parameter that two optimizers update; `names`: id of each model parameter -> its names."""
    seen: set[int] = set()
    for optim in optimizers:
        held = {id(param) for group in optim.param_groups for param in group["params"]}
        if both := seen & held:
            name = min(names[each][0] for each in both)
            raise ConfigurationError(f"two optimizers hold {name}; give each parameter to one of them")
        seen |= held


def check_memory(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Refuse tensors that lie in the memory of a parameter that an optimizer updates, and are not this parameter.

    Plain updates reach both. `boost` gives each memory of its own, and two parameters in one memory have gradients and
    optimizer states of their own, so that tying them would not be the same either.
    """
    held = {id(param) for optim in optimizers for group in optim.param_groups for param in group["params"]}
    in_storage: dict[UntypedStorage, list[tuple[str, Tensor]]] = {}  # by address, all meta tensors would be in one
    for name, tensor in _tensors_of(model):
        in_storage.setdefault(tensor.untyped_storage(), []).append((name, tensor))
    for tensors in in_storage.values():
        tensors.sort(key=lambda item: _span(item[1])[0])
        for index, (name, tensor) in enumerate(tensors):
            for other_name, other in tensors[index + 1 :]:
                if _span(other)[0] >= _span(tensor)[1]:
                    break
                if not held.isdisjoint((id(tensor), id(other))) and _overlap(tensor, other):
                    raise ConfigurationError(
                        f"{name} and {other_name} are two tensors in one memory, and boost() gives each its own, so "
                        f"that updates of one would no longer reach the other; {_way_out(tensor, other, model)}"
                    )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters and buffers, and the tensors that are attributes of its modules, once each."""
    attributes = (
        (f"{path}.{name}".lstrip("."), value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        # The old weight norm and spectral norm compute the attribute from its parameter in each forward.
        if isinstance(value, Tensor) and f"{name}_orig" not in module._parameters
    )
    seen: set[int] = set()
    for name, tensor in chain(model.named_parameters(), model.named_buffers(), attributes):
        if id(tensor) not in seen and tensor.layout == torch.strided and not is_lazy(tensor) and tensor.numel():
            seen.add(id(tensor))
            yield name, tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage between which a tensor lies."""
    begin = tensor.storage_offset()
    end = begin + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, end * tensor.itemsize


def _place(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _overlap(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common; columns of one matrix have none."""
    if _place(tensor) == _place(other) or tensor.dtype != other.dtype:
        return True
    end = max(_span(tensor)[1], _span(other)[1]) // tensor.itemsize
    taken = torch.zeros(end, dtype=torch.bool, device="cpu")
    taken.as_strided(*_place(tensor)).fill_(True)
    return bool(taken.as_strided(*_place(other)).any())


def _way_out(tensor: Tensor, other: Tensor, model: nn.Module) -> str:
    if _place(tensor) == _place(other):
        return "assign one nn.Parameter to both names, or clone one of them"
    advice = "compute one from the other in the forward pass, or clone one of them"
    return f"use ensure_weight_tying=False, or {advice}" if adapter_configs(model) else advice


def warn_of_untrained(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Warn about named parameters that require gradients but are in no optimizer: norms do not include them."""
    held = {id(param) for optim in optimizers for group in optim.param_groups for param in group["params"]}
    untrained = [name for name, param in parameters if param.requires_grad and id(param) not in held]
    if untrained and optimizers and dist.get_rank() == 0:
        _logger.warning(
            "%s%s takes gradients and is in no optimizer: max_norm and clip_grad_norm_ do not count them, as torch's "
            "clip_grad_norm_(model.parameters()) would; set requires_grad=False, or give it to an optimizer",
            untrained[0],
            f" (one of {len(untrained)})" if len(untrained) > 1 else "",
        )


def check_optimizer(optim: torch.optim.Optimizer, names: Mapping[int, Sequence[str]]) -> None:
    """Refuse an optimizer that holds parameters of another model; `names`: id of each model parameter -> its names."""
    for group in optim.param_groups:
        if any(id(param) not in names for param in group["params"]):
            raise ConfigurationError(
                f"{type(optim).__name__} holds a parameter that is not in the model given to boost(); "
                "make the optimizer from this model's parameters()"
            )


def check_options(options: Mapping[str, Any]) -> None:
    """Compare the keywords of `HybridParallelPlugin` of all ranks; raises on all with the difference."""
    if dist.get_world_size() == 1:
        return
    options = {name: _plain(value) for name, value in options.items()}
    number = checksum_of(options)
    extremes = torch.tensor([number, -number])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=world_group())
    if extremes[0] == -extremes[1]:
        return
    everyone = all_gather_json(options)
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                raise ConfigurationError(
                    f"{name} differs between ranks 0 and {rank} ({value} and {other[name]}); "
                    f"use {name}={value} on all ranks"
                )


def _plain(value: object) -> str:
    """Return the comparable part of an option's value as text: for a policy, its class."""
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True, default=repr)
    if value is None or isinstance(value, str | int | float | list | tuple | Path | TPInfo):
        return repr(value)
    return (value if isinstance(value, type) else type(value)).__qualname__
