"""Verify a layout: build a tiny model of the same class, train it sharded and unsharded, and compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.local_ranks import RankFailure, run_on_local_ranks
from plugins.hybrid_parallel.distributed.mesh import build_mesh
from plugins.hybrid_parallel.setup.input_checks import cuts_batch, has_batch_norms, refuse_mixed_samples
from plugins.hybrid_parallel.setup.model import shard_model
from plugins.hybrid_parallel.shard_report import fake_rank
from plugins.hybrid_parallel.verify.compare import TOLERANCES, Difference, Verdict, compare
from plugins.hybrid_parallel.verify.module_outputs import LinesRun
from plugins.hybrid_parallel.verify.random_batch import takes_labels
from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, twin_config
from plugins.hybrid_parallel.verify.train import Criterion, Trace, VerifyCase, train_on_rank, train_reference

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
_REASON_LENGTH = 200


@dataclass(frozen=True)
class Verification:
    """Result of a verification."""

    trial: VerifyCase  # the tiny model and its layout
    precision: str  # "fp64" or "fp32"
    world_size: int  # number of ranks of the sharded training
    num_parameters: int  # number of parameters of the tiny model
    verdict: Verdict  # verdict of the comparison
    lines_not_run: list[str]  # lines of modeling code that neither training shows, see `LinesRun.others`


def verify(
    config: Any,
    model_class: type[nn.Module],
    options: dict[str, Any],
    precision: str | None = None,
    steps: int = 3,
    timeout_s: float = 300.0,
    criterion: Criterion | None = None,
) -> Verification:
    """Train a tiny model of the same class sharded and unsharded, and compare.

    Args:
        config: configuration of the full-size model.
        model_class: class of the model, with a loss of its own if there is no criterion.
        options: options of `HybridParallelPlugin`, including `dp_size`.
        precision: precision of both trainings; None for fp64 if the model can be trained in it, else fp32.
        steps: number of optimizer steps.
        timeout_s: time limit for the ranks, in seconds.
        criterion: (outputs, batch) -> mean over the samples, or (sum, count); None for the model's own loss.
    """
    layout = HybridParallelConfig.from_options(**options)
    parallel, pipeline = layout.parallel, layout.pipeline
    world_size = parallel.tp_size * parallel.pp_size * parallel.cp_size * (parallel.dp_size or 1)
    refuse_without_loss(model_class, criterion)
    refuse_what_cannot_be_cut(config, model_class, layout, world_size)
    num_stages = parallel.pp_size * layout.chunks_per_rank
    tiny_model = tiny_model_of(config, model_class, parallel.tp_size, num_stages, criterion)
    microbatches = pipeline.num_microbatches or parallel.pp_size
    rows = 2 * (parallel.dp_size or 1) * microbatches * (pipeline.microbatch_size or 1) + 1
    trial = VerifyCase(tiny_model, max(rows, 7), steps, options, criterion)
    with LinesRun(model_class) as lines:
        trial, precision, plain = plain_training(trial, precision)
    _refuse_mixed_samples(trial.tiny_model, layout)
    try:
        ranks = run_on_local_ranks(train_on_rank, world_size, trial, timeout_s=timeout_s)
        verdict = compare(plain, ranks, TOLERANCES[precision])
    except RankFailure as error:
        verdict = Verdict([], Difference(1, "failure", "", float("inf"), f"the sharded training does not end: {error}"))
    except ConfigurationError as error:  # the full-size model passed the same check
        raise ConfigurationError(f"the tiny model of {tiny_model.name} cannot be cut like the model: {error}") from None
    num_parameters = sum(plain.first_weights[min(names)].size for names in plain.aliases)
    return Verification(trial, precision, world_size, num_parameters, verdict, lines.others())


def refuse_without_loss(model_class: type[nn.Module], criterion: Criterion | None) -> None:
    """Check that there is something to train for."""
    if criterion is None and not takes_labels(model_class):
        raise ConfigurationError(
            f"{model_class.__name__} has no loss; name a head with --head, as CausalLM, or add --criterion"
        )


def tiny_model_of(
    config: Any, model_class: type[nn.Module], tp_size: int, num_stages: int, criterion: Criterion | None = None
) -> TinyModel:
    """Describe a layout's tiny model; with a criterion, batches lack labels; refuses sizes that its class does."""
    small = twin_config(model_class, config, TwinSizes.of(config, tp_size, num_stages))
    return TinyModel(model_class.__module__, model_class.__name__, small, has_labels=criterion is None)


def plain_training(trial: VerifyCase, precision: str | None) -> tuple[VerifyCase, str, Trace]:
    """Train a trial's tiny model unsharded, in the first precision in which it trains.

    Returns:
        The trial with the tiny model of that precision, its name, and the trace of the training.
    """
    for name in [precision] if precision is not None else list(DTYPES):
        tried = replace(trial, tiny_model=replace(trial.tiny_model, dtype=DTYPES[name]))
        try:
            return tried, name, train_reference(tried)
        except ConfigurationError:
            raise
        except Exception as error:  # model classes fail with arbitrary exception types
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_REASON_LENGTH]
    raise ConfigurationError(
        f"the tiny model of {trial.tiny_model.name} does not train unsharded in {name} ({reason}); "
        "use --head with another class of the family"
    )


def refuse_what_cannot_be_cut(
    config: Any, model_class: type[nn.Module], layout: HybridParallelConfig, world_size: int
) -> None:
    """Check that the full-size model, not its tiny model, can be sharded, by sharding it on the meta device."""
    with fake_rank(0, world_size):
        mesh = build_mesh(*layout.parallel.mesh_shape(world_size), ep_size=layout.parallel.ep_size)
        try:
            with torch.device("meta"):
                model = model_class(config)
        except Exception:  # some models need real values to be built; their tiny models get them
            return
        shard_model(model, layout, mesh)


def _refuse_mixed_samples(tiny_model: TinyModel, layout: HybridParallelConfig) -> None:
    model, num_replicas = tiny_model.build(), (layout.parallel.dp_size or 1) * layout.parallel.cp_size
    refuse_mixed_samples(layout, model, num_replicas)
    if cuts_batch(layout, layout.parallel.dp_size or 1) and has_batch_norms(model):
        raise ConfigurationError(
            f"{tiny_model.name} normalises over its batch, whose parts have statistics of their own under any layout; "
            "use --dp 1 --microbatches 1"
        )
