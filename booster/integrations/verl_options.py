"""What verl's configurations say of an engine, in the options of `HybridParallelPlugin` and in objects of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from booster.errors import ConfigurationError

# Names of sizes in verl's engine configurations -> ours.
_SIZES = {
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "tensor_model_parallel_size"), "tp_size"),
    **dict.fromkeys(("pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size"), "pp_size"),
    **dict.fromkeys(("cp_size", "context_parallel_size"), "cp_size"),
    **dict.fromkeys(("ep_size", "expert_parallel_size", "expert_model_parallel_size"), "ep_size"),
}
_PRECISIONS = {
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("float16", "fp16"), "fp16"),
    **dict.fromkeys(("float32", "fp32"), "fp32"),
}
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Fields that the engine or verl's workers read.
_READ = {
    *("strategy", "dtype", "model_dtype", "zero_stage", "plugin", "seed", "full_determinism", "forward_only"),
    *("param_offload", "optimizer_offload", "use_dynamic_bsz", "use_remove_padding", "router_replay", "extra"),
    *("max_token_len_per_gpu", "micro_batch_size_per_gpu"),
    *("infer_max_token_len_per_gpu", "infer_micro_batch_size_per_gpu"),
}
# What a model configuration may ask for -> what does the same here.
_OF_MODEL = {
    "use_liger": "engine.plugin.enable_fused_normalization=True",
    "use_fused_kernels": "use_fused_kernels=False: log-probabilities are computed for one micro-batch at a time",
}


def plugin_options(engine_config: Any, model_config: Any) -> dict[str, Any]:
    """Return the plugin's options; raises ConfigurationError for a field without a meaning under a layout."""
    options: dict[str, Any] = {"microbatch_size": 1, "seed": getattr(engine_config, "seed", 42)}
    for name, value in vars(engine_config).items():
        if name in _SIZES:
            options[_SIZES[name]] = value
        elif not name.startswith("_") and name not in _READ and value != getattr(type(engine_config), name, None):
            instead = _OF_MODEL.get(name, f"leave it out, or give an option of the plugin in engine.plugin, not {name}")
            raise ConfigurationError(f"engine.{name}={value!r} means nothing to hybrid_booster; use {instead}")
    for name, instead in _OF_MODEL.items():
        if getattr(model_config, name, False):
            raise ConfigurationError(f"model.{name}=True means nothing to hybrid_booster; use {instead}")
    replay = getattr(getattr(engine_config, "router_replay", None), "mode", "disabled")
    if replay != "disabled":
        raise ConfigurationError(
            f"engine.router_replay.mode={replay!r} means nothing to hybrid_booster; use 'disabled'"
        )
    options["zero_stage"] = getattr(engine_config, "zero_stage", 1)
    options["precision"] = _named(engine_config.dtype, _PRECISIONS, "engine.dtype")
    if getattr(model_config, "enable_gradient_checkpointing", False):
        options["gradient_checkpointing"] = "full"
    if getattr(model_config, "enable_activation_offload", False):
        options["offload_activations"] = "cpu"
    return options | _offload(engine_config) | dict(getattr(engine_config, "plugin", {}))


def _offload(engine_config: Any) -> dict[str, Any]:
    """Return the options that keep parameters and optimizer states in the memory of the machine."""
    found: dict[str, Any] = {}
    if engine_config.param_offload:
        if engine_config.forward_only:
            raise ConfigurationError(
                "engine.param_offload=True shards parameters as an optimizer does, and forward_only=True has none; use "
                "param_offload=False"
            )
        found |= {"zero_stage": 3, "offload_parameters": "cpu"}
    return found | ({"offload_optimizer": "cpu"} if engine_config.optimizer_offload else {})


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that verl's `model_dtype` names; raises ConfigurationError if it names none."""
    by_torch = {str(each).removeprefix("torch."): each for each in _DTYPES.values()}
    return _named(name, {**_DTYPES, **by_torch}, "model_dtype")


def _named(value: Any, known: dict[str, Any], name: str) -> Any:
    if value not in known:
        raise ConfigurationError(f"{name}={value!r} is none of {', '.join(known)}; use one of them")
    return known[value]


def scheduler_of(optimizer: torch.optim.Optimizer, config: Any) -> LRScheduler:
    """Return the schedule of the learning rate that verl's optimizer configuration asks for."""
    from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

    total, warmup = config.total_training_steps, config.lr_warmup_steps
    if warmup is None or warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * total)
    if getattr(config, "lr_scheduler_type", "constant") == "constant":
        return get_constant_schedule_with_warmup(optimizer, num_warmup_steps=warmup)
    given = {"min_lr_ratio": config.min_lr_ratio or 0.0, "num_cycles": config.num_cycles}
    given |= {"num_warmup_steps": warmup, "num_training_steps": total, "zero_indexed_step": config.zero_indexed_step}
    return get_cosine_schedule_with_warmup(optimizer, **given)
