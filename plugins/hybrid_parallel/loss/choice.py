"""Choice of the loss for a batch: the user's criterion, the head's loss on sharded logits, or the model's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.data.rows import main_input_of
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.loss.contrastive import ContrastiveStepLoss, compares_samples, coupled_outputs
from plugins.hybrid_parallel.loss.step_loss import (
    CriterionStepLoss,
    HeadStepLoss,
    Microbatches,
    ModelStepLoss,
    NoLoss,
    RouterBalance,
    ScoresAsked,
    StepLoss,
    TokenScores,
)
from shardformer.attention import log_once
from shardformer.context_parallel.zigzag import ZigzagSharding, token_mask
from shardformer.loss.heads import own_loss_reason
from shardformer.loss.terms import RouterScores, routers_are_asked
from shardformer.peft import behind_prompts, model_inside
from shardformer.policies.registry import head_loss_of


class LossSource(Enum):
    """Where the loss of a batch comes from: the user's criterion, the head's formula, or the forward of the model.

    SCORES gives scores of tokens instead of a loss, and NOTHING outputs alone, because the batch has no labels.
    """

    CRITERION, SCORES, NOTHING, HEAD, MODEL = "criterion", "scores", "nothing", "head", "model"


class ChosenLoss(NamedTuple):
    """The loss of one batch."""

    source: LossSource  # where it comes from
    reason: str | None = None  # why the model's forward must compute it, if that is the source
    compares: bool = False  # whether the model's loss compares the samples of a batch with each other
    criterion: Callable[[Any, Any], Any] | None = None  # (outputs, batch) -> loss, if that is the source


class LossChoice:
    """Chooses the loss of each step for one model.

    Args:
        model: the sharded model, possibly inside peft's wrappers.
        adds_exactly: whether sums are the same bits in any order, see `StepLoss`.
        compares_all: whether contrastive losses compare the samples of all replicas, or those of each alone.

    Attributes:
        head_loss: loss of the model's head class; None if it is not known.
        scores: what passes give instead of a loss and logits; None if they do not.
    """

    scores: ScoresAsked | None = None

    def __init__(
        self, model: nn.Module, mesh: HybridMesh, adds_exactly: bool = False, compares_all: bool = True
    ) -> None:
        self.model, self.mesh, self.adds_exactly = model_inside(model), mesh, adds_exactly
        self.compares_all = compares_all
        self.main_input = main_input_of(model) or main_input_of(self.model)
        self.head_loss = behind_prompts(model, head_loss_of(self.model))
        self._coupled_outputs = coupled_outputs(self.model)

    @property
    def axis(self) -> ZigzagSharding | None:
        """The ranks that have outputs of different parts of every sequence; None if outputs are of whole sequences."""
        return self.model.context_axis if getattr(self.model, "returns_parts", False) else None

    def choose(self, batch: Mapping[str, Any], criterion: Callable[[Any, Any], Any] | None = None) -> ChosenLoss:
        """Choose the loss of a batch. An empty share has the keys of the others but no rows, and the same choice."""
        if criterion is not None:
            return ChosenLoss(LossSource.CRITERION, criterion=criterion)
        if self.scores is not None:
            return ChosenLoss(LossSource.SCORES)
        if self.head_loss is not None and not self.head_loss.applies_to(batch):
            return ChosenLoss(LossSource.NOTHING)
        reason = own_loss_reason(self.model, self.head_loss, batch)
        if reason is not None and self.axis is not None:
            raise ConfigurationError(
                f"{reason}, which would find parts of sequences under cp_size={self.axis.size}; use cp_size=1, "
                "or pass a criterion"
            )
        if reason is None:
            return ChosenLoss(LossSource.HEAD)
        return ChosenLoss(LossSource.MODEL, reason, compares=compares_samples(self.model, batch))

    def step_loss(self, chosen: ChosenLoss, microbatches: Microbatches, batch: Mapping[str, Any]) -> StepLoss:
        """Return the loss of a step over `microbatches`, the parts of `batch`.

        Raises:
            ConfigurationError: if the loss cannot be combined from these parts; raised on all ranks.
        """
        loss = self._step_loss(chosen, microbatches, batch)
        loss.adds_exactly = self.adds_exactly
        if self.adds_exactly and isinstance(loss, ContrastiveStepLoss):
            raise ConfigurationError(
                "reproducible=True adds up losses of single units, and a contrastive loss compares all samples of a "
                "batch; use reproducible=False"
            )
        if self.adds_exactly and (loss.balance is not None or getattr(loss, "routers", None) is not None):
            raise ConfigurationError(
                "output_router_logits=True adds a loss over the router scores of a whole batch, which "
                "reproducible=True does not add up exactly; use output_router_logits=False, or reproducible=False"
            )
        loss.coupled_outputs = self._coupled_outputs
        return loss

    def _step_loss(self, chosen: ChosenLoss, microbatches: Microbatches, batch: Mapping[str, Any]) -> StepLoss:
        source, reason = chosen.source, chosen.reason
        if source is LossSource.CRITERION:
            return CriterionStepLoss(microbatches, self.mesh, chosen.criterion, self.main_input)
        if source is LossSource.SCORES:
            return TokenScores(microbatches, self.mesh, self.model, self.scores, self.head_loss, self.axis)
        if source is LossSource.NOTHING:
            return NoLoss(microbatches, self.mesh)
        adds_routers = routers_are_asked(self.model, batch)
        are_spread = adds_routers and self._routers_are_spread(microbatches, is_known=reason is None)
        if source is LossSource.MODEL:
            if chosen.compares:
                given = microbatches, self.mesh, batch, reason, self.main_input
                return ContrastiveStepLoss(self.model, *given, self.compares_all)
            if any(self.mesh.size(axis) > 1 for axis in ("pp", "dp", "cp", "tp")):
                name = type(self.model).__name__
                log_once(name, f"computes its loss itself, of whole logits and as a mean over samples: {reason}")
            return ModelStepLoss(microbatches, self.mesh, batch, reason, self.main_input)
        loss = HeadStepLoss(microbatches, self.mesh, self.head_loss, batch, self.axis, adds_routers and not are_spread)
        if are_spread:
            loss.balance = self._router_balance(microbatches)
        return loss

    def routers_are_asked(self, batch: Mapping[str, Any]) -> bool:
        """Return whether the outputs for `batch` are to include the auxiliary loss of routers."""
        return routers_are_asked(self.model, batch)

    def balance_without_labels(self, microbatches: Microbatches) -> RouterBalance | None:
        """Return the auxiliary loss of a batch without labels, which a loss of the user's own may add.

        None if no rank can have what it is computed from.
        """
        routers = None if self.head_loss is None else self.head_loss.routers
        return None if routers is None or not routers.adds_up else self._router_balance(microbatches)

    @property
    def routers_see_parts(self) -> bool:
        """Whether a router sees parts of the sequences of its replica."""
        return self.mesh.size("cp") > 1 or self.cuts_over_tp

    @property
    def cuts_over_tp(self) -> bool:
        """Whether tensor-parallel ranks have parts of sequences in every layer (`all_to_all`)."""
        return getattr(self.model, "heads_are_exchanged", False)

    def token_mask(self, microbatch: Mapping[str, Any]) -> Tensor | None:
        """Return the attention mask of the tokens that this rank's layers see; None if all of them count."""
        axis = self.model.context_axis if self.mesh.size("cp") > 1 else None
        return token_mask(microbatch, axis, self.mesh.group("tp") if self.cuts_over_tp else None)

    def _router_balance(self, microbatches: Microbatches) -> RouterBalance:
        masks = [self.token_mask(microbatch) for microbatch in microbatches]
        return RouterBalance(self.head_loss.routers, self._router_scores, masks, self.mesh, self.cuts_over_tp)

    @cached_property
    def _router_scores(self) -> RouterScores:
        return RouterScores(list(self.head_loss.routers.routers(self.model.modules())))

    def _routers_are_spread(self, microbatches: Microbatches, is_known: bool) -> bool:
        """Return whether the auxiliary loss is of routers on several stages, of several micro-batches or parts of them.

        Args:
            is_known: whether the loss can be combined over replicas.

        Raises:
            ConfigurationError: if no rank can have what it is computed from; raised on all ranks.
        """
        sizes = {axis: self.mesh.size(axis) for axis in ("pp", "cp", "dp")}
        fewest = most = len(microbatches)
        if sizes["dp"] > 1:
            extremes = torch.tensor([fewest, -most])  # on the CPU: the result is read at once
            dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=self.mesh.group("dp"))
            fewest, most = int(extremes[0]), -int(extremes[1])
        adds_up = is_known and self.head_loss.routers.adds_up
        are_spread = sizes["pp"] > 1 or most > 1 or self.routers_see_parts
        reasons = {
            f"pp_size={sizes['pp']} spreads over stages; use pp_size=1": sizes["pp"] > 1 and not adds_up,
            f"cp_size={sizes['cp']} spreads over ranks; use cp_size=1": sizes["cp"] > 1 and not adds_up,
            "sequence_parallelism_mode='all_to_all' spreads over ranks; use 'split_gather'": (
                self.cuts_over_tp and not adds_up
            ),
            f"is cut into {most} micro-batches; use num_microbatches=1": most > 1 and not adds_up,
            f"dp_size={sizes['dp']} spreads over replicas; use dp_size=1": sizes["dp"] > 1 and not is_known,
            "leaves a replica without samples; use drop_last=True": fewest == 0 and not are_spread,
        }
        for reason, is_so in reasons.items():
            if is_so:
                raise ConfigurationError(
                    "output_router_logits=True adds a loss over the router scores of all layers and tokens of the "
                    f"batch, which {reason}, or output_router_logits=False"
                )
        return are_spread
