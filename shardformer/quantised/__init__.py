"""Frozen linear layers whose weights are quantised: the 4-bit and 8-bit layers of bitsandbytes, and those of torchao.

Each kind of weight knows how it is cut over ranks, and multiplies by its library's own product on this rank's shard.
The dequantised shard has the bits of the shard of the dequantised weight: nothing is quantised again. Kinds are
recognized by the classes of modules that are imported already; this package imports neither library otherwise.
"""

from __future__ import annotations

from shardformer.quantised.four_bit import keep_format
from shardformer.quantised.kinds import (
    KINDS,
    kind_of_layer,
    packed_layers,
    quantised_layers,
    quantised_name,
    stored_tensors,
)
from shardformer.quantised.weight import QuantisedWeight
from shardformer.utils.customizations import is_quantised

__all__ = [
    "KINDS",
    "QuantisedWeight",
    "is_quantised",
    "keep_format",
    "kind_of_layer",
    "packed_layers",
    "quantised_layers",
    "quantised_name",
    "stored_tensors",
]
