"""Training and evaluation pairs of each task, by name."""

from __future__ import annotations

from pathlib import Path

from booster.errors import ConfigurationError

from data import SentencePair
from mrpc import mrpc_from_hub, mrpc_pairs
from topics import topic_pairs

TASKS = ("topics", "mrpc")


def load_pairs(task: str, data_dir: Path | None, seed: int) -> tuple[list[SentencePair], list[SentencePair]]:
    """Load the (train, eval) pairs of a task.

    Args:
        task: "topics" (CPython's reference text) or "mrpc" (Microsoft Research Paraphrase Corpus).
        data_dir: directory of the "mrpc" files; None to load them from the Hugging Face hub.
        seed: seed of the false continuations and the held-out documents of "topics".

    Raises:
        ConfigurationError: the data is missing or malformed, or cannot be reached.
    """
    if task == "topics":
        if data_dir is not None:
            raise ConfigurationError("--data-dir does not go with --task topics, which needs no files; use --task mrpc")
        return topic_pairs(seed)
    return mrpc_from_hub() if data_dir is None else mrpc_pairs(data_dir)


def shorten(pairs: list[SentencePair], limit: int | None) -> list[SentencePair]:
    """Return the first `limit` pairs; all pairs for None."""
    return pairs if limit is None else pairs[:limit]
