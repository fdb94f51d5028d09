"""Arguments of transformers' Trainer that cannot hold under a layout, each refused in one sentence."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate.utils import parse_flag_from_env
from packaging.version import Version
from transformers import GenerationMixin
from transformers.debug_utils import DebugOption

from booster.errors import ConfigurationError
from booster.integrations.trainer_accelerator import CountedReplicas
from booster.plugin import Plugin

# Argument of TrainingArguments -> what to do instead; refused if it is set.
_OTHER_WAYS = {
    "deepspeed": "DeepSpeed is another engine; leave it out, and give HybridParallelPlugin(zero_stage=1)",
    "fsdp": "FSDP is another engine; leave it out, and give HybridParallelPlugin(zero_stage=1)",
    "parallelism_config": "accelerate's parallelism is another engine; leave it out, and give tp_size, cp_size to the "
    "plugin",
    "torch_compile": "torch.compile cannot trace the communication of a boosted model; use "
    "HybridParallelPlugin(compile_layers=True)",
    "auto_find_batch_size": "one rank that runs out of memory would leave the others waiting; set "
    "per_device_train_batch_size",
    "neftune_noise_alpha": "its noise is added by a hook of the embedding, which a layout cuts; add the noise in your "
    "data collator, or leave it out",
    "enable_jit_checkpoint": "each rank would save at its own signal, and wait for the others; use save_steps, and "
    "resume_from_checkpoint after a restart",
    "use_liger_kernel": "its kernels replace modules that a layout cuts; use "
    "HybridParallelPlugin(enable_all_optimization=True)",
    "fp16_full_eval": "a boosted model keeps the precision of its weights; use HybridParallelPlugin(precision='fp16')",
    "bf16_full_eval": "a boosted model keeps the precision of its weights; use HybridParallelPlugin(precision='bf16')",
}
_OLDEST = "5.17"


def check_version(found: str) -> None:
    """Refuse a release of transformers whose Trainer calls other methods."""
    if Version(found) < Version(_OLDEST):
        raise ConfigurationError(
            f"transformers {found} is too old for booster.integrations.transformers; install transformers>={_OLDEST}"
        )


def check_job(args: Any) -> None:
    """Refuse arguments, or ranks, that count other processes than the process group does."""
    for name, variable in (("FSDP", "ACCELERATE_USE_FSDP"), ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED")):
        if parse_flag_from_env(variable):
            raise ConfigurationError(
                f"{variable} asks for {name}, another engine; start the script by `booster run` or torchrun"
            )
    world_size = dist.get_world_size()
    if args.world_size != world_size and not isinstance(args.distributed_state, CountedReplicas):
        is_on_cpu = dist.is_torchelastic_launched() and args.device.type == "cpu" and not args.use_cpu
        fix = (
            "on CPUs use TrainingArguments(use_cpu=True)"
            if is_on_cpu
            else "set RANK, LOCAL_RANK and WORLD_SIZE before making TrainingArguments, as `booster run` and torchrun do"
        )
        raise ConfigurationError(
            f"TrainingArguments counts {args.world_size} process, and the process group {world_size} ranks; {fix}"
        )


def check_arguments(args: Any, plugin: Plugin) -> None:
    """Refuse arguments that would train otherwise than they say."""
    for name, reason in _OTHER_WAYS.items():
        value = getattr(args, name, None)
        if value:
            raise ConfigurationError(f"TrainingArguments({name}={value!r}): {reason}")
    _check_precision(args, getattr(plugin, "precision", "fp32"))
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        raise ConfigurationError(
            "TrainingArguments(debug='underflow_overflow') hooks modules that a layout replaces; use "
            "HybridParallelPlugin(debug=True)"
        )
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise ConfigurationError(
            "TrainingArguments(train_sampling_strategy='batch_rebalance') balances batches by rank, which a boosted "
            "loader does by replica; use 'random' or 'group_by_length'"
        )
    if args.accelerator_config.split_batches:
        raise ConfigurationError(
            "TrainingArguments(accelerator_config={'split_batches': True}) shares batches out in another way than a "
            "boosted loader; leave it out"
        )
    if plugin.dp_size > 1:
        _check_replicas(args, plugin.dp_size)


def _check_precision(args: Any, precision: str) -> None:
    if args.fp16 and precision != "fp16":
        raise ConfigurationError(
            f"TrainingArguments(fp16=True) with the plugin's precision {precision!r}: the plugin scales the loss; use "
            "HybridParallelPlugin(precision='fp16')"
        )
    if args.bf16 and precision == "fp16":
        raise ConfigurationError("TrainingArguments(bf16=True) with HybridParallelPlugin(precision='fp16'); choose one")


def _check_replicas(args: Any, dp_size: int) -> None:
    """Refuse what depends on how many replicas there are."""
    if args.average_tokens_across_devices is False:
        raise ConfigurationError(
            f"TrainingArguments(average_tokens_across_devices=False) takes a mean of {dp_size} replicas' means, which "
            "depends on the layout; leave it out"
        )
    if args.eval_use_gather_object:
        raise ConfigurationError(
            f"TrainingArguments(eval_use_gather_object=True) would send pickles between {dp_size} replicas; return "
            "tensors from prediction_step, or evaluate with dp_size=1"
        )


def check_model(model: Any, args: Any, plugin: Plugin) -> None:
    """Refuse a model of which neither the loss nor, if evaluated, `generate` is that of transformers."""
    own = getattr(type(model), "generate", GenerationMixin.generate) is not GenerationMixin.generate
    pp_size = getattr(plugin, "pp_size", 1)
    if own and pp_size > 1 and getattr(args, "predict_with_generate", False):
        raise ConfigurationError(
            f"{type(model).__name__} has a generate() of its own, which predict_with_generate=True calls and "
            f"pp_size={pp_size} has in pieces; use pp_size=1, or predict_with_generate=False"
        )
    if getattr(getattr(model, "config", None), "return_dict", True) is False:
        raise ConfigurationError(
            "model.config.return_dict=False: a boosted Trainer reads the loss by its name; set it to True"
        )
