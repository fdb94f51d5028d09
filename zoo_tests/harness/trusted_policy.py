"""A plan's policy that divides sequences unproved: the ranks of a campaign import it."""

from __future__ import annotations

from shardformer.policies.plans.policy import PlanPolicy


class TrustedPlanPolicy(PlanPolicy):
    """A plan's policy as if its family had been seen to train right with parts of sequences."""

    def was_seen(self, way: str) -> bool:
        """Every family was."""
        return True
