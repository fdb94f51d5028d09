"""Dropout by a function inside a region: the style with which each rank draws its own mask for its own features."""

from __future__ import annotations

from torch import nn

from shardformer.policies.feature_counts import drops_by_function
from shardformer.policies.proposed.regions import Region
from shardformer.utils.module_paths import starred


def with_own_masks(model: nn.Module, region: Region) -> Region | None:
    """Add the style for functional dropout around a region's layers; None if there is dropout that has no style.

    Dropout modules have styles already, and the functions of transformers' attention registry draw per rank.
    """
    parts = [path.split(".") for path in sorted(region.columns | region.rows)]
    depth = next((at for at, names in enumerate(zip(*parts, strict=False)) if len(set(names)) > 1), 0)
    owner = ".".join(parts[0][:depth])
    columns = {path.rpartition(".")[0] for path in region.columns}
    for path in sorted({owner, *columns}):
        module = next((each for name, each in model.named_modules() if starred(name) == path), None)
        if module is None or not drops_by_function(module):
            continue
        if hasattr(module, "activation_dropout") and hasattr(module, "activation_fn"):
            region.styles[path] = "activation_dropout"
        elif path in columns and (len(region.columns) > 1 or "fused_colwise" in region.styles.values()):
            region.styles[path] = "draws_per_rank"
        else:
            return None
    return region
