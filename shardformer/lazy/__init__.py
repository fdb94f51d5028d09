"""Lazy initialisation: a model is built without values, sharded, and only then given those of its own pieces."""

from shardformer.lazy.materialize import (
    WeightReader,
    materialize,
    set_weight_reader,
    waits_for_values,
    weight_reader_of,
)

__all__ = ["WeightReader", "materialize", "set_weight_reader", "waits_for_values", "weight_reader_of"]
