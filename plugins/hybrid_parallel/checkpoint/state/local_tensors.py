"""Enumeration of the model tensors that this rank saves and loads."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from shardformer.quantised import is_quantised


def local_tensors(model: HybridParallelModel, unique: bool) -> Iterator[tuple[list[str], Tensor]]:
    """Yield (names, tensor) for each local parameter and persistent buffer, once each, with all of its names.

    Args:
        model: the boosted model.
        unique: skip tensors that another stage saves.
    """
    module = model.unwrap()
    persistent = set(module.state_dict(keep_vars=True))
    groups: dict[int, tuple[list[str], Tensor]] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        # Quantised weights never change, and what a layout cuts of them is no rectangle of the whole.
        if name in persistent and not is_quantised(tensor):
            groups.setdefault(id(tensor), ([], tensor))[0].append(name)
    for names, tensor in groups.values():
        if not unique or tensor not in model.saved_elsewhere:
            yield (
                names + [alias for name in names for alias in model.origin.aliases.get(name, ()) if alias not in names],
                tensor,
            )
