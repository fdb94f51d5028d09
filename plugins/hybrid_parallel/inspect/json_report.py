"""Shards and timelines as JSON, for `booster inspect --json`."""

from __future__ import annotations

from typing import Any

from plugins.hybrid_parallel.inspect.shard_report import RankShards
from plugins.hybrid_parallel.pipeline.simulate import Timeline


def shards_as_json(ranks: list[RankShards]) -> list[dict[str, Any]]:
    """Return each rank with its coordinates, its size, and its shards with their shapes."""
    return [
        {
            "rank": each.rank,
            "stage": each.stage,
            "tp_rank": each.tp_rank,
            "ep_rank": each.ep_rank,
            "parameters": sum(piece.numel for piece in each.pieces),
            "bytes": each.bytes,
            "shards": [
                {
                    "name": piece.name,
                    "shape": list(piece.shape),
                    "full_shape": list(piece.full_shape),
                    "dim": piece.dim,
                    "dtype": str(piece.dtype).removeprefix("torch."),
                    "bytes": piece.bytes,
                    "trains": piece.trains,
                }
                for piece in each.pieces
            ],
        }
        for each in ranks
    ]


def timeline_as_json(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline: its length, and each rank's actions with the share of time that it is idle."""
    ranks = zip(timeline.ranks, timeline.bubbles, timeline.peaks, strict=True)
    return {
        "length": timeline.length,
        "idle": sum(timeline.bubbles) / max(len(timeline.bubbles), 1),
        "ranks": [
            {
                "rank": rank,
                "idle": idle,
                "peak_activations": peak,
                "actions": [
                    {
                        "action": timed.action.kind.title,
                        "stage": timed.action.stage,
                        "microbatch": timed.action.microbatch,
                        "begin": timed.begin,
                        "end": timed.end,
                    }
                    for timed in actions
                ],
            }
            for rank, (actions, idle, peak) in enumerate(ranks)
        ],
    }
