"""Options of `HybridParallelPlugin`, validated together before any process group exists, and their forms as text.

A JSON description has numbers of shards and stages, the sharded dim, and the device mapping. One word of a command line
has options of the plugin, such as `tp=2,pp=2,zero_stage=2`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError, check_names
from booster.logging import get_logger
from plugins.hybrid_parallel.config.groups import (
    DEVICE_MAPPING,
    KernelOptions,
    OffloadOptions,
    ParallelOptions,
    PipelineOptions,
    PolicyOptions,
    PrecisionOptions,
    ZeroOptions,
)
from plugins.hybrid_parallel.config.option_group import (
    COUNT,
    SWITCH,
    OptionGroup,
    Rule,
    is_integer,
    one_of,
    option,
    positive,
    unknown_key,
    what_to_write,
)
from plugins.hybrid_parallel.pipeline.schedule import Schedule
from shardformer.utils.typed_json import read_json_object


def _is_power_of_two(value: Any) -> bool:
    return is_integer(value) and value > 0 and value & (value - 1) == 0


_POWER_OF_TWO = Rule(((_is_power_of_two, "is not a power of two; use 2, 4 or 8"),), 4)


@dataclass(frozen=True, kw_only=True)
class DebugOptions(OptionGroup):
    """What is seeded, recorded and checked.

    Attributes:
        nonfinite: handling of a step whose gradients are nan or inf on any rank: "raise" reports where it began, "skip"
            skips the step on all ranks, "ignore" does not check. fp16 skips such steps as long as its loss scale can
            shrink.
        seed: seed of the random streams; None for the seed that `launch` set.
        record_schedule: directory to which the times of pipeline actions are written, for `booster inspect --recorded`.
        check_layout: what happens if a small copy of the model trains otherwise under the layout than plainly: "refuse"
            raises an error before anything is changed, "warn" logs it, "off" does not look. `BOOSTER_CHECK_LAYOUT` in
            the environment overrides it.
        debug: check every module for nan and inf and every collective for mismatched calls, and compare what ranks must
            share; `BOOSTER_DEBUG=1` in the environment has the same effect.
        synchrony_interval: in debug mode, number of steps between two comparisons of parameters over ranks.
        reproducible: train to the same bits under every layout.
        reproducible_unit: number of samples of each pass under `reproducible=True`, the same for all layouts.
        reproducible_blocks: number of blocks that tensor-parallel layers are computed in under `reproducible=True`, the
            same for all layouts; `tp_size` divides it. None for 4, or fewer if the model cannot be divided so.
        reproducible_sequence_blocks: number of blocks that sequences are divided into between these layers, the same
            for all layouts; under sequence parallelism `tp_size` divides it. None for as many as `reproducible_blocks`,
            or 1 if sequence parallelism cannot divide the model.
    """

    nonfinite: str = option("raise", one_of("raise", "skip", "ignore"))
    seed: int | None = option(
        None,
        Rule(
            (
                (is_integer, "is not an integer; use one such as 42"),
                (lambda value: abs(value) < 2**62, "is beyond 62 bits; use a seed such as 42"),
            ),
            42,
        ),
    )
    record_schedule: str | Path | None = option(
        None,
        Rule(((lambda value: isinstance(value, str | Path), "is no path; use a directory such as 'recorded'"),), "."),
    )
    check_layout: str = option("refuse", one_of("refuse", "warn", "off"))
    debug: bool = option(False, SWITCH)
    synchrony_interval: int = option(1, positive(10))
    reproducible: bool = option(False, SWITCH)
    reproducible_unit: int = option(1, COUNT)
    reproducible_blocks: int | None = option(None, _POWER_OF_TWO)
    reproducible_sequence_blocks: int | None = option(None, COUNT)

    def conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between these options."""
        if self.reproducible:
            return []
        defaults = {"reproducible_unit": 1, "reproducible_blocks": None, "reproducible_sequence_blocks": None}
        return [
            f"{name}={getattr(self, name)} needs reproducible=True; use it, or {name}={default}"
            for name, default in defaults.items()
            if (getattr(self, name) or 1) > 1
        ]


# Option -> the value it needs, and why another one is refused.
_NEEDED: dict[str, tuple[Any, str]] = {
    "enable_sequence_overlap": (False, "multiplies the tokens of each rank by themselves"),
    "ep_size": (1, "multiplies the tokens of several ranks at once"),
    "expert_capacity_factor": (None, "drops tokens by the whole batch of a rank"),
    "compile_layers": (False, "chooses kernels by measured time"),
    "tiled_mlp": (False, "adds up the gradients of weights in tiles"),
    "offload_optimizer": (None, "adds up gradients outside of the device's memory"),
    "offload_parameters": (None, "adds up gradients outside of the device's memory"),
    "offload_activations": (None, "has not been shown to keep bits"),
}
_PRECISIONS = {
    "fp16": "has a loss scale that overflows at other steps",
    "fp8": "scales whole tensors",
}


def conflicts_with_reproducible(options: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each of all options of the plugin that `reproducible=True` refuses."""
    problems = [
        f"{name}={options[name]!r} {why}, so that reproducible=True refuses it; use {name}={needed!r}, or "
        "reproducible=False"
        for name, (needed, why) in _NEEDED.items()
        if options[name] != needed
    ]
    shares = options["cp_size"] > 1  # in one way, whatever the mode, see `sharing_layers`
    mode = options["sequence_parallelism_mode"]
    if options["enable_sequence_parallelism"] and mode != "split_gather" and not shares:
        problems.append(
            f"sequence_parallelism_mode={mode!r} multiplies parts of sequences by whole weights, so that "
            "reproducible=True refuses it; use 'split_gather', or reproducible=False"
        )
    num_ranks, given = _sharing_ranks(options)
    blocks, parts = options["reproducible_blocks"], options["reproducible_sequence_blocks"]
    if shares and blocks is None and num_ranks.bit_count() > 1:
        problems.append(
            f"{given} is no power of two, as the blocks of layers that these ranks share under reproducible=True are; "
            "use powers of two, such as cp_size=2, or reproducible=False"
        )
    if blocks is not None and blocks % num_ranks:
        problems.append(
            f"{given} does not divide reproducible_blocks={blocks}; use "
            f"reproducible_blocks={1 << (num_ranks - 1).bit_length()} in every layout, or fewer ranks"
        )
    if (options["enable_sequence_parallelism"] or shares) and parts is not None and parts % num_ranks:
        why = f"cp_size={options['cp_size']}" if shares else "enable_sequence_parallelism=True"
        problems.append(
            f"{given} does not divide reproducible_sequence_blocks={parts}, as {why} needs; use "
            f"reproducible_sequence_blocks={num_ranks} in every layout, or no sequence parallelism"
        )
    precision = options["precision"]
    if precision in _PRECISIONS:
        problems.append(
            f"precision={precision!r} {_PRECISIONS[precision]}, so that reproducible=True refuses it; use 'bf16' or "
            "'fp32', or reproducible=False"
        )
    return problems


def _sharing_ranks(options: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of ranks that share layers, and the options that say so."""
    tp_size, cp_size = options["tp_size"], options["cp_size"]
    if cp_size == 1:
        return tp_size, f"tp_size={tp_size}"
    if tp_size == 1:
        return cp_size, f"cp_size={cp_size}"
    return tp_size * cp_size, f"tp_size*cp_size={tp_size}*{cp_size}={tp_size * cp_size}"


def sharing_layers(parallel: ParallelOptions) -> ParallelOptions:
    """Return the mesh on which `cp_size` ranks share sequences and layers as `split_gather` does.

    Attention that is added up over parts of sequences rounds otherwise than attention over whole ones, so that each
    rank computes some of the heads over whole sequences, and between layers has a part of each sequence.
    """
    return replace(
        parallel,
        tp_size=parallel.tp_size * parallel.cp_size,
        cp_size=1,
        sp_size=None,
        enable_sequence_parallelism=True,
        sequence_parallelism_mode="split_gather",
    )


_logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class HybridParallelConfig:
    """Options of the plugin, in groups; the classes of the groups define the options, their defaults and their rules.

    Attributes:
        parallel: the mesh, and who shares a sequence.
        pipeline: schedule, stages and micro-batches.
        zero: gradients and optimizer states.
        offload: what is outside of the device.
        mixed_precision: dtypes and the loss scale.
        kernels: optimised kernels and recomputation.
        policy: how weights are sharded.
        debugging: seeds, recordings and checks.

    Raises:
        ConfigurationError: values are invalid or contradict each other; one sentence for each problem.
    """

    parallel: ParallelOptions = ParallelOptions()
    pipeline: PipelineOptions = PipelineOptions()
    zero: ZeroOptions = ZeroOptions()
    offload: OffloadOptions = OffloadOptions()
    mixed_precision: PrecisionOptions = PrecisionOptions()
    kernels: KernelOptions = KernelOptions()
    policy: PolicyOptions = PolicyOptions()
    debugging: DebugOptions = DebugOptions()

    def __post_init__(self) -> None:
        groups: list[OptionGroup] = [getattr(self, name) for name in _GROUPS]
        problems = [problem for group in groups for problem in group.problems()]
        if not problems or all(group.is_typed() for group in groups):
            problems += self._conflicts()
        if problems:
            raise ConfigurationError("; ".join(problems))
        if self.debugging.reproducible and self.parallel.cp_size > 1:
            _logger.info(
                "reproducible=True: the cp_size=%d ranks share layers and sequences as tensor-parallel ranks do "
                "(split_gather), because attention over parts of sequences rounds otherwise",
                self.parallel.cp_size,
            )
            object.__setattr__(self, "parallel", sharing_layers(self.parallel))

    @classmethod
    def from_options(cls, /, **options: Any) -> HybridParallelConfig:
        """Create the configuration from the keywords of `HybridParallelPlugin`.

        Raises:
            ConfigurationError: an option does not exist (the message names the closest one), or a value is invalid.
        """
        check_names(options, OPTIONS, "HybridParallelPlugin", what_to_write)
        given: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            given.setdefault(_GROUP_OF[name], {})[name] = value
        return cls(**{group: _GROUPS[group](**values) for group, values in given.items()})

    def options(self) -> dict[str, Any]:
        """Return the keywords of `HybridParallelPlugin`, all of them."""
        return {name: getattr(getattr(self, group), name) for name, group in _GROUP_OF.items()}

    def layout(self, dp_size: int) -> str:
        """Describe the layout for people, such as "tp 2 x pp 2 x dp 1, 1f1b"."""
        parallel = self.parallel
        words = [f"tp {parallel.tp_size} x pp {parallel.pp_size} x dp {dp_size}"]
        words[0] += f" x cp {parallel.cp_size}" if parallel.cp_size > 1 else ""
        words += [f"ep {parallel.ep_size}"] if parallel.ep_size > 1 else []
        words += [parallel.sequence_parallelism_mode] if parallel.enable_sequence_parallelism else []
        words += [self.pipeline.pp_style] if parallel.pp_size > 1 else []
        return ", ".join(words)

    @property
    def schedule(self) -> Schedule:
        """The pipeline schedule; "1f1b" if there is a single stage."""
        return self.pipeline.schedule_of(self.parallel.pp_size)

    @property
    def runs_parts(self) -> bool:
        """Whether `model(**batch)` runs parts of the batch by itself, and `booster.backward` their backward passes."""
        return self.parallel.pp_size > 1 or self.debugging.reproducible

    @property
    def checks_collectives(self) -> bool:
        """Whether ranks compare their calls of collectives."""
        return self.debugging.debug

    @property
    def chunks_per_rank(self) -> int:
        """Number of stages per rank."""
        return self.pipeline.chunks_per_rank(self.parallel.pp_size)

    def _conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between options of different groups."""
        parallel, policy = self.parallel, self.policy
        problems = []
        if policy.sharding_dim is not None and (parallel.enable_sequence_parallelism or parallel.cp_size != 1):
            cut_by = f"cp_size={parallel.cp_size}" if parallel.cp_size != 1 else "enable_sequence_parallelism=True"
            problems.append(
                f"sharding_dim={policy.sharding_dim} does not split activations, and {cut_by} cuts them; use one of "
                "them"
            )
        if self.kernels.enable_sequence_overlap and not parallel.enable_sequence_parallelism:
            problems.append("enable_sequence_overlap=True needs enable_sequence_parallelism=True; use it, or False")
        problems += self._conflicts_of_compilation() if self.kernels.compile_layers else []
        problems += self._conflicts_of_cuda_graphs() if self.kernels.cuda_graphs else []
        problems += conflicts_with_reproducible(self.options()) if self.debugging.reproducible else []
        if self.mixed_precision.precision != "fp8" and self.mixed_precision.fp8_recipe in ("rowwise", "mxfp8"):
            problems.append(
                f"fp8_recipe={self.mixed_precision.fp8_recipe!r} needs precision='fp8'; use it, or "
                "fp8_recipe='tensorwise'"
            )
        if self.offload.offload_activations and self.kernels.gradient_checkpointing == "operators":
            problems.append(
                f"offload_activations={str(self.offload.offload_activations)!r} does not see what "
                "gradient_checkpointing='operators' saves; use 'full', or offload_activations=None"
            )
        if self.kernels.tiled_mlp and self.kernels.gradient_checkpointing == "operators":
            problems.append(
                "gradient_checkpointing='operators' saves the products that tiled_mlp=True computes again; use 'full', "
                "or tiled_mlp=False"
            )
        if self.offload.offload_parameters and self.zero.zero_stage != 3:
            problems.append(
                f"offload_parameters={str(self.offload.offload_parameters)!r} needs zero_stage=3, which gathers "
                "parameters before use; use it, or offload_parameters=None"
            )
        if policy.expert_capacity_factor is not None and parallel.cp_size != 1:
            problems.append(
                f"expert_capacity_factor={policy.expert_capacity_factor} needs whole sequences, which "
                f"cp_size={parallel.cp_size} cuts; use cp_size=1 or expert_capacity_factor=None"
            )
        return problems + self._conflicts_of_slots()

    def _conflicts_of_slots(self) -> list[str]:
        """Return one sentence for what `expert_rank_capacity_factor` excludes."""
        factor, debugging = self.policy.expert_rank_capacity_factor, self.debugging
        needs = {
            "makes steps with too few slots nan, which precision='fp16' takes for a loss scale too large; use 'bf16'": (
                self.mixed_precision.precision == "fp16"
            ),
            "makes steps with too few slots nan; use nonfinite='raise' or 'skip'": debugging.nonfinite == "ignore",
            "leaves slots without values, which debug=True looks at; use debug=False": debugging.debug,
        }
        found = [each for each, is_broken in needs.items() if factor is not None and is_broken]
        return [f"expert_rank_capacity_factor={factor} {each}, or expert_rank_capacity_factor=None" for each in found]

    def _conflicts_of_compilation(self) -> list[str]:
        """Return one sentence for each option that `compile_layers` excludes."""
        kernels = self.kernels
        problems = []
        if self.debugging.debug:
            problems.append("debug=True looks into every module, which compile_layers=True merges; use one of them")
        if kernels.tiled_mlp:
            problems.append("tiled_mlp=True cuts layers, which compile_layers=True needs in a graph; use one of them")
        if kernels.gradient_checkpointing == "operators":
            problems.append(
                "gradient_checkpointing='operators' chooses what is computed again, as the compiler does under "
                "compile_layers=True; use one of them"
            )
        breaks = self._breaks_of_graphs()
        if kernels.gradient_checkpointing not in (None, "operators", "selective") and breaks:
            problems.append(
                f"gradient_checkpointing={kernels.gradient_checkpointing!r} with compile_layers=True needs whole "
                f"layers in a graph, which {breaks[0]} interrupts; use gradient_checkpointing=None, or "
                "compile_layers=False"
            )
        return problems

    def _conflicts_of_cuda_graphs(self) -> list[str]:
        """Return one sentence for each option under which tensors of a layer are at other addresses in each step."""
        if not self.kernels.compile_layers:
            return ["cuda_graphs=True records compiled layers; use compile_layers=True, or cuda_graphs=False"]
        moving = self._breaks_of_graphs()
        moving += ["precision='fp8'"] if self.mixed_precision.precision == "fp8" else []
        moving += [f"pp_size={self.parallel.pp_size}"] if self.parallel.pp_size > 1 else []
        moving += ["zero_stage=3"] if self.zero.zero_stage == 3 else []
        moving += [
            f"{name}={value!r}"
            for name in ("offload_activations", "offload_parameters")
            if (value := getattr(self.offload, name)) is not None
        ]
        return [
            f"cuda_graphs=True needs the tensors of layers at the same addresses in each step, which {each} does not "
            "keep; use cuda_graphs=False"
            for each in moving
        ]

    def _breaks_of_graphs(self) -> list[str]:
        """Return the options whose operations run between the graphs of a compiled layer."""
        sizes = {name: getattr(self.parallel, name) for name in ("cp_size", "ep_size")}
        breaks = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        return breaks + ([f"pp_style={self.pipeline.pp_style!r}"] if self.schedule.splits_backward else [])


_GROUPS: dict[str, type[OptionGroup]] = {each.name: type(each.default) for each in fields(HybridParallelConfig)}

_GROUP_OF = {each.name: name for name, group in _GROUPS.items() for each in fields(group)}
# Name of each keyword of `HybridParallelPlugin` -> its field, with its default and its rule.
OPTIONS: dict[str, Field] = {each.name: each for group in _GROUPS.values() for each in fields(group)}


# Options that the description sets, so they must not be given in addition to it.
_DECIDED = {"tp_size": "sharding_size", "pp_size": "stage_cnt", "num_microbatches": "accum_degree"}
_MODES = one_of("sharding", "pipeline", "hybrid", text="is not available; use 'sharding', 'pipeline' or 'hybrid'")
_DIMS = one_of(0, -1, text="is no dim; use 0 (reduction), -1 (output) or leave it out")


@dataclass(frozen=True, kw_only=True)
class ParallelDescription(OptionGroup):
    """JSON object that describes the model parallelism.

    Attributes:
        mode: "sharding" shards layers over devices and runs stages one after the other; "pipeline" assigns stages to
            devices and micro-batches to stages; "hybrid" does both. It has to be given.
        sharding_size: number of devices that share each layer.
        sharding_dim: 0 shards the reduction dim of every layer and adds partial sums; -1 shards the output dim and
            gathers; None pairs the two, as in Megatron-LM.
        stage_cnt: number of stages that the layers are split into.
        accum_degree: number of micro-batches per optimizer step.
        device_mapping: {"stage_0": {"shard_0": device, ...}, ...}; None for ranks in order.
    """

    mode: str = option("hybrid", _MODES)
    sharding_size: int = option(1, COUNT)
    sharding_dim: int | None = option(None, _DIMS)
    stage_cnt: int = option(1, COUNT)
    accum_degree: int = option(1, COUNT)
    device_mapping: Mapping[str, Mapping[str, Any]] | None = option(None, DEVICE_MAPPING)

    def conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between the keys."""
        found = []
        if self.mode == "pipeline" and self.sharding_size > 1:
            found.append(
                f"mode='pipeline' does not shard layers, and sharding_size={self.sharding_size} does; "
                "use mode='hybrid' or sharding_size=1"
            )
        if self.mode == "sharding" and self.stage_cnt > 1 and self.accum_degree > 1:
            found.append(
                f"mode='sharding' runs its stages one after the other, and accum_degree={self.accum_degree} pipelines "
                "micro-batches through them; use mode='hybrid' or accum_degree=1"
            )
        return found

    def options(self) -> dict[str, Any]:
        """Return the description as options of `HybridParallelPlugin`, which checks the device mapping further."""
        return {
            "tp_size": self.sharding_size,
            "pp_size": self.stage_cnt,
            "num_microbatches": self.accum_degree,
            "sharding_dim": self.sharding_dim,
            "device_mapping": self.device_mapping,
        }


_KEYS = [each.name for each in fields(ParallelDescription)]


def options_at(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Return options of the plugin from a JSON file, a text such as `tp=2,pp=2`, or a dict of either form."""
    if is_planned(config):
        raise ConfigurationError(f"the layout {config} is the planner's choice for a model, which is not known yet")
    if not isinstance(config, dict):
        path = Path(config) if isinstance(config, str | Path) else None
        is_file = path is not None and path.is_file()
        if isinstance(config, str) and "=" in config and not is_file:
            return options_of_text(config)
        if not is_file:
            raise ConfigurationError(
                f"{str(config)!r} is no file; give one of HybridParallelPlugin options, or text such as tp=2,pp=2"
            )
        try:
            config = read_json_object(path)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
    return options_of(config) if is_description(config) else config


def is_planned(config: Any) -> bool:
    """Return whether a layout as text asks the planner: `auto`, or `auto,memory=24GiB`."""
    return isinstance(config, str) and config.partition(",")[0].strip() == "auto"


def is_description(values: Mapping[str, Any]) -> bool:
    """Return whether a JSON object has any key that belongs to a description and is not an option of the plugin."""
    return not (set(_KEYS) - set(OPTIONS)).isdisjoint(values)


def options_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a description, and any plugin options given next to it, to options of `HybridParallelPlugin`."""
    further = {name: value for name, value in values.items() if name not in _KEYS}
    problems = _unknown(further)
    if "mode" not in values:
        problems.append("the key 'mode' is missing; use 'mode': 'hybrid'")
    description = ParallelDescription(**{name: value for name, value in values.items() if name in _KEYS})
    problems += description.problems()
    if problems:
        raise ConfigurationError("; ".join(problems))
    return {**further, **description.options()}


def _unknown(further: Mapping[str, Any]) -> list[str]:
    known = [*_KEYS, *OPTIONS]
    problems = []
    for name in further:
        if name in _DECIDED:
            problems.append(f"{name} cannot be combined with mode=...; use {_DECIDED[name]} there")
        elif name not in known:
            problems.append(unknown_key(name, known))
    return problems


# Names of sizes in a layout as text.
_SHORT = {name: f"{name}_size" for name in ("tp", "pp", "sp", "cp", "ep", "dp")}
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}
_COMMAS = re.compile(r",(?![^\[{(]*[\]})])")  # outside of brackets


def options_of_text(text: str) -> dict[str, Any]:
    """Convert `option=value,…` to plugin options; sizes may be tp, pp, sp (turns sequences on), cp, ep, dp."""
    options: dict[str, Any] = {}
    for part in _COMMAS.split(text):
        name, _, value = (word.strip() for word in part.partition("="))
        if not name or not value:
            raise ConfigurationError(f"the layout '{text}' has '{part}' where option=value is due; use tp=2,pp=2, say")
        check_names([name], [*_SHORT, *OPTIONS], "a layout", what_to_write)
        full = _SHORT.get(name, name)
        if full in options:
            raise ConfigurationError(f"the layout '{text}' gives {full} twice; give it once")
        options[full] = _value_of(value)
        if name == "sp" and options[full] != 1:
            options.setdefault("enable_sequence_parallelism", True)
    return options


def _value_of(text: str) -> Any:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a word, such as bf16, or a path
        return text
