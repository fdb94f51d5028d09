"""Options of gradients and optimizer states: who holds them, when ranks exchange them, and what is offloaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.option_group import (
    COUNT,
    SWITCH,
    OptionGroup,
    Rule,
    is_number,
    one_of,
    option,
    positive,
)

# Buckets of the default size, in MiB. On a CPU a bucket should stay in the caches. On a GPU each collective has to fill
# the network; 128 MiB is within what DeepSpeed and Megatron-Core use, and has not been measured here.
_BUCKETS = {"cpu": 12.0, "cuda": 128.0}


@dataclass(frozen=True, kw_only=True)
class ZeroOptions(OptionGroup):
    """How replicas reduce gradients, clip them, and share optimizer states.

    Attributes:
        zero_stage: 0 replicates optimizer states on every data-parallel rank, 1 shards them over these ranks. With 2
            the gradients of every micro-batch are reduced by themselves, and a rank keeps only its shard of their sum.
            With 3 a rank keeps only its shard of parameters too, and gathers those of a layer while it uses them.
        zero_size: number of neighbouring replicas that share the states, such as those of a machine; the other replicas
            repeat them (hybrid sharding). It divides `dp_size * cp_size`; None for all replicas.
        max_norm: maximum global gradient norm, for clipping; None for no clipping.
        zero_bucket_size_in_mb: size of the buckets in which gradients are reduced; None for 12 on CPUs, 128 on GPUs.
        overlap_communication: reduce gradients during the backward pass.
        overlap_allgather: all-gather updated parameters in the background until the next forward pass needs them.
    """

    zero_stage: int = option(1, one_of(0, 1, 2, 3))
    zero_size: int | None = option(None, COUNT)
    # inf is allowed: it measures the norm and clips nothing.
    max_norm: float | None = option(
        None,
        Rule(
            (
                (is_number, "is not a number; use one such as 1.0"),
                (lambda value: value > 0, "is not positive; use a value above 0"),
            ),
            1.0,
        ),
    )
    zero_bucket_size_in_mb: float | None = option(None, positive(12.0))
    overlap_communication: bool = option(True, SWITCH)
    overlap_allgather: bool = option(False, SWITCH)

    def conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between these options."""
        if self.zero_size is None or self.zero_stage > 0:
            return []
        return [f"zero_size={self.zero_size} does not fit zero_stage=0, which shards nothing; use zero_stage=1 or more"]

    def num_shards(self, num_replicas: int) -> int:
        """Return the number of shards of the optimizer states.

        Args:
            num_replicas: data-parallel times context-parallel ranks.
        """
        if self.zero_stage == 0:
            return 1
        if self.zero_size is not None and num_replicas % self.zero_size:
            sizes = [size for size in range(1, num_replicas + 1) if num_replicas % size == 0]
            raise ConfigurationError(
                f"zero_size={self.zero_size} does not divide the {num_replicas} replicas (dp_size*cp_size); use "
                f"{' or '.join(map(str, sizes))}"
            )
        return self.zero_size or num_replicas

    def bucket_bytes(self, device_type: str) -> int:
        """Return the upper limit of a bucket's gradients in bytes, for ranks on "cpu" or "cuda"."""
        size = self.zero_bucket_size_in_mb
        return int((_BUCKETS.get(device_type, _BUCKETS["cpu"]) if size is None else size) * 2**20)


CPU = "cpu"
_PLACE = Rule(
    (
        (lambda value: isinstance(value, str | os.PathLike), "is no place; use 'cpu', or a directory"),
        (lambda value: bool(str(value).strip()), "is no place; use 'cpu', or a directory"),
    ),
    CPU,
)


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(OptionGroup):
    """Where states are between their uses: `"cpu"` for the memory of the machine, or a directory.

    In a directory every rank has a file without a name, which is gone with its process. On a CPU `"cpu"` changes
    nothing.

    Attributes:
        offload_optimizer: place of optimizer states, master weights and reduced gradients; the step runs there.
        offload_parameters: place of the shards of parameters; needs `zero_stage=3`.
        offload_activations: place of what layers save for the backward pass.
    """

    offload_optimizer: str | Path | None = option(None, _PLACE)
    offload_parameters: str | Path | None = option(None, _PLACE)
    offload_activations: str | Path | None = option(None, _PLACE)

    def moves_parameters(self, device_type: str) -> bool:
        """Return whether shards of parameters are elsewhere than on their device."""
        place = self.offload_parameters
        return directory_of(place) is not None or (place is not None and device_type == "cuda")


def directory_of(place: str | Path | None) -> Path | None:
    """Return the directory that an option names; None for the memory of the machine, and for no offload."""
    return None if place is None or place == CPU else Path(place)
