"""Policies of plans that divide sequences unproved, in one way each: the ranks of a campaign import them."""

from __future__ import annotations

from shardformer.policies.plans.policy import PlanPolicy


class TrustedPlanPolicy(PlanPolicy):
    """A plan's policy as if its family had been seen to train right with parts of sequences.

    Attributes:
        way: that it had been seen in, see `divides_sequences`.
    """

    way = ""

    def was_seen(self, way: str) -> bool:
        """The family was, in the one way."""
        return way == self.way or super().was_seen(way)


class TrustedRegions(TrustedPlanPolicy):
    """It has regions between which ranks have slices."""

    way = "split_gather"


class TrustedRing(TrustedPlanPolicy):
    """Its inputs can be shared."""

    way = "cp"


class TrustedExchange(TrustedPlanPolicy):
    """Tensor-parallel ranks exchange heads."""

    way = "all_to_all"


class TrustedContextExchange(TrustedPlanPolicy):
    """Context-parallel ranks exchange heads."""

    way = "cp_all_to_all"


TRUSTED = {each.way: each for each in (TrustedRegions, TrustedRing, TrustedExchange, TrustedContextExchange)}
