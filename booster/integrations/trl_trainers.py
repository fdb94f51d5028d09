"""TRL's trainers on boosted models: what they take from a whole batch, their reference model, and what cannot hold.

`boosted` puts `BoostedTRLTrainer` before the classes of TRL. What it relies on in TRL is listed, and tested, in
`zoo_tests/booster/integrations/test_upstream.py`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn

from booster.errors import ConfigurationError
from booster.integrations.fused_head import AdapterReference
from booster.integrations.trainer_arguments import check_arguments, check_job
from booster.integrations.trl_rollouts import CheckedRewards, ToolsOfFirstRank
from booster.integrations.trl_server import served_generation
from booster.launch import launch_from_torch
from booster.plugin import Plugin
from shardformer.attention import log_once

_OLDEST = "1.16"
_TRAINERS = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer")
_GENERATING = ("GRPOTrainer", "RLOOTrainer", "GMPOTrainer", "GKDTrainer")
_PAIRS = "adds means over the tokens and over the pairs of a batch"
_MEANS = "takes means over the completions of a batch"
# What keeps them from replicas.
_OF_ONE_REPLICA = {
    "CPOTrainer": _PAIRS,
    "ORPOTrainer": _PAIRS,
    "TPOTrainer": _PAIRS,
    "OnlineDPOTrainer": _MEANS,
    "SDPOTrainer": _MEANS,
    "SDFTTrainer": _MEANS,
    "A2POTrainer": _MEANS,
    "IWOPDTrainer": _MEANS,
    "GOLDTrainer": _MEANS,
}
_COUNTED = {"input_ids": "ids", "attention_mask": "mask"}  # entries of a batch -> ends of TRL's names
_SERVED = ("GRPOTrainer", "RLOOTrainer", "GMPOTrainer")
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
    known = (*_TRAINERS, *_GENERATING, *_OF_ONE_REPLICA)
    if names[0] not in known:
        raise ConfigurationError(
            f"boosted() got TRL's {names[0]}, which generates, or takes means over processes, as no layout does; use "
            f"{', '.join(known[:-1])} or {known[-1]}, or run {names[0]} without boosted()"
        )


def check_options(names: list[str], args: Any, plugin: Plugin) -> None:
    """Refuse options of a configuration that would train otherwise than they say.

    Args:
        names: as for `check_trainer_class`.
        args: the configuration.
        plugin: the layout.

    Raises:
        ConfigurationError: the option, the reason, and what to use.
    """
    kind = type(args).__name__
    if names[0] in _OF_ONE_REPLICA and plugin.dp_size > 1:
        raise ConfigurationError(
            f"{names[0]} {_OF_ONE_REPLICA[names[0]]}, which dp_size={plugin.dp_size} shares out; use dp_size=1, as "
            "with tp_size or pp_size for all ranks"
        )
    if getattr(args, "activation_offloading", False):
        raise ConfigurationError(
            f"{kind}(activation_offloading=True) hooks modules that a layout replaces; use gradient_checkpointing=True"
        )
    if getattr(args, "use_vllm", False):
        _check_server(names[0], args)
    if hasattr(args, "num_generations"):
        _check_generation(args, plugin)
    losses = getattr(args, "loss_type", None)
    for loss in losses if isinstance(losses, list) else ():
        if loss in _OF_A_BATCH and plugin.dp_size > 1:
            raise ConfigurationError(
                f"{kind}(loss_type={losses}): {loss!r} {_OF_A_BATCH[loss]}, which dp_size={plugin.dp_size} shares out; "
                "use dp_size=1, or another loss"
            )


def _check_server(name: str, args: Any) -> None:
    """Refuse vLLM but for a server, and trainers that are not compared with one.

    Raises:
        ConfigurationError: the trainer or the option, the reason, and what to use.
    """
    kind = type(args).__name__
    if name not in _SERVED:
        raise ConfigurationError(
            f"{kind}(use_vllm=True) is not compared with one process; leave it out: the boosted model generates "
            f"itself, or use {', '.join(_SERVED[:-1])} or {_SERVED[-1]}"
        )
    if args.vllm_mode != "server":
        raise ConfigurationError(
            f"{kind}(vllm_mode={args.vllm_mode!r}) loads whole parameters, of which a rank has shards, into an engine "
            "on each rank; use vllm_mode='server', or leave out use_vllm: the boosted model generates itself"
        )


def _check_generation(args: Any, plugin: Plugin) -> None:
    """Refuse options of a trainer that generates.

    Raises:
        ConfigurationError: the option, the reason, and what to use.
    """
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
    if getattr(args, "entropy_coef", 0.0) or getattr(args, "use_adaptive_entropy", False):
        raise ConfigurationError(
            f"the entropy bonus of {kind} is a mean over the tokens of a batch, which dp_size={replicas} shares out; "
            "use dp_size=1, or entropy_coef=0.0"
        )


def count_generations(args: Any, replicas: int) -> None:
    """Let a generation batch be that of replicas: the arguments have counted all ranks of the job.

    Raises:
        ConfigurationError: if groups of generations would not be whole.
    """
    steps = getattr(args, "steps_per_generation", None)
    if steps is None or getattr(args, "num_generations", None) is None:
        return
    kind, given = type(args).__name__, args.generation_batch_size
    args.generation_batch_size = size = args.per_device_train_batch_size * replicas * steps
    if size % args.num_generations:
        raise ConfigurationError(
            f"{kind}(num_generations={args.num_generations}) does not divide the {size} completions of a generation: "
            f"per_device_train_batch_size={args.per_device_train_batch_size}, times steps_per_generation={steps}, "
            f"times {replicas} replicas; use a divisor, or a larger batch"
        )
    if size != given:
        log_once(kind, f"generates {size} completions at a time, those of {replicas} replicas, where it counted ranks")


def check_options_of_model(trainer: Any) -> None:
    """Refuse what depends on the model, or on functions that were given to the trainer.

    Raises:
        ConfigurationError: the option, the reason, and what to use.
    """
    plugin = trainer.plugin
    ranks = dist.get_world_size() // plugin.dp_size
    if getattr(trainer, "rollout_func", None) and ranks > 1:
        raise ConfigurationError(
            f"rollout_func of a {type(trainer).__name__} would run on each of the {ranks} ranks of a replica, with "
            "answers of its own; use replicas alone (dp_size), or tools"
        )
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
    """Refuse callbacks of TRL that load the weights of this rank into a whole model.

    Raises:
        ConfigurationError: the callback, the reason, and what to use.
    """
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


def trl_mixins(trainer_class: type) -> tuple[type, ...]:
    """Return what `boosted` needs for a trainer of TRL; nothing for other trainers.

    Raises:
        ConfigurationError: if TRL is too old, or the trainer is none of those that hold under a layout.
    """
    names = _names_in_trl(trainer_class)
    if not names:
        return ()
    check_trainer_class(names)
    return (BoostedTRLTrainer,)


def _names_in_trl(trainer_class: type) -> list[str]:
    return [base.__name__ for base in trainer_class.__mro__ if base.__module__.partition(".")[0] == "trl"]


class BoostedTRLTrainer:
    """Mixin of a boosted trainer of TRL.

    Args:
        plugin: the parallel training strategy.
        args, kwargs: arguments of the trainer.

    Raises:
        ConfigurationError: if an option of the trainer cannot hold under the layout.
    """

    def __init__(self, *args: Any, plugin: Plugin | None = None, **kwargs: Any) -> None:
        if plugin is not None:
            launch_from_torch(seed=None)
            # TRL tokenizes before Trainer asks: what cannot hold is said before that.
            for given in (*args, *kwargs.values()):
                if hasattr(given, "per_device_train_batch_size"):
                    check_job(given)
                    check_arguments(given, plugin)
                    check_options(_names_in_trl(type(self)), given, plugin)
                    count_generations(given, plugin.dp_size)
        self._num_stored = 0
        self._tools = ToolsOfFirstRank(self)
        if kwargs.get("environment_factory") is not None:
            kwargs["environment_factory"] = self._tools.factory(kwargs["environment_factory"])
        served = {"VLLMGeneration": served_generation(self)} if "trl.generation.vllm_generation" in sys.modules else {}
        with self._of_replicas(**served):
            super().__init__(*args, plugin=plugin, **kwargs)
        self.accelerator.draws_as_plain = hasattr(self, "generation_config")
        check_options_of_model(self)
        self._watch_programs_outside()

    # ----- rewards and tools -----

    def _watch_programs_outside(self) -> None:
        """Let tools run once for a replica, and rewards be looked through."""
        self._standalone_tools = [self._tools.tool(each) for each in getattr(self, "_standalone_tools", ())]
        self._checked = CheckedRewards(self.accelerator.replicas)
        for index, function in enumerate(getattr(self, "reward_funcs", None) or ()):
            if not isinstance(function, nn.Module):
                name = getattr(function, "__name__", type(function).__name__)
                if getattr(self, "environment_factories", None):  # whose state the first rank has
                    function = self._tools.tool(function)
                self.reward_funcs[index] = self._checked.checked(function, name)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return rewards, those of the first rank of each replica.

        Raises:
            ConfigurationError: an answer of a reward function is none, on any rank.
        """
        return self._rewards_of_first_ranks(super()._calculate_rewards(*args, **kwargs))

    def _calculate_rewards_from_functions(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return rewards as `_calculate_rewards` does: OnlineDPO's name for it."""
        return self._rewards_of_first_ranks(super()._calculate_rewards_from_functions(*args, **kwargs))

    def _rewards_of_first_ranks(self, rewards: Tensor) -> Tensor:
        self._checked.raise_problem()
        return self.accelerator.replicas.of_first_ranks(rewards)

    def _weighted(self, loss: Tensor, rows: int | None, inputs: Any = None) -> Tensor:
        """Weight a mean by this replica's share of the samples, or, in the loss "bnpo", of the tokens."""
        if getattr(self.args, "loss_type", None) == "bnpo" and inputs is not None:
            mask = inputs["completion_mask"]
            rows = int((mask * inputs.get("tool_mask", mask)).sum())
        return super()._weighted(loss, rows, inputs)

    # ----- the meter -----

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the trainer does, while meters look on."""
        with ExitStack() as stack:
            counts = [stack.enter_context(each.meter.generating()) for each in self._meters()]
            found = super()._generate(*args, **kwargs)
        # GRPO's are lists of ids; OnlineDPO's are padded, with a mask behind.
        tokens = found[3] if isinstance(found[1], Tensor) else sum(map(len, found[1]))
        for count in counts:
            count(tokens)
        return found

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return what a step trains on, which meters count; the loader has prompts alone."""
        made = super()._prepare_inputs(inputs)
        if self.model.training and isinstance(made, dict) and "completion_ids" in made and made is not inputs:
            parts = {
                name: [made[f"{part}_{end}"] for part in ("prompt", "completion")] for name, end in _COUNTED.items()
            }
            for callback in self._meters():
                callback.meter.count({name: torch.cat(tensors, 1) for name, tensors in parts.items()})
        return made

    # ----- processes are replicas -----

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does, with a replica for a process."""
        with self._of_replicas():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the trainer does, with a replica for a process."""
        with self._of_replicas():
            return super().evaluate(*args, **kwargs)

    @contextmanager
    def _of_replicas(self, **ours: Callable[..., Any]) -> Iterator[None]:
        """Let the functions by which TRL's modules count processes, or take a model out of its wrapper, be ours."""
        ours |= {
            "gather": self._gather,
            "gather_object": lambda objects: self.accelerator.replicas.gather_objects(objects),
            "set_seed": self._set_seed,
            "unwrap_model_for_generation": _boosted_for_generation,
        }
        modules = [module for name, module in sys.modules.items() if name.startswith("trl.")]
        found = [(vars(module), name) for module in modules for name in ours if callable(vars(module).get(name))]
        before = [names[name] for names, name in found]
        for names, name in found:
            names[name] = ours[name]
        try:
            yield
        finally:
            for (names, name), function in zip(found, before, strict=True):
                names[name] = function

    def _gather(self, data: Any) -> Any:
        """Return values of all replicas, of their first ranks: a program outside may answer each rank otherwise."""
        replicas = self.accelerator.replicas
        return replicas.gather(replicas.of_first_ranks(data))

    def _set_seed(self, seed: int, device_specific: bool = False, **options: Any) -> None:
        """Seed the generators with the same number on all ranks of a replica: they draw the same tokens."""
        from accelerate.utils import set_seed

        set_seed(seed + self.accelerator.process_index if device_specific else seed, **options)

    # ----- data -----

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        """Prepare texts as one process does; KTO pairs the samples of a batch, which here is that of all replicas."""
        args = copy.copy(args)
        args.per_device_train_batch_size *= self.plugin.dp_size
        return super()._prepare_dataset(dataset, processing_class, args, *rest)

    # ----- the reference model -----

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Boost the model; without a reference model, its base or the first state of its adapter is the reference."""
        has_adapters = hasattr(model, "disable_adapter")
        wrapped = super()._wrap_model(model, *args, **kwargs)
        if has_adapters and getattr(self, "ref_model", self.model) is None:
            self.ref_model = AdapterReference(self.model)
        return wrapped

    def add_callback(self, callback: Any) -> None:
        """Add a callback; one that moves the reference towards the model has both whole meanwhile (ZeRO stage 3)."""
        if hasattr(callback, "sync_target_model"):
            callback.sync_target_model = partial(self._sync, callback.sync_target_model)
        super().add_callback(callback)

    def _sync(self, sync: Callable[..., None], model: nn.Module, target: nn.Module, alpha: float) -> None:
        with self.model.summon_full_params(writeback=False), target.summon_full_params():
            sync(model, target, alpha)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Compute log-probabilities of the reference by the boosted model, and store them where all ranks read them."""
        self._wrap_model(self.model)
        if not getattr(dataset, "cache_files", True):
            dataset = self._stored(dataset, name)
        return super()._precompute_ref_logps(dataset, name, batch_size)

    def _stored(self, dataset: Any, name: str) -> Any:
        """Return a dataset from memory as one in files: TRL stores log-probabilities in their folder."""
        from datasets import load_from_disk

        folder = Path(self.args.output_dir) / "reference_log_probs" / f"{name}-{self._num_stored}"
        self._num_stored += 1
        if self.accelerator.is_main_process:
            dataset.save_to_disk(folder)
        self.accelerator.wait_for_everyone()
        return load_from_disk(folder)

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
        """Score a batch by the reference in the precision of the training."""
        with self.compute_loss_context_manager():
            return super().compute_ref_log_probs(model, inputs)


@contextmanager
def _boosted_for_generation(
    model: nn.Module, accelerator: Any, *args: Any, gradient_checkpointing_kwargs: dict | None = None, **options: Any
) -> Iterator[nn.Module]:
    """Yield the boosted model, whose `generate` runs on all ranks of a replica, without gradient checkpointing."""
    from trl.models.utils import disable_gradient_checkpointing

    with disable_gradient_checkpointing(accelerator.unwrap_model(model), gradient_checkpointing_kwargs):
        yield model
