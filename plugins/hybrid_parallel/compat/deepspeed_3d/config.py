"""DeepSpeed3DParallelConfig: what is said about a 3D-parallel training beside the sizes of its groups."""

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
    """The fields of ATorch's class of this name; `HybridParallelPlugin.from_3d_config` makes a plugin of it.

    Attributes:
        base_seed: of the random streams.
        tpinfo: which modules are cut; None, or one without rules, for the policy of the model's family.
        custom_patcher: path of a module, or the end of one -> `patch(forward, module)`, which returns its new forward.
        tie_first: give a bare base model a head that is tied to its input embedding. A model that has a head keeps it.
        logit_helper: computes the logits of that head, `logit_helper(hidden, embedding)`; None for the family's way.
        ds_config: DeepSpeed's configuration, a dict or the path of a JSON file; None for the plugin's defaults.
        batch_fn: makes ((inputs...), (labels...)) of what a loader yields; None for a loader that yields that, or
            mappings.

    Raises:
        ConfigurationError: see the message.
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
        _ = self.deepspeed  # a mistake in it is one of this object

    @cached_property
    def deepspeed(self) -> DeepSpeedConfig | None:
        """What `ds_config` says."""
        return None if self.ds_config is None else read_ds_config(self.ds_config)

    def options(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """The same as options of `HybridParallelPlugin`.

        Args:
            sizes: of the groups "tensor", "data" and "pipeline"; 1 where one is not there.

        Raises:
            ConfigurationError: the batch sizes of `ds_config` do not fit the data-parallel ranks.
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
