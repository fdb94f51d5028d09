"""Groups of options: each option is a dataclass field with a default and a rule, which keywords and JSON share."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Allowed values of an option.

    Attributes:
        checks: pairs of a test, and what an error message says of a value that fails it. The first test is about the
            type; the next ones may rely on it.
        shows_value: whether a message shows the value; otherwise it shows its type, for objects without a short `repr`.
    """

    checks: tuple[tuple[Callable[[Any], bool], str], ...]
    example: Any
    shows_value: bool = True

    def problem(self, name: str, value: Any) -> str | None:
        """Return the sentence about a refused value of the option `name`; None if the value is valid."""
        said = next((text for holds, text in self.checks if not holds(value)), None)
        if said is None:
            return None
        return f"{name}={value!r} {said}" if self.shows_value else f"{name} is a {type(value).__name__}; {said}"

    def has_type(self, value: Any) -> bool:
        """Return whether a value has the option's type."""
        return self.checks[0][0](value)


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Base of frozen dataclasses, all of whose fields are made by `option`."""

    def problems(self) -> list[str]:
        """Return one sentence for each refused value, and for each broken rule between options of the group."""
        found = (rule.problem(name, value) for name, value, rule in self._to_check())
        refused = [problem for problem in found if problem is not None]
        return [*refused, *(self.conflicts() if not refused or self.is_typed() else ())]

    def conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between options of the group; all values have their types."""
        return []

    def is_typed(self) -> bool:
        """Return whether all values have the types of their options."""
        return all(rule.has_type(value) for _, value, rule in self._to_check())

    def _to_check(self) -> Iterable[tuple[str, Any, Rule]]:
        """Iterate over (name, value, rule) of all options whose value is not the default."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not each.default:
                yield each.name, value, each.metadata["rule"]


def option(default: Any, rule: Rule) -> Any:
    """Create a field of an `OptionGroup`. A default of None needs not pass the rule."""
    return field(default=default, metadata={"rule": rule})


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, of Python or numpy; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, of Python or numpy; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def one_of(*choices: Any, text: str | None = None) -> Rule:
    """Create a rule of named values, the last the example; `text`: end of messages; None: list the values."""
    has_type = is_integer if is_integer(choices[-1]) else lambda value: isinstance(value, type(choices[-1]))
    text = text or f"is not available; use {' or '.join(repr(choice) for choice in choices)}"
    return Rule(((has_type, text), (lambda value: value in choices, text)), choices[-1])


def not_negative(example: float) -> Rule:
    """Create the rule of an option that is a number from 0 on."""
    finite = (math.isfinite, f"is not finite; use a number such as {example}")
    above = (lambda value: value >= 0, "is negative; use 0 or more")
    return Rule(((is_number, f"is not a number; use one such as {example}"), above, finite), example)


def positive(example: Any) -> Rule:
    """Create the rule of an option above 0, which is an integer if the example is one."""
    above = (lambda value: value > 0, "is not positive; use a value above 0")
    if is_integer(example):
        return Rule(((is_integer, f"is not an integer; use one such as {example}"), above), example)
    finite = (math.isfinite, f"is not finite; use a number such as {example}")
    return Rule(((is_number, f"is not a number; use one such as {example}"), above, finite), example)


def unknown_key(name: str, known: Iterable[str], where: str = "") -> str:
    """Return the sentence about an unknown key of a JSON object, with the closest known one."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
    return f"the key '{where}{name}' is not known; use {where}{near}"


_COUNT = "is not a positive integer; use 1 or more"
COUNT = Rule(
    ((lambda value: isinstance(value, int) and is_integer(value), _COUNT), (lambda value: value >= 1, _COUNT)), 2
)
SWITCH = Rule(((lambda value: isinstance(value, bool), "is neither True nor False; use one of them"),), True)


# What to write -> names of the same in accelerate, ColossalAI, DeepSpeed, Lightning, Megatron-LM, torchtitan,
# transformers and vLLM.
_OF_OTHERS = {
    "tp_size=2": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_degree "
    "model_parallel_size mp_size",
    "pp_size=2": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree "
    "pp_degree num_stages num_pipeline_stages",
    "dp_size=2": "dp data_parallel data_parallel_size data_parallel_degree data_parallel_replicate_degree dp_degree "
    "dp_replicate_size num_replicas",
    "cp_size=2": "cp context_parallel context_parallel_size context_parallel_degree cp_degree",
    "sp_size=2 and enable_sequence_parallelism=True": "sp sequence_parallel_size ulysses_degree ulysses_size",
    "enable_sequence_parallelism=True": "sequence_parallel sequence_parallelism",
    "ep_size=2": "ep expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree ep_degree "
    "enable_expert_parallel moe_ep_size",
    "zero_stage=3": "zero zero_optimization zero3 stage fsdp fsdp2 fsdp_config fsdp_plugin fully_shard dp_shard_size "
    "data_parallel_shard_degree sharding_strategy reshard_after_forward",
    "zero_stage=2": "deepspeed deepspeed_config deepspeed_plugin ddp distributed_optimizer use_distributed_optimizer",
    "zero_bucket_size_in_mb=25": "bucket_cap_mb ddp_bucket_cap_mb reduce_bucket_size allgather_bucket_size bucket_size",
    "overlap_communication=True": "overlap_comm overlap_grad_reduce",
    "overlap_allgather=True": "overlap_param_gather",
    "precision='bf16'": "bf16 dtype torch_dtype param_dtype params_dtype mixed_precision mixed_precision_param amp",
    "precision='fp16'": "fp16 half",
    "precision='fp8'": "fp8 use_fp8 enable_fp8",
    "fp8_recipe='tensorwise'": "fp8_recipe_name float8_recipe recipe_name",
    "initial_scale=65536": "loss_scale init_scale initial_scale_power initial_loss_scale",
    "growth_interval=1000": "loss_scale_window scale_window hysteresis_window",
    "max_norm=1.0": "max_grad_norm gradient_clipping gradient_clip_val clip_grad clip_grad_norm grad_clip",
    "num_microbatches=4": "microbatches micro_batches num_micro_batches n_microbatches",
    "microbatch_size=1": "micro_batch_size train_micro_batch_size_per_gpu pipeline_parallel_microbatch_size "
    "local_batch_size",
    "pp_style='1f1b'": "schedule pipeline_schedule pipeline_parallel_schedule pp_schedule",
    "num_model_chunks=2": "virtual_pipeline_model_parallel_size virtual_pipeline_parallel_size vpp vpp_size "
    "num_virtual_stages",
    "layers_per_stage=[12, 12]": "module_fqns_per_model_part pipeline_parallel_split_points split_points "
    "partition_method",
    "gradient_checkpointing='full'": "activation_checkpointing activation_checkpoint gradient_checkpoint_config "
    "recompute recompute_granularity use_gradient_checkpointing checkpoint_activations",
    "compile_layers=True": "compile torch_compile use_torch_compile dynamo_backend",
    "cuda_graphs=True": "cuda_graph enable_cuda_graph use_cuda_graphs cuda_graph_impl",
    "tiled_mlp=True": "tiled_mlp_num_shards tiled_mlp_compute mlp_chunks_for_training",
    "enable_flash_attention=True": "use_flash_attn use_flash_attention use_flash_attention_2 flash_attention "
    "attn_implementation",
    "offload_optimizer='cpu'": "cpu_offload offload optimizer_cpu_offload offload_optimizer_device fsdp_offload_params",
    "offload_parameters='cpu'": "offload_param offload_params offload_param_device",
    "make_vocab_size_divisible_by=128": "pad_vocab_size_to pad_to_multiple_of",
    "seed=42": "random_seed manual_seed",
    "debug=True": "detect_anomaly",
}
_NEEDLESS = (
    "find_unused_parameters static_graph gradient_as_bucket_view broadcast_buffers check_reduction parallel_output "
    "enable_metadata_cache communication_dtype communication_data_type round_robin_gradients contiguous_gradients"
)
# Name -> the sentence's end.
_ELSEWHERE = {
    **{name: f"use {use}" for use, names in _OF_OTHERS.items() for name in names.split()},
    **dict.fromkeys(_NEEDLESS.split(), "leave it out: nothing here depends on it"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "gradient_accumulation"),
        "call booster.backward for each batch, inside of booster.no_sync() for all but the last, and then "
        "optimizer.step()",
    ),
    **dict.fromkeys(
        ("lr", "learning_rate", "weight_decay", "optimizer", "lr_scheduler"),
        "give the optimizer and the scheduler to booster.boost",
    ),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "global_batch_size"),
        "set it in the DataLoader: there it is that of one replica",
    ),
    **dict.fromkeys(
        ("world_size", "num_processes", "nproc_per_node", "n_gpus"),
        "start as many ranks by booster run --nproc-per-node",
    ),
    **dict.fromkeys(("device_map", "device", "devices"), "leave it out: each rank uses the device of its number"),
}


def what_to_write(name: str) -> str | None:
    """Return what does here what an option of another library does; None if that is not known."""
    return _ELSEWHERE.get(name)
