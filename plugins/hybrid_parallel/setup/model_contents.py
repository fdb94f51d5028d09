"""Checks of model contents that do not work with every layout: peft adapters and quantised weights."""

from __future__ import annotations

from torch import nn

from plugins.hybrid_parallel.config.options import HybridParallelConfig
from shardformer.expert_parallel.experts import expert_modules
from shardformer.expert_parallel.router_bias import router_biases
from shardformer.peft import adapter_configs, check_adapters, model_inside
from shardformer.quantised import is_quantised, kind_of_layer, quantised_layers, quantised_name
from shardformer.utils.forward_reads import reads_of_forward


def check_contents(model: nn.Module, config: HybridParallelConfig) -> None:
    """Check that the layout supports what the model contains, before anything is changed.

    Raises:
        ValueError: if it does not.
    """
    parallel = config.parallel
    sizes = {name: getattr(parallel, name) for name in ("tp_size", "pp_size", "cp_size", "ep_size")}
    check_adapters(model, [f"{name}={size}" for name, size in sizes.items() if size > 1])
    _check_head(model_inside(model), parallel.tp_size)
    _check_experts(model_inside(model), config)
    packed = quantised_name(model_inside(model))
    if packed is not None or getattr(model_inside(model), "hf_quantizer", None) is not None:
        _check_quantised(model, packed, config)


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


def _check_experts(model: nn.Module, config: HybridParallelConfig) -> None:
    """Refuse options of routers where there are none, or none of whose experts tokens can be counted."""
    name, rate = type(model).__name__, config.policy.moe_router_bias_update_rate
    if rate and not router_biases(model):
        raise ValueError(
            f"moe_router_bias_update_rate={rate} finds no router in {name} with a bias for the choice of experts in "
            "stacked parameters (e_score_correction_bias, expert_bias); use moe_router_bias_update_rate=0"
        )
    if config.policy.count_expert_load and next(expert_modules(model), None) is None:
        raise ValueError(
            f"count_expert_load=True finds no experts in stacked parameters in {name}; use count_expert_load=False"
        )


def _check_quantised(model: nn.Module, packed: str | None, config: HybridParallelConfig) -> None:
    """Refuse quantised weights without adapters, and those of which it is not known how they are cut."""
    inside, tp_size = model_inside(model), config.parallel.tp_size
    name, what = type(inside).__name__, f"{packed} is packed" if packed is not None else "its weights are packed"
    if packed is not None and not adapter_configs(model):
        raise ValueError(
            f"a quantised {name} ({what}) has no weights that can be trained; wrap it by peft's get_peft_model, or "
            "load it without quantization_config"
        )
    if config.mixed_precision.precision == "fp8":
        raise ValueError(
            f"precision='fp8' cannot multiply the quantised weights of this {name} ({what}); use precision='bf16'"
        )
    for path, module, kind in quantised_layers(inside):
        if (problem := kind.unusable(module)) is not None:
            raise ValueError(f"{path} has {problem}")
    unknown = _first_unknown(inside)
    if tp_size > 1 and (unknown is not None or packed is None):
        raise ValueError(
            f"tp_size={tp_size} cannot shard a quantised {name}: {unknown or 'its weights'} of a kind that is not "
            "known; use the linear layers of bitsandbytes, tp_size=1 (dp and pp work), or load it without "
            "quantization_config"
        )


def _first_unknown(model: nn.Module) -> str | None:
    """Return which quantised parameter belongs to no layer that can be cut: "NAME is"; None if all do."""
    for path, module in model.named_modules():
        own = _quantised_of(module) if kind_of_layer(module) is None else None
        if own is not None:
            return f"{path}.{own} is"
    return None


def _quantised_of(module: nn.Module) -> str | None:
    return next((name for name, parameter in module.named_parameters(recurse=False) if is_quantised(parameter)), None)
