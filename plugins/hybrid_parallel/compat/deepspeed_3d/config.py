"""`DeepSpeed3DParallelConfig`: configuration of 3D-parallel training, in addition to the sizes of its groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.compat.deepspeed_3d.ds_config import DeepSpeedConfig, read_ds_config
from plugins.hybrid_parallel.compat.deepspeed_3d.logits import LogitHelper
from plugins.hybrid_parallel.compat.deepspeed_3d.patches import Patch
from shardformer import TPInfo


@dataclass
class DeepSpeed3DParallelConfig:
    """Configuration with the fields of ATorch's class of this name; see `HybridParallelPlugin.from_3d_config`.

    Attributes:
        base_seed: seed of the random streams.
        tpinfo: which modules are sharded; None, or one without rules, selects the policy of the model's family.
        custom_patcher: path of a module or the end of a path -> `patch(forward, module)`, which returns its new
            forward.
        tie_first: give a bare base model a head that is tied to its input embedding. A model with a head keeps it.
        logit_helper: `logit_helper(hidden, embedding)` computes the logits of that head; None for the family's own.
        ds_config: DeepSpeed's configuration, a dict or the path of a JSON file; None for the plugin's defaults.
        batch_fn: converts what a loader yields to ((inputs...), (labels...)); None if the loader yields that form or
            mappings.

    Raises:
        ConfigurationError: a field is invalid, or fields contradict each other.
    """

    base_seed: int = 1234
    tpinfo: TPInfo | None = None
    custom_patcher: Mapping[str, Patch] | None = None
    tie_first: bool = True
    logit_helper: LogitHelper | None = None
    ds_config: str | Path | Mapping[str, Any] | None = None
    batch_fn: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        problems = []
        if isinstance(self.base_seed, bool) or not isinstance(self.base_seed, int) or self.base_seed < 0:
            problems.append(f"base_seed={self.base_seed!r} is not an integer of 0 or more; use one such as 1234")
        if self.tpinfo is not None and not isinstance(self.tpinfo, TPInfo):
            problems.append(f"tpinfo is a {type(self.tpinfo).__name__}; use shardformer.TPInfo()")
        if not _is_patcher(self.custom_patcher):
            problems.append(
                f"custom_patcher={self.custom_patcher!r} is no mapping of paths to functions; use {{'h.*': patch}}"
            )
        for name in ("logit_helper", "batch_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                problems.append(f"{name}={value!r} is no function; use one, or None")
        if self.logit_helper is not None and not self.tie_first:
            problems.append("logit_helper computes logits of a tied embedding, and tie_first=False ties none; use True")
        if problems:
            raise ConfigurationError("; ".join(problems))
        _ = self.deepspeed  # validate `ds_config` here

    @cached_property
    def deepspeed(self) -> DeepSpeedConfig | None:
        """The parsed `ds_config`; None if there is none."""
        return None if self.ds_config is None else read_ds_config(self.ds_config)

    def options(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Convert the configuration to options of `HybridParallelPlugin`.

        Args:
            sizes: sizes of the groups "tensor", "data" and "pipeline"; a missing group has size 1.

        Raises:
            ConfigurationError: the batch sizes of `ds_config` are inconsistent with the number of data-parallel ranks.
        """
        dp_size = sizes.get("data", 1)
        options = {
            "tp_size": sizes.get("tensor", 1),
            "pp_size": sizes.get("pipeline", 1),
            "dp_size": dp_size,
            "seed": self.base_seed,
            "tp_info": self.tpinfo if self.tpinfo is not None and any(self.tpinfo.rules.values()) else None,
        }
        return options if self.deepspeed is None else {**options, **self.deepspeed.options(dp_size)}


def _is_patcher(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, Mapping) and all(isinstance(name, str) and callable(value[name]) for name in value)
