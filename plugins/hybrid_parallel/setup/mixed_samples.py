"""Modules whose output for one sample depends on the other samples of its batch, so that a cut batch gives others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig

_ENOUGH = 1_000_000  # tokens that no batch has


def _capacity(router: nn.Module) -> tuple[str, str] | None:
    capacity = router.expert_capacity
    if capacity is not None and capacity >= _ENOUGH:
        return None
    drops = f"drops tokens of the whole batch that an expert has no place for (expert_capacity={capacity})"
    return drops, f", or expert_capacity={_ENOUGH}, which drops none"


def _statistics(_: nn.Module) -> tuple[str, str]:
    return "normalises latents by statistics of the whole batch", ""


def _halves(xlnet: nn.Module) -> tuple[str, str] | None:
    backwards = "gives the second half of a batch other positions than the first (bi_data=True)"
    return (backwards, ", or bi_data=False") if xlnet.bi_data else None


# Class of a module -> what it does to a batch, and what else the user can do; None where it keeps samples apart.
_MIXERS: Mapping[str, Callable[[nn.Module], tuple[str, str] | None]] = {
    "DogeCDMoE": lambda _: ("routes all tokens of a batch together (is_moe=True)", ", or is_moe=False"),
    "GradiumPhononTTSForConditionalGeneration": _statistics,
    "NllbMoeTop2Router": _capacity,
    "PocketTTSForConditionalGeneration": _statistics,
    "XLNetModel": _halves,
}


def cuts_batch(config: HybridParallelConfig, num_replicas: int) -> bool:
    """Return whether a batch becomes several micro-batches, or shares of `num_replicas`."""
    parts = config.pipeline.num_microbatches or config.parallel.pp_size
    return num_replicas > 1 or parts > 1 or config.pipeline.microbatch_size is not None


def mixed_samples(model: nn.Module) -> tuple[str, str] | None:
    """Return how outputs for one sample depend on the others, and a way out; None if nothing but losses does.

    Batch norms are not meant: everyone expects statistics of a part from them, and `boost` logs it.
    """
    found = (_MIXERS[type(each).__name__](each) for each in model.modules() if type(each).__name__ in _MIXERS)
    return next((each for each in found if each is not None), None)


def refuse_mixed_samples(config: HybridParallelConfig, model: nn.Module, num_replicas: int) -> None:
    """Check that no module mixes the samples of a batch which is cut.

    Raises:
        ConfigurationError: if one does; the message says what would do.
    """
    found = mixed_samples(model)
    if found is not None and cuts_batch(config, num_replicas):
        reason, way_out = found
        raise ConfigurationError(
            f"{type(model).__name__} {reason}; use one replica and num_microbatches=1 (tp_size or pp_size takes the "
            f"ranks){way_out}"
        )
