"""Options of gradients and optimizer states: who holds them, and when ranks exchange them."""

from __future__ import annotations

from dataclasses import dataclass

from plugins.hybrid_parallel.config.option_group import SWITCH, OptionGroup, Rule, is_number, one_of, option, positive

# Buckets of the default size, in MiB. On a CPU a bucket should stay in the caches. On a GPU each collective has to fill
# the network; 128 MiB is within what DeepSpeed and Megatron-Core use, and has not been measured here.
_BUCKETS = {"cpu": 12.0, "cuda": 128.0}


@dataclass(frozen=True, kw_only=True)
class ZeroOptions(OptionGroup):
    """How replicas reduce gradients, clip them, and share optimizer states.

    Attributes:
        zero_stage: 0 replicates optimizer states on every data-parallel rank, 1 shards them over these ranks.
        max_norm: maximum global gradient norm, for clipping; None for no clipping.
        zero_bucket_size_in_mb: size of the buckets in which gradients are reduced; None for 12 on CPUs, 128 on GPUs.
        overlap_communication: reduce gradients during the backward pass.
        overlap_allgather: all-gather updated parameters in the background until the next forward pass needs them.
    """

    zero_stage: int = option(1, one_of(0, 1))
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

    def bucket_bytes(self, device_type: str) -> int:
        """Return the upper limit of a bucket's gradients in bytes, for ranks on "cpu" or "cuda"."""
        size = self.zero_bucket_size_in_mb
        return int((_BUCKETS.get(device_type, _BUCKETS["cpu"]) if size is None else size) * 2**20)
