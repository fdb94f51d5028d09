"""Data sets for training without padding: documents packed into rows, and batches of one row."""

from booster.data.collator import PackingCollator
from booster.data.packing import PackedDataset, pack
from booster.data.sampler import PackedSampler

__all__ = ["PackedDataset", "PackedSampler", "PackingCollator", "pack"]
