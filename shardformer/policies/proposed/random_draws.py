"""Dropout by a function inside a region: the style with which each rank draws its own mask for its own features."""

from __future__ import annotations

from torch import nn

from shardformer.policies.feature_counts import names_read
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
        if module is None or not _drops_by_function(module):
            continue
        if hasattr(module, "activation_dropout") and hasattr(module, "activation_fn"):
            region.styles[path] = "activation_dropout"
        elif path in columns and (len(region.columns) > 1 or "fused_colwise" in region.styles.values()):
            region.styles[path] = "draws_per_rank"
        else:
            return None
    return region


def _drops_by_function(module: nn.Module) -> bool:
    """Return whether the forward of `module` calls `nn.functional.dropout`, except through the attention registry."""
    names = names_read(module)
    is_function = "dropout" in names and bool(names & {"functional", "F"})
    is_module = isinstance(getattr(module, "dropout", None), nn.Module)
    return is_function and not is_module and "ALL_ATTENTION_FUNCTIONS" not in names
