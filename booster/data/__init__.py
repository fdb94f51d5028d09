"""Data sets for training without padding: documents packed into rows, and batches of one row."""

from booster.data.rows import PackedSampler, PackingCollator
from booster.data.stream import PackedDataset, PackedStream, pack

__all__ = ["PackedDataset", "PackedSampler", "PackedStream", "PackingCollator", "pack"]
