"""Data sets for training without padding: documents packed into rows, and batches of one row."""

from booster.data.packing import PackedDataset, PackedSampler, PackingCollator, pack

__all__ = ["PackedDataset", "PackedSampler", "PackingCollator", "pack"]
