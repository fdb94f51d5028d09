"""Tokens per expert over all ranks, and the biases of routers that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from plugins.hybrid_parallel.features.feature import Feature
from plugins.hybrid_parallel.loss.choice import LossChoice
from shardformer.distributed.process_groups import all_gather_json
from shardformer.layers.experts import (
    ExpertLoad,
    expert_modules,
    has_known_forward,
    keep_biases_from_optimizer,
    overfull,
    router_biases,
    update_bias,
)
from shardformer.peft import model_inside
from shardformer.utils.module_paths import in_order

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel
    from plugins.hybrid_parallel.step.passes import Pass
    from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer


class CountedExperts(Feature):
    """Counts the tokens of each expert, and moves the biases of routers by them."""

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse a model without routers that have biases, or without experts whose tokens can be counted."""
        inside, policy = model_inside(model), self.config.policy
        name, rate = type(inside).__name__, policy.moe_router_bias_update_rate
        if rate and not router_biases(inside):
            raise ConfigurationError(
                f"moe_router_bias_update_rate={rate} finds no router in {name} with a bias for the choice of experts "
                "in stacked parameters (e_score_correction_bias, expert_bias); use moe_router_bias_update_rate=0"
            )
        if policy.count_expert_load and next(expert_modules(inside), None) is None:
            raise ConfigurationError(
                f"count_expert_load=True finds no experts in stacked parameters in {name}; use count_expert_load=False"
            )

    def prepare(self, model: nn.Module) -> None:
        """Take the biases that move by load away from the optimizer."""
        if self.config.policy.moe_router_bias_update_rate:
            keep_biases_from_optimizer(model_inside(model))

    def boosted(self, model: HybridParallelModel) -> None:
        """Count in the passes of the model."""
        rate = self.config.policy.moe_router_bias_update_rate
        self._balance = ExpertBalance(model.losses, model.mesh, rate)
        model.around_passes.append(self._balance.around_pass)
        model.token_counts = self._balance.of_last_step

    def after_step(self, optimizer: HybridParallelOptimizer, model: HybridParallelModel) -> None:
        """Move biases by the load since the last step."""
        self._balance.end_step(optimizer.step_was_skipped)


class SlotsOfExperts(Feature):
    """A fixed number of rows between ranks."""

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse experts that do not run in grouped products, which alone leave slots out."""
        option, instead = "expert_rank_capacity_factor", ", or expert_rank_capacity_factor=None"
        option = f"{option}={self.config.policy.expert_rank_capacity_factor}"
        if self.config.parallel.ep_size == 1:
            raise ConfigurationError(f"{option} exchanges rows of ep_size ranks; use ep_size > 1{instead}")
        for path, experts in expert_modules(model_inside(model)):
            if not has_known_forward(experts) or experts.config._experts_implementation != "grouped_mm":
                raise ConfigurationError(
                    f"{option} needs experts in grouped products, and {path} has others; use "
                    f"experts_implementation='grouped_mm'{instead}"
                )

    def boosted(self, model: HybridParallelModel) -> None:
        """Let the report on a step that is not finite say where slots were too few."""
        model.trace.causes = partial(overfull, model.unwrap())


class ExpertBalance:
    """Load of the experts of one model.

    Args:
        rate: by which biases of routers move after each step; 0 leaves them.
    """

    def __init__(self, losses: LossChoice, mesh: HybridMesh, rate: float) -> None:
        self._model, self._mesh, self._rate = losses.model, mesh, rate
        self._load = ExpertLoad(losses.model, losses.token_mask)
        self._cuts_over_tp = losses.cuts_over_tp
        self._last: dict[str, Tensor] = {}
        self._is_summed = True

    def around_pass(self, this: Pass) -> AbstractContextManager[None]:
        """Return a context in which tokens are counted: those of samples that are trained on."""
        return self._load.counting() if this.trains and this.has_rows else nullcontext()

    def end_step(self, was_skipped: bool) -> None:
        """Move biases by the load since the last step, which this ends; a skipped step moves none."""
        self._last, self._is_summed = self._load.take(), False
        if self._rate > 0.0 and not was_skipped:
            load = self._summed()
            for path, bias in self._biases.items():
                if path in load:
                    update_bias(bias, load[path], self._rate)

    def of_last_step(self) -> dict[str, Tensor]:
        """Return the load of the last step by path of the experts, [experts] in host memory; collective."""
        mine = {path: counts.tolist() for path, counts in self._summed().items()}
        every = [mine] if self._mesh.size("pp") == 1 else all_gather_json(mine, self._mesh.group("pp"))
        whole = {path: torch.tensor(counts) for part in every for path, counts in part.items()}
        return {path: whole[path] for path in in_order(whole)}

    @cached_property
    def _biases(self) -> dict[str, Tensor]:
        return router_biases(self._model)

    def _summed(self) -> dict[str, Tensor]:
        """Return the counts of the last step over all ranks that have this stage's layers."""
        if not self._is_summed:
            # Of all layers: a replica without samples has counted none.
            sizes = self._load.sizes
            parts = [self._last.get(path, torch.zeros(size, dtype=torch.int64)) for path, size in sizes.items()]
            total = torch.cat([part.to(self._mesh.device) for part in parts]) if parts else None
            for axis in (DP_CP, "tp") if self._cuts_over_tp else (DP_CP,):
                if total is not None and self._mesh.size(axis) > 1:
                    dist.all_reduce(total, group=self._mesh.group(axis))
            self._last = {} if total is None else dict(zip(sizes, total.split(list(sizes.values())), strict=True))
            self._is_summed = True
        return self._last
