"""Data sets for training without padding: documents packed into rows, and batches of one row."""

from booster.data.packed_rows import PackedSampler, PackingCollator
from booster.data.packing import PackedDataset, pack
from booster.data.stream import PackedStream

__all__ = ["PackedDataset", "PackedSampler", "PackedStream", "PackingCollator", "pack"]
