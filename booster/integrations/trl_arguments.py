"""Trainers and options of TRL that hold under a layout; all else is refused in one sentence, on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from booster.errors import ConfigurationError
from booster.plugin import Plugin
from shardformer.attention import log_once

_OLDEST = "1.16"
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
    try:
        installed = version("trl")
    except PackageNotFoundError:
        raise ConfigurationError(
            f"boosted() got TRL's {names[0]}, and TRL is not installed as a package that has a version; "
            f"pip install 'trl>={_OLDEST}'"
        ) from None
    if Version(installed) < Version(_OLDEST):
        raise ConfigurationError(
            f"TRL {installed} is installed, and boosted() needs the fused head of TRL {_OLDEST}; "
            f"pip install 'trl>={_OLDEST}'"
        )
    if names[0] not in _TRAINERS:
        raise ConfigurationError(
            f"boosted() got TRL's {names[0]}, which generates, or takes means over processes, as no layout does; use "
            f"{', '.join(_TRAINERS[:-1])} or {_TRAINERS[-1]}, or run {names[0]} without boosted()"
        )


def check_options(names: list[str], args: Any, plugin: Plugin) -> None:
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
