"""Which communicators a save needs. The meta device stands for a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from plugins.hybrid_parallel.checkpoint.global_tensor import Gather
from plugins.hybrid_parallel.shard_report import fake_rank
from shardformer.shard_spec import Part, ShardSpec, annotate


@pytest.mark.parametrize(("rank", "peers"), [(0, [1, 2]), (1, [0])])
def test_messages_use_the_communicator_of_the_group(
    rank: int, peers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL makes one for each pair of ranks whose messages are not batched; all ranks make that of the group."""
    calls: list[object] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: calls.append("all_reduce"))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda batch: calls.append([each.group_peer for each in batch]))
    spec = ShardSpec((6, 4), 0, (Part(6),), rank, 3)
    with fake_rank(rank, 3):
        for _ in range(2):
            tensor = torch.empty(spec.local_shape, device="meta")
            annotate(tensor, spec)
            Gather.begin(tensor, None, dist.group.WORLD)
    assert calls == ["all_reduce", peers, peers]
