"""The channels between the stages of a pipeline: which exist, over which groups, and their first message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from plugins.hybrid_parallel.distributed.mesh import HybridMesh, link_group
from plugins.hybrid_parallel.pipeline.p2p import Channel, LocalChannel
from plugins.hybrid_parallel.pipeline.schedule import Schedule

AnyChannel = Channel | LocalChannel


@dataclass
class Links:
    """The channels of one stage; None where there is no neighbour."""

    activations_in: AnyChannel | None = None
    activations_out: AnyChannel | None = None
    gradients_in: AnyChannel | None = None
    gradients_out: AnyChannel | None = None

    def outgoing(self) -> Iterator[AnyChannel]:
        """Yield the channels on which the stage sends."""
        yield from (channel for channel in (self.activations_out, self.gradients_out) if channel is not None)


def connect(mesh: HybridMesh, schedule: Schedule, num_chunks: int) -> dict[int, Links]:
    """Create the channels of this rank's stages; all ranks create the groups of all channels, in one order.

    Args:
        mesh: the grid of ranks.
        schedule: the pipeline schedule, which assigns stages to ranks.
        num_chunks: number of stages per rank.
    """
    num_ranks, here, device = mesh.size("pp"), mesh.rank("pp"), mesh.device
    num_stages = num_chunks * num_ranks
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    links = {stage: Links() for stage in schedule.stages_of(here, num_ranks, num_chunks)}
    for stage in range(num_stages - 1):
        source, target = (schedule.rank_of(each, num_ranks) for each in (stage, stage + 1))
        if source == target:
            if source == here:
                links[stage].activations_out = links[stage + 1].activations_in = LocalChannel()
                links[stage + 1].gradients_out = links[stage].gradients_in = LocalChannel()
            continue
        # Between two ranks, each direction of each chunk has its own group.
        link = stage // num_ranks, source < target
        forward, backward = link_group(mesh, "activations", *link), link_group(mesh, "gradients", *link)
        ranks = mesh.stage_ranks
        if source == here:
            links[stage].activations_out = Channel(ranks[target], forward, device, "the activation", stream)
            links[stage].gradients_in = Channel(ranks[target], backward, device, "the gradient", stream)
        if target == here:
            links[stage + 1].activations_in = Channel(ranks[source], forward, device, "the activation", stream)
            links[stage + 1].gradients_out = Channel(ranks[source], backward, device, "the gradient", stream)
    if device.type == "cuda":
        # Once for each grid of ranks: a copy of the model uses the same groups, and one rank alone may make it.
        mesh.later_groups.get_or_create(("warm", schedule.in_v, num_stages), lambda: warm_up(links, num_stages))
    return links


def warm_up(links: Mapping[int, Links], num_stages: int) -> bool:
    """Send one message on each channel between two ranks; with NCCL, the first message creates the communicator.

    That blocks both ranks until the other one comes, so it must not happen within a step. All ranks of a pipeline must
    call this. Each follows the order of the stages, so that no circle of ranks waits.

    Args:
        links: the channels of this rank's stages, by stage.
        num_stages: number of stages of all ranks.

    Returns:
        True, once all messages of this rank have arrived.
    """
    nothing = Links()
    for stage in range(num_stages - 1):
        here, after = links.get(stage, nothing), links.get(stage + 1, nothing)
        for sender, receiver in (
            (here.activations_out, after.activations_in),
            (after.gradients_out, here.gradients_in),
        ):
            if isinstance(sender, Channel):
                sender.warm_up(sends=True)
            if isinstance(receiver, Channel):
                receiver.warm_up(sends=False)
    return True
