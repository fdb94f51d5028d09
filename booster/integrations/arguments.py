"""Options of transformers' Trainer, TRL and accelerate: read by ranks, and refused where no layout keeps their word.

Each refusal is one sentence, on all ranks that have the option.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
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
    parse_flag_from_env,
)
from packaging.version import Version
from transformers import GenerationMixin, HfArgumentParser
from transformers.debug_utils import DebugOption

from booster.arguments import RankParser
from booster.errors import ConfigurationError
from booster.logging import get_logger
from booster.plugin import Plugin
from shardformer.attention import log_once

_log = get_logger(__name__)

OLDEST = {"transformers": "5.17", "accelerate": "1.1", "trl": "1.16"}  # releases that the integrations run with


class TrainingParser(RankParser, HfArgumentParser):
    """transformers' `HfArgumentParser`, by which a user's mistake is one sentence, printed once.

    Example:
        ```python
        options, args = TrainingParser((Options, TrainingArguments)).parse()
        ```
    """

    def parse(self, arguments: list[str] | None = None) -> tuple[Any, ...]:
        """Return an instance of each dataclass; `arguments` are those of the command line unless given.

        An option that none of them has, or a value that one of them refuses, ends the script with exit code 2.
        """
        try:
            *parsed, unknown = self.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
        except ValueError as error:
            self.error(" ".join(str(error).split()))
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return tuple(parsed)


# ----- Trainer -----

_DEEPSPEED = "DeepSpeed is another engine; leave it out, and give HybridParallelPlugin(zero_stage=1)"
_FSDP = "FSDP is another engine; leave it out, and give HybridParallelPlugin(zero_stage=1)"
_PARALLELISM = "accelerate's parallelism is another engine; leave it out, and give tp_size, cp_size to the plugin"
# Argument of TrainingArguments -> what to do instead; refused if it is set.
_OTHER_WAYS = {
    "deepspeed": _DEEPSPEED,
    "fsdp": _FSDP,
    "parallelism_config": _PARALLELISM,
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


def check_release(package: str, found: str) -> None:
    """Refuse a release of transformers or accelerate that lacks what the integration calls."""
    if Version(found) < Version(OLDEST[package]):
        raise ConfigurationError(
            f"{package} {found} is too old for booster.integrations.{package}; install {package}>={OLDEST[package]}"
        )


def check_job(args: Any) -> None:
    """Refuse arguments, or ranks, that count other processes than the process group does."""
    for name, variable in (("FSDP", "ACCELERATE_USE_FSDP"), ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED")):
        if parse_flag_from_env(variable):
            raise ConfigurationError(
                f"{variable} asks for {name}, another engine; start the script by `booster run` or torchrun"
            )
    world_size = dist.get_world_size()
    if args.world_size != world_size and not getattr(args.distributed_state, "counts_replicas", False):
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


# ----- TRL -----

ASYNCHRONOUS = ("AsyncGRPOTrainer", "AsyncDistillationTrainer")  # they train on a queue of rollouts
_TRAINERS = (
    *("SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "GMPOTrainer"),
    *("GKDTrainer", "CPOTrainer", "ORPOTrainer", "TPOTrainer", "OnlineDPOTrainer", "SDPOTrainer", "SDFTTrainer"),
    *("A2POTrainer", "IWOPDTrainer", "GOLDTrainer", "DistillationTrainer", "ServerDistillationTrainer"),
    *ASYNCHRONOUS,
)
_OF_TOKENS = ("bnpo", "dapo")  # losses of SDPO that are means over the tokens of a replica
GROUPED = ("GRPOTrainer", "RLOOTrainer", "GMPOTrainer")  # they compare the completions of a prompt
# Losses of DPO that are no mean over pairs.
_OF_A_BATCH = {
    "aot": "sorts the pairs of a batch",
    "aot_unpaired": "sorts the answers of a batch",
    "sft": "is a mean over the tokens of a batch",
}


def check_trainer_class(names: list[str]) -> None:
    """Refuse a class of TRL that does not hold under layouts.

    Args:
        names: classes of TRL that the trainer derives from, itself included, the nearest first: some of those that
            generate derive from one that does not.

    Raises:
        ConfigurationError: if the nearest is none of those that do, or TRL is too old, or no installed package.
    """
    oldest = OLDEST["trl"]
    try:
        installed = version("trl")
    except PackageNotFoundError:
        raise ConfigurationError(
            f"boosted() got TRL's {names[0]}, and TRL is not installed as a package that has a version; "
            f"pip install 'trl>={OLDEST['trl']}'"
        ) from None
    if Version(installed) < Version(oldest):
        raise ConfigurationError(
            f"TRL {installed} is installed, and boosted() needs the fused head of TRL {OLDEST['trl']}; "
            f"pip install 'trl>={OLDEST['trl']}'"
        )
    if names[0] not in _TRAINERS:
        raise ConfigurationError(
            f"boosted() got TRL's {names[0]}, which generates, or takes means over processes, as no layout does; use "
            f"{', '.join(_TRAINERS[:-1])} or {_TRAINERS[-1]}, or run {names[0]} without boosted()"
        )


def check_trl_options(names: list[str], args: Any, plugin: Plugin) -> None:
    """Refuse options of a configuration that would train otherwise than they say."""
    kind = type(args).__name__
    if names[0] == "TPOTrainer" and plugin.dp_size > 1:
        raise ConfigurationError(
            f"{names[0]} adds means over the tokens and over the pairs of a batch, which dp_size={plugin.dp_size} "
            "shares out; use dp_size=1, as with tp_size or pp_size for all ranks"
        )
    if getattr(args, "activation_offloading", False):
        raise ConfigurationError(
            f"{kind}(activation_offloading=True) hooks modules that a layout replaces; use gradient_checkpointing=True"
        )
    if getattr(args, "use_vllm", False):
        _check_vllm(names[0], args, plugin)
    if hasattr(args, "num_generations"):
        _check_generation(args, plugin)
    losses = getattr(args, "loss_type", None)
    for loss in losses if isinstance(losses, list) else ():
        if loss in _OF_A_BATCH and plugin.dp_size > 1:
            raise ConfigurationError(
                f"{kind}(loss_type={losses}): {loss!r} {_OF_A_BATCH[loss]}, which dp_size={plugin.dp_size} shares out; "
                "use dp_size=1, or another loss"
            )


def _check_vllm(name: str, args: Any, plugin: Plugin) -> None:
    """Refuse what is not compared with a stand-in of vLLM, and engines that ranks of a replica cannot make up."""
    kind, mine = type(args).__name__, {*ranks_of_replica(plugin)}
    if name == "OnlineDPOTrainer" and args.vllm_mode == "colocate":
        raise ConfigurationError(
            f"{kind}(vllm_mode='colocate') starts an engine by itself, which knows nothing of the ranks of a replica; "
            "use vllm_mode='server'"
        )
    size = args.vllm_tensor_parallel_size
    # The ranks of an engine follow one another, as TRL groups processes.
    fitting = [
        each
        for each in range(1, len(mine) + 1)
        if all({*range(rank // each * each, (rank // each + 1) * each)} <= mine for rank in mine)
    ]
    if args.vllm_mode == "colocate" and size not in fitting:
        raise ConfigurationError(
            f"{kind}(vllm_tensor_parallel_size={size}) makes an engine of {size} ranks one after the other, which must "
            f"be of one replica; use {' or '.join(map(str, fitting))}, or vllm_mode='server'"
        )


def ranks_of_replica(plugin: Plugin) -> list[int]:
    """Return the ranks of this rank's data-parallel replica, in ascending order."""
    axes, ranks = plugin.mesh.mesh_dim_names, plugin.mesh.mesh
    return sorted(ranks.movedim(axes.index("dp"), 0)[plugin.mesh["dp"].get_local_rank()].flatten().tolist())


def _check_generation(args: Any, plugin: Plugin) -> None:
    """Refuse options of a trainer that generates."""
    kind, replicas = type(args).__name__, plugin.dp_size
    reasons = {
        "use_transformers_continuous_batching": "schedules requests on each rank by itself; leave it out",
        "cast_lm_head_to_fp32": "replaces the forward of a head that a layout cuts; use precision='fp32', or leave it "
        "out",
    }
    for name, reason in reasons.items():
        if getattr(args, name, False):
            raise ConfigurationError(f"{kind}({name}=True) {reason}")
    if replicas == 1:
        return
    masked, loss = getattr(args, "top_entropy_quantile", 1.0) < 1.0, getattr(args, "loss_type", None)
    adapts = getattr(args, "use_adaptive_entropy", False)
    if (masked and (adapts or getattr(args, "entropy_coef", 0.0))) or (adapts and loss != "bnpo"):
        raise ConfigurationError(
            f"the entropy bonus of {kind} is a mean over the tokens of a batch, which dp_size={replicas} shares out; "
            "use dp_size=1, or entropy_coef with top_entropy_quantile=1.0, without use_adaptive_entropy"
        )
    weight = getattr(args, "distillation_weight", 1.0)
    if weight < 1.0 and loss in _OF_TOKENS:
        raise ConfigurationError(
            f"{kind}(distillation_weight={weight}) adds means over the tokens and over the completions of a batch, "
            f"which dp_size={replicas} shares out; use dp_size=1, or loss_type='grpo'"
        )


def count_generations(args: Any, replicas: int) -> None:
    """Let a generation batch, which counted all ranks, be that of replicas, in whole groups of generations."""
    steps = getattr(args, "steps_per_generation", None)
    if steps is None or getattr(args, "num_generations", None) is None:
        return
    kind, given = type(args).__name__, args.generation_batch_size
    args.generation_batch_size = size = args.per_device_train_batch_size * replicas * steps
    counted = f"{replicas} {'replica' if replicas == 1 else 'replicas'}"
    if size % args.num_generations:
        raise ConfigurationError(
            f"{kind}(num_generations={args.num_generations}) does not divide the {size} completions of a generation: "
            f"per_device_train_batch_size={args.per_device_train_batch_size}, times steps_per_generation={steps}, "
            f"times {counted}; use a divisor, or a larger batch"
        )
    if size != given:
        log_once(kind, f"generates {size} completions at a time, those of {counted}, where it counted ranks")


def check_asynchronous(kind: str, plugin: Plugin) -> None:
    """Refuse layouts and kernels that take the jumps of positions in a tree of tokens for documents."""
    kernels = getattr(getattr(plugin, "config", None), "kernels", None)
    switches = ("enable_flash_attention", "enable_all_optimization")
    given = {"cp_size": plugin.mesh["cp"].size(), **{name: getattr(kernels, name, False) for name in switches}}
    for name, value in given.items():
        if kind == "AsyncGRPOConfig" and value not in (1, False):
            raise ConfigurationError(
                f"{kind} packs rollouts into trees of tokens, to which {name}={value!r} has no attention; leave it out"
            )


def check_options_of_model(trainer: Any) -> None:
    """Refuse what depends on the model, or on functions that were given to the trainer."""
    plugin = trainer.plugin
    spread = _what_spreads_tokens(plugin)
    if getattr(trainer, "aux_loss_enabled", False) and spread:
        raise ConfigurationError(
            f"router_aux_loss_coef={_coefficient_of_routers(trainer)} weights a loss over the router scores of all "
            f"tokens of a batch, which {spread}, or router_aux_loss_coef=0.0"
        )
    if trainer.compute_metrics is not None and plugin.dp_size > 1 and not hasattr(trainer, "completion_only_loss"):
        raise ConfigurationError(
            f"compute_metrics of a {type(trainer).__name__} gets the two answers of each pair in rows that dp_size="
            f"{plugin.dp_size} orders otherwise; use dp_size=1, or the metrics that the trainer logs"
        )


def _coefficient_of_routers(trainer: Any) -> float:
    return trainer.router_aux_loss_coef if hasattr(trainer, "router_aux_loss_coef") else trainer.aux_loss_coef


def check_callbacks(callbacks: Iterable[Any], plugin: Plugin) -> None:
    """Refuse callbacks of TRL that load the weights of this rank into a whole model."""
    parallel, zero = (getattr(getattr(plugin, "config", None), group, None) for group in ("parallel", "zero"))
    sizes = {name: getattr(parallel, name, 1) for name in ("tp_size", "pp_size", "ep_size")}
    reasons = [f"of which {name}={size} leaves it a part" for name, size in sizes.items() if size > 1]
    if getattr(zero, "zero_stage", 0) == 3:
        reasons.append("of which zero_stage=3 leaves it a part")
    if (precision := getattr(plugin, "precision", "fp32")) != "fp32":
        reasons.append(f"whose weights precision='{precision}' rounds")
    names = {base.__name__ for each in callbacks for base in type(each).__mro__ if base.__module__.startswith("trl.")}
    if "BEMACallback" in names and reasons:
        raise ConfigurationError(
            f"BEMACallback averages a whole model on each rank, {reasons[0]}; use replicas alone (dp_size) in fp32, or "
            "ShardedEMA in a callback of your own"
        )


def _what_spreads_tokens(plugin: Plugin) -> str:
    """Return what keeps the auxiliary loss of routers from being that of one process; empty if it is the same.

    Under a pipeline, the sums that it is made of are added up over stages and replicas.
    """
    sizes = {axis: plugin.mesh[axis].size() for axis in ("pp", "dp", "cp")}
    parallel = getattr(getattr(plugin, "config", None), "parallel", None)
    mode = getattr(parallel, "sequence_parallelism_mode", "") if getattr(parallel, "cuts_over_tp", False) else ""
    if sizes["cp"] > 1:
        return f"cp_size={sizes['cp']} spreads over ranks; use cp_size=1"
    if mode == "all_to_all":
        return "sequence_parallelism_mode='all_to_all' spreads over ranks; use 'split_gather'"
    if sizes["dp"] > 1 and sizes["pp"] == 1:
        return f"dp_size={sizes['dp']} spreads over replicas; use dp_size=1, a pipeline such as pp_size=2"
    return ""


def check_shares(trainer: Any, rows: int) -> None:
    """Refuse, on all replicas, a batch of which one has no samples, or fewer where groups are compared."""
    if trainer.plugin.dp_size == 1:
        return
    counts = trainer.accelerator.replicas.gather(torch.tensor(rows, device=trainer.args.device)).tolist()
    compares = trainer._class_of_trl in (*GROUPED, "SDPOTrainer") or trainer.accelerator.all_ranks_lead
    if min(counts) == 0 or (compares and len(set(counts)) > 1):
        raise unlike_shares(trainer, counts)


def unlike_shares(trainer: Any, counts: list[int], why: str = "generate for as many each") -> ConfigurationError:
    """Return the error of replicas that have so many samples each."""
    return ConfigurationError(
        f"the replicas of a {type(trainer).__name__} get {counts} samples of a batch, and {why}; "
        f"use as many samples as make whole batches, or dataloader_drop_last=True"
    )


# ----- accelerate -----

_ENGINES = {
    "deepspeed_plugin": _DEEPSPEED,
    "deepspeed_plugins": _DEEPSPEED,
    "fsdp_plugin": _FSDP,
    "megatron_lm_plugin": "Megatron-LM is another engine; leave it out, and give HybridParallelPlugin(tp_size=2)",
    "torch_tp_plugin": "accelerate's parallelism is another engine; leave it out, and give tp_size to the plugin",
    "parallelism_config": _PARALLELISM,
}
# Variables by which `accelerate launch` asks for the same.
_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin",
    "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}


def check_accelerator(options: dict[str, Any], precision: str, on_gpu: bool) -> None:
    """Refuse options that would train otherwise than they say; `precision`: the plugin's."""
    for name, reason in _ENGINES.items():
        if options.get(name) is not None:
            raise ConfigurationError(f"Accelerator({name}=...): {reason}")
    for variable, name in _VARIABLES.items():
        if _is_set(variable):
            raise ConfigurationError(f"{variable}={os.environ[variable]} asks for {name}: {_ENGINES[name]}")
    _check_mixed_precision(options.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION"), precision)
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


def _check_mixed_precision(wanted: Any, precision: str) -> None:
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


def check_number(kind: str, prepared: int, saved: int, folder: Path) -> None:
    """Refuse a saved state of another number of objects than are prepared."""
    if prepared != saved:
        raise ConfigurationError(
            f"{folder} is the state of {saved} {kind}, and the accelerator has {prepared}; prepare and register what "
            "was saved"
        )


def refuse_options(method: str, options: dict[str, Any]) -> None:
    """Refuse options of another engine."""
    if options:
        raise ConfigurationError(f"{method}() cannot take {sorted(options)} under a layout; leave it out")
