"""JSON description of model parallelism: numbers of shards and stages, the sharded dim, and the device mapping.

And options of the plugin as one word of a command line, such as `tp=2,pp=2,zero_stage=2`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError, check_names
from plugins.hybrid_parallel.config.groups import DEVICE_MAPPING
from plugins.hybrid_parallel.config.option_group import COUNT, OptionGroup, one_of, option, unknown_key, what_to_write
from plugins.hybrid_parallel.config.options import OPTIONS
from shardformer.utils.typed_json import read_json_object

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
        path = Path(config)
        if isinstance(config, str) and "=" in config and not path.is_file():
            return options_of_text(config)
        if not path.is_file():
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
    """Convert a layout as text to options of `HybridParallelPlugin`.

    Args:
        text: `option=value,…`; sizes may be called tp, pp, sp, cp, ep and dp. `sp` also turns sequence parallelism on.
    """
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
