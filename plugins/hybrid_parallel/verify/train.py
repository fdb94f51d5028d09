"""Run the two trainings that are compared: unsharded in this process, and sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.forward_options import unread_by
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.data.microbatch import split_batch
from plugins.hybrid_parallel.distributed.mesh import HybridMesh, build_mesh
from plugins.hybrid_parallel.setup.optimizer import build_trained
from plugins.hybrid_parallel.step.passes import run_batch
from plugins.hybrid_parallel.verify.module_outputs import Output, OutputLog
from plugins.hybrid_parallel.zero.whole_parameters import assemble
from shardformer.shard_spec import spec_of

_LEARNING_RATE = 0.05
_SEEDS = (1, 2, 3)
_LARGEST_LOSS = 1e4
_ROUNDING = 1e-5  # relative, of a loss in fp32
Arrays = dict[str, numpy.ndarray]
Criterion = Callable[[Any, Any], Any]


class RandomLossError(ConfigurationError):
    """The training loss of a model depends on random numbers."""


class Subject(Protocol):
    """Model to be trained; every process builds an identical copy."""

    @property
    def name(self) -> str:
        """Name of the model for messages."""

    def build(self) -> nn.Module:
        """Build the model in training mode, without dropout."""

    def batch(self, model: nn.Module, step: int, rows: int) -> dict[str, Any]:
        """Make the global batch of a step."""


@dataclass(frozen=True)
class VerifyCase:
    """Setup of both trainings."""

    tiny_model: Subject  # the model to train: a tiny model or a user's own model
    rows: int  # samples of the global batch
    steps: int  # number of optimizer steps (plain SGD)
    options: dict[str, Any]
    # (outputs, batch) -> mean over the samples, or (sum, count); None for the model's own loss
    criterion: Criterion | None = None
    # seed the generator of random numbers before each step. Both trainings draw the same numbers if only the loss draws
    # any, and the batch has one part.
    draws_alike: bool = False
    record: Callable[[nn.Module], OutputLog] = OutputLog  # makes the recorder of outputs of a model


@dataclass
class RecordedStep:
    """Recorded step; gradients and weights are unsharded."""

    loss: float  # loss of the global batch
    outputs: list[Output]  # outputs of modules, in the order in which the modules returned
    # name -> gradient before the optimizer step; the unsharded training lists tied parameters under all of their names
    gradients: Arrays
    weights: Arrays  # name -> parameter after the optimizer step


@dataclass
class Trace:
    """Recorded training of one process."""

    # stage, dp_rank, tp_rank: coordinates of the rank; 0 in the unsharded training
    stage: int = 0
    dp_rank: int = 0
    tp_rank: int = 0
    steps: list[RecordedStep] = field(default_factory=list)
    first_weights: Arrays = field(default_factory=dict)  # weights before the first step; unsharded training only
    # the set of names of each parameter; unsharded training only
    aliases: list[frozenset[str]] = field(default_factory=list)
    # attention mask of each step, None for inputs without one; unsharded training only
    masks: list[Tensor | None] = field(default_factory=list)


def train_reference(trial: VerifyCase) -> Trace:
    """Train the whole model in plain torch; RandomLossError if its loss is random and `draws_alike` is off."""
    model = trial.tiny_model.build()
    named = dict(model.named_parameters(remove_duplicate=False))
    trace = Trace(first_weights=_arrays(named), aliases=_aliases(named))
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    batches = [trial.tiny_model.batch(model, step, trial.rows) for step in range(trial.steps)]
    log, state = trial.record(model), torch.get_rng_state()
    for step, batch in enumerate(batches):
        _seed(trial, step)
        loss = _loss(trial, model, batch)
        loss.backward()
        gradients = _arrays({name: param.grad for name, param in named.items() if param.grad is not None})
        if (max_norm := trial.options.get("max_norm")) is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        trace.steps.append(RecordedStep(loss.item(), log.take(), gradients, _arrays(named)))
        trace.masks.append(batch.get("attention_mask"))
    if not all(abs(step.loss) < _LARGEST_LOSS for step in trace.steps):
        losses = ", ".join(f"{step.loss:.3g}" for step in trace.steps)
        raise ConfigurationError(
            f"the tiny model of {trial.tiny_model.name} has losses {losses} unsharded, which nothing can be compared "
            "with; use --head with another class, or --precision fp64"
        )
    for name, weight in trace.steps[-1].weights.items():
        if weight.dtype != trace.first_weights[name].dtype:  # routers of T5's experts make themselves fp32
            raise TypeError(f"{name} becomes {weight.dtype} in training; use another precision")
    if trial.draws_alike:
        return trace
    if not torch.equal(torch.get_rng_state(), state) and _draws_numbers(trial, batches[0]):
        raise RandomLossError(
            f"{trial.tiny_model.name} draws random numbers in training, so that no two runs agree; "
            "switch that off in its configuration"
        )
    return trace


def train_on_rank(trial: VerifyCase) -> Trace:
    """Train this rank's shard of the model."""
    config = HybridParallelConfig.from_options(**trial.options)
    parallel = config.parallel
    mesh = build_mesh(*parallel.mesh_shape(dist.get_world_size()), ep_size=parallel.ep_size)
    whole = trial.tiny_model.build()
    batches = [trial.tiny_model.batch(whole, step, trial.rows) for step in range(trial.steps)]
    model = build_trained(whole, [torch.optim.SGD(whole.parameters(), lr=_LEARNING_RATE)], config, mesh).model
    [optimizer] = model.optimizers
    log = trial.record(model.unwrap())
    model.runtime.register_microbatch_hook(log.begin_microbatch)
    trace = Trace(mesh.rank("pp"), mesh.rank("dp"), mesh.rank("tp"))
    if trial.draws_alike:  # in the pass, which has a generator of the model's own
        model.runtime.register_microbatch_hook(lambda _: _seed(trial, len(trace.steps)))
    for batch in batches:
        share = split_batch(
            batch, mesh.size("dp"), tokens=model.options.media_tokens, rows=model.options.rows_of(batch)
        )[trace.dp_rank]
        loss = run_batch(model, share, trial.criterion).loss.item()
        gradients = _arrays(optimizer.full_gradients())
        optimizer.step()
        optimizer.zero_grad()
        with model.summon_full_params(writeback=False):
            weights = _whole_weights(model.unwrap(), mesh)
        # Parts of sequences are no shares of features, which `compare` puts together.
        outputs = log.take() if mesh.size("cp") == 1 else []
        trace.steps.append(RecordedStep(loss, outputs, gradients, weights))
    return trace


def _seed(trial: VerifyCase, step: int) -> None:
    if trial.draws_alike:
        torch.manual_seed(_SEEDS[0] + step)


def _loss(trial: VerifyCase, model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Compute the loss of the global batch as in a plain training loop."""
    if trial.criterion is None:
        outputs = model(**batch)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if loss is None:
            raise ConfigurationError(
                f"{trial.tiny_model.name} returns no loss for this batch; use --head with another class, or a criterion"
            )
        return loss
    found = trial.criterion(model(**inputs_of(trial.criterion, model, batch)), batch)
    return found[0] / found[1] if isinstance(found, tuple) else found


def inputs_of(criterion: Criterion, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the model's forward, without what only the criterion reads."""
    own = (*getattr(criterion, "own_entries", ()), *unread_by(model, batch))
    return {name: value for name, value in batch.items() if name not in own}


def _whole_weights(model: nn.Module, mesh: HybridMesh) -> Arrays:
    """Assemble the unsharded weights of this stage; collective over all ranks of the stage."""
    named = sorted(model.named_parameters(), key=lambda item: item[0])
    return _arrays({name: assemble(param, param.detach(), mesh.group(spec_of(param).axis)) for name, param in named})


def _draws_numbers(trial: VerifyCase, batch: dict[str, Any]) -> bool:
    """Check whether the training loss depends on the seed (as with a sampling router; dropout is off here).

    A seed that changes the order of a sum alone (ViLT shuffles the patches of an image) changes the last digits.
    """
    model, losses = trial.tiny_model.build(), []
    for seed in _SEEDS:
        torch.manual_seed(seed)
        losses.append(_loss(trial, model, batch).item())
    return max(losses) - min(losses) > _ROUNDING * max(map(abs, losses))


def _arrays(tensors: dict[str, Tensor]) -> Arrays:
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}


def _aliases(named: dict[str, nn.Parameter]) -> list[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, param in named.items():
        names.setdefault(id(param), set()).add(name)
    return [frozenset(each) for each in names.values()]
