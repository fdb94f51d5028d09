"""The Microsoft Research Paraphrase Corpus, from its own two files or from the Hugging Face hub (GLUE/MRPC)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from booster.errors import ConfigurationError

from data import SentencePair
from hub import go_offline_if_unreachable

_TRAIN_FILE = "msr_paraphrase_train.txt"
_TEST_FILE = "msr_paraphrase_test.txt"
_COLUMNS = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
_EXPECTED = f"{len(_COLUMNS)} tab-separated fields ({', '.join(_COLUMNS)}) with Quality 0 or 1"
_HUB_NAME = "nyu-mll/glue"


def mrpc_pairs(directory: Path) -> tuple[list[SentencePair], list[SentencePair]]:
    """Read the (train, test) pairs of `msr_paraphrase_{train,test}.txt` in `directory`.

    Raises:
        ConfigurationError: a file is missing or unreadable, or a line is malformed (the message has its number).
    """
    if not directory.is_dir():
        raise ConfigurationError(f"--data-dir {directory} is not a directory; give the one that holds {_TRAIN_FILE}")
    return read_mrpc_file(directory / _TRAIN_FILE), read_mrpc_file(directory / _TEST_FILE)


def read_mrpc_file(path: Path) -> list[SentencePair]:
    """Read the pairs of one file: a header, then one pair per line.

    Quotes are plain characters; a byte order mark is allowed.

    Raises:
        ConfigurationError: see `mrpc_pairs`.
    """
    try:
        # Only "\n" ends a line: str.splitlines would also split at unusual separators inside a sentence.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ConfigurationError(f"{path} does not exist; put {path.name} of the corpus there") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text (byte {error.start}); convert it to UTF-8") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}); give a readable file") from None
    pairs = [_pair(line, path, number) for number, line in enumerate(lines[1:], start=2) if line.strip()]
    if not pairs:
        raise ConfigurationError(f"{path} holds no pairs; expected a header line and lines of {_EXPECTED}")
    return pairs


def _pair(line: str, path: Path, number: int) -> SentencePair:
    fields = line.rstrip("\r").split("\t")
    if len(fields) != len(_COLUMNS):
        raise ConfigurationError(f"{path}, line {number}: {len(fields)} fields; expected {_EXPECTED}")
    quality, _, _, first, second = fields
    if quality not in ("0", "1"):
        raise ConfigurationError(f"{path}, line {number}: Quality is {quality!r}; expected {_EXPECTED}")
    return SentencePair(first, second, int(quality))


def mrpc_from_hub() -> tuple[list[SentencePair], list[SentencePair]]:
    """Load the (train, test) pairs of GLUE/MRPC; its train and validation splits together are the training file.

    Raises:
        ConfigurationError: `datasets` is not installed or the hub cannot be reached.
    """
    go_offline_if_unreachable()
    try:
        from datasets import load_dataset
    except ImportError:
        raise ConfigurationError(
            "--task mrpc without --data-dir needs the package 'datasets'; run pip install 'hybrid-booster[examples]'"
        ) from None
    try:
        splits = load_dataset(_HUB_NAME, "mrpc")
    except Exception as error:  # datasets raises a different class for each way a download can fail
        raise ConfigurationError(
            f"GLUE/MRPC could not be loaded from the hub ({type(error).__name__}); "
            f"give --data-dir with {_TRAIN_FILE} and {_TEST_FILE}, or use --task topics"
        ) from None
    return [*_rows(splits["train"]), *_rows(splits["validation"])], _rows(splits["test"])


def _rows(split: Any) -> list[SentencePair]:
    return [SentencePair(row["sentence1"], row["sentence2"], int(row["label"])) for row in split]
