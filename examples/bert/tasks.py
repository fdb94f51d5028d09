"""Which pairs to train on and which to evaluate on, by the name of the task."""

from __future__ import annotations

from pathlib import Path

from data import SentencePair
from mrpc import mrpc_from_hub, mrpc_pairs
from topics import topic_pairs

from booster.errors import ConfigurationError

TASKS = ("topics", "mrpc")


def load_pairs(task: str, data_dir: Path | None, seed: int) -> tuple[list[SentencePair], list[SentencePair]]:
    """(train, eval) pairs of a task.

    Args:
        task: "topics" (CPython's reference text) or "mrpc" (Microsoft Research Paraphrase Corpus).
        data_dir: where the files of "mrpc" lie; None to load them from the Hugging Face hub.
        seed: of the false continuations and the held-out documents of "topics".

    Raises:
        ConfigurationError: the data is missing, malformed or out of reach.
    """
    if task == "topics":
        if data_dir is not None:
            raise ConfigurationError("--data-dir does not go with --task topics, which needs no files; use --task mrpc")
        return topic_pairs(seed)
    return mrpc_from_hub() if data_dir is None else mrpc_pairs(data_dir)


def shorten(pairs: list[SentencePair], limit: int | None) -> list[SentencePair]:
    """The first `limit` pairs; all of them for None."""
    return pairs if limit is None else pairs[:limit]
