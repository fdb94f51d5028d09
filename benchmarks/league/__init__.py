"""A league of correctness: classes of transformers, trained by this package and by others, against plain training."""
