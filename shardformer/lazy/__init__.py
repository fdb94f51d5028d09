"""Lazy initialization: build a model without values, shard it, then load only the values of this rank's shards."""

from shardformer.lazy.materialize import (
    RecordedValues,
    WeightReader,
    empty_copy,
    is_recorded,
    materialize,
    read_values,
    set_weight_reader,
    waits_for_values,
    weight_reader_of,
)
from shardformer.lazy.recording import LazyInitContext, record_module_init

__all__ = [
    "LazyInitContext",
    "RecordedValues",
    "WeightReader",
    "empty_copy",
    "is_recorded",
    "materialize",
    "read_values",
    "record_module_init",
    "set_weight_reader",
    "waits_for_values",
    "weight_reader_of",
]
