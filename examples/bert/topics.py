"""The default task: does sentence B follow sentence A in CPython's reference text?

`pydoc_data.topics` ships with every CPython, so this needs no download. It does not measure language understanding, but
it is real English prose, split and balanced so that a model that learns nothing scores 0.5 on unseen documents.
"""

from __future__ import annotations

import random
import re
from itertools import pairwise

from data import SentencePair

# A sentence ends at . ! or ? before white space and something that starts a new one.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"“(A-Z])")
_LIST_MARK = re.compile(r"^(?:[*•-]|\d+\.|\[\d+\]|Note:|Changed in version [\d.]+:)\s+")
_WORD = re.compile(r"[A-Za-z][a-z]+")
_MIN_WORDS = 5
_EVAL_SHARE = 0.2


def topic_pairs(seed: int) -> tuple[list[SentencePair], list[SentencePair]]:
    """Create balanced pairs from training documents and held-out documents, determined by the seed and CPython version.

    Returns (train, eval). A document is one topic of `pydoc_data.topics`; no sentence of a held-out document occurs in
    a training pair, although topics quote one another.
    """
    rng = random.Random(seed)
    documents = distinct_documents()
    rng.shuffle(documents)
    train, evaluation = _split(documents)
    return _pairs_of(train, rng), _pairs_of(evaluation, rng)


def distinct_documents() -> list[list[list[str]]]:
    """Return documents as paragraphs of sentences; a sentence of several topics is kept in the longest topic only."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    documents = []
    for _, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        paragraphs = [[s for s in paragraph if s not in seen] for paragraph in _paragraphs(text)]
        seen.update(s for paragraph in paragraphs for s in paragraph)
        documents.append([paragraph for paragraph in paragraphs if paragraph])
    return [document for document in documents if sum(map(len, document)) > 1]


def _paragraphs(text: str) -> list[list[str]]:
    """Return the prose of a topic by paragraphs, without grammar, code and headings."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        joined = _LIST_MARK.sub("", " ".join(block.split()))
        sentences = [s for s in _SENTENCE_END.split(joined) if _is_prose(s)]
        if sentences:
            paragraphs.append(sentences)
    return paragraphs


def _is_prose(sentence: str) -> bool:
    """Return whether a sentence has enough plain words and a final mark: code and grammar have neither."""
    words = _WORD.findall(sentence)
    return len(words) >= _MIN_WORDS and sentence[-1] in ".!?:" and "::=" not in sentence and ">>>" not in sentence


def _split(documents: list[list[list[str]]]) -> tuple[list[list[list[str]]], list[list[list[str]]]]:
    """Hold out documents, in the order given, until they hold the evaluation share of all sentences."""
    sizes = [sum(map(len, document)) for document in documents]
    wanted = _EVAL_SHARE * sum(sizes)
    held_out: list[list[list[str]]] = []
    kept: list[list[list[str]]] = []
    taken = 0
    for document, size in zip(documents, sizes, strict=True):
        if taken + size <= wanted * 1.1:
            held_out.append(document)
            taken += size
        else:
            kept.append(document)
    return kept, held_out


def _pairs_of(documents: list[list[list[str]]], rng: random.Random) -> list[SentencePair]:
    """Create one true and one false continuation of every sentence that has a successor, shuffled."""
    texts = [[s for paragraph in document for s in paragraph] for document in documents]
    pairs = []
    for text in texts:
        for first, second in pairwise(text):
            pairs.append(SentencePair(first, second, 1))
            pairs.append(SentencePair(first, rng.choice(_other(texts, text, rng)), 0))
    rng.shuffle(pairs)
    return pairs


def _other(texts: list[list[str]], text: list[str], rng: random.Random) -> list[str]:
    """Draw a document other than `text`, weighted by its number of sentences so that none of them is favoured."""
    others = [candidate for candidate in texts if candidate is not text]
    return rng.choices(others, weights=[len(candidate) for candidate in others])[0]
