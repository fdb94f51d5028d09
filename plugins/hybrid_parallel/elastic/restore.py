"""Restoring a snapshot under any layout: pieces on this machine are read, others arrive from other machines."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from safetensors import safe_open
from torch.distributed import ProcessGroup

from plugins.hybrid_parallel.checkpoint.state.global_tensor import GlobalTensor, TensorChunk
from plugins.hybrid_parallel.checkpoint.state.manifest import Manifest, chunk_key, merge_tensors
from plugins.hybrid_parallel.checkpoint.state.optimizer_state import merge_numbers
from plugins.hybrid_parallel.checkpoint.state.training_state import restore
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.elastic.search import FoundSnapshot
from plugins.hybrid_parallel.relayout.exchange import Exchange
from shardformer.distributed.process_groups import message_group, world_group


def restore_snapshot(found: FoundSnapshot, mesh: HybridMesh, objects: dict[str, Any], group: ProcessGroup) -> None:
    """Replace the state of boosted objects by that of a snapshot; all ranks must call this together.

    Args:
        found: the snapshot.
        mesh: mesh of ranks.
        objects: objects to restore, by kind.
        group: CPU group of all ranks.

    Raises:
        ConfigurationError: the snapshot is of other objects.
    """
    state = dict(found.state)
    if state["optimizer"] is not None:
        state["optimizer"] = {**state["optimizer"], **merge_numbers([each["numbers"] for each in found.headers])}
    manifest = Manifest(0, {}, merge_tensors([each["tensors"] for each in found.headers]), state)
    # A rank of the machine reads what others of it hold, from the same memory.
    sources = {str(piece.rank): ranks for piece, ranks in zip(found.pieces, found.holders, strict=True)}
    exchange = Exchange(_held(found), manifest, mesh.device, message_group(world_group()), sources)
    restore(mesh, objects, exchange.fill, manifest, group)


def _held(found: FoundSnapshot) -> dict[str, GlobalTensor]:
    """Map the pieces on this machine into memory, as rectangles of whole tensors."""
    chunks: dict[str, list[TensorChunk]] = defaultdict(list)
    for piece, header in zip(found.pieces, found.headers, strict=True):
        if piece not in found.here:
            continue
        with safe_open(piece.data_in(found.here[piece]), framework="pt") as file:
            for name, (_, _, rectangles) in header["tensors"].items():
                for offsets, sizes, *_ in rectangles:
                    values = file.get_tensor(chunk_key(name, offsets))
                    chunks[name].append(TensorChunk(tuple(offsets), tuple(sizes), values))
    shapes = {name: tensor[0] for header in found.headers for name, tensor in header["tensors"].items()}
    return {name: GlobalTensor(shapes[name], parts[0].values.dtype, parts) for name, parts in chunks.items()}
