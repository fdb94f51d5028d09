"""Arguments of transformers' Trainer that cannot hold under a layout, each refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

import torch.distributed as dist

from booster.errors import ConfigurationError
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
    "neftune_noise_alpha": "its noise is added by a hook of the embedding, which a layout cuts; leave it out",
    "use_liger_kernel": "its kernels replace modules that a layout cuts; use "
    "HybridParallelPlugin(enable_all_optimization=True)",
    "fp16_full_eval": "a boosted model keeps the precision of its weights; use HybridParallelPlugin(precision='fp16')",
    "bf16_full_eval": "a boosted model keeps the precision of its weights; use HybridParallelPlugin(precision='bf16')",
}
_SAMPLING: dict[str, Callable[[Any], Any]] = {
    "batch_rebalance": lambda args: getattr(args, "train_sampling_strategy", None) == "batch_rebalance",
}


def check_job(args: Any) -> None:
    """Refuse arguments that count other processes than the process group does.

    Raises:
        ConfigurationError: if the ranks were started without torchrun's environment variables.
    """
    world_size = dist.get_world_size()
    if args.world_size != world_size:
        raise ConfigurationError(
            f"TrainingArguments counts {args.world_size} process, and the process group {world_size} ranks; set RANK, "
            "LOCAL_RANK and WORLD_SIZE before TrainingArguments is made, as `booster run` and torchrun do"
        )


def check_arguments(args: Any, plugin: Plugin) -> None:
    """Refuse arguments that would train otherwise than they say.

    Raises:
        ConfigurationError: the argument, the reason, and what to use.
    """
    for name, reason in _OTHER_WAYS.items():
        value = getattr(args, name, None)
        if value:
            raise ConfigurationError(f"TrainingArguments({name}={value!r}): {reason}")
    precision = getattr(plugin, "precision", "fp32")
    if args.fp16 and precision != "fp16":
        raise ConfigurationError(
            f"TrainingArguments(fp16=True) with the plugin's precision {precision!r}: the plugin scales the loss; use "
            "HybridParallelPlugin(precision='fp16')"
        )
    if args.bf16 and precision == "fp16":
        raise ConfigurationError("TrainingArguments(bf16=True) with HybridParallelPlugin(precision='fp16'); choose one")
    if args.average_tokens_across_devices is False and plugin.dp_size > 1:
        raise ConfigurationError(
            f"TrainingArguments(average_tokens_across_devices=False) takes a mean of {plugin.dp_size} replicas' means, "
            "which depends on the layout; leave it out"
        )
    for name, is_asked in _SAMPLING.items():
        if is_asked(args):
            raise ConfigurationError(
                f"TrainingArguments(train_sampling_strategy={name!r}) balances batches by rank, which a boosted loader "
                "does by replica; use 'random' or 'group_by_length'"
            )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, None):
            raise ConfigurationError(
                f"accelerator_config={{{name!r}: True}} shares batches out in another way than a boosted loader; leave "
                "it out"
            )


def check_datasets(trainer: Any) -> None:
    """Refuse a training dataset without length if nothing else says when training ends.

    Raises:
        ConfigurationError: if `max_steps` is missing.
    """
    data, args = trainer.train_dataset, trainer.args
    if data is not None and not isinstance(data, Sized) and args.max_steps <= 0:
        raise ConfigurationError(
            f"train_dataset={type(data).__name__} has no length, so that num_train_epochs={args.num_train_epochs} says "
            "not when training ends; set max_steps in TrainingArguments"
        )
