"""What the BERT example reads: the corpus's files with all that can be wrong in them, the default task, the batches.

If this fails after a change of CPython, look at how `pydoc_data.topics` is cut into sentences.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from data import PairDataset, SentencePair, eval_loader, steps_per_epoch, train_loader
from metrics import Counts
from model import load_model
from mrpc import mrpc_from_hub, mrpc_pairs
from tasks import load_pairs
from topics import distinct_documents, topic_pairs

from booster.errors import ConfigurationError


def test_mrpc_quotes_are_plain_characters_and_a_byte_order_mark_is_skipped(mrpc_directory: Path) -> None:
    train, test = mrpc_pairs(mrpc_directory)
    assert (len(train), len(test)) == (21, 13)
    assert train[1] == SentencePair('The cat "sat on mat 1.', "On mat 1, the cat 'sat.", 1)
    assert Counter(pair.label for pair in train) == {0: 11, 1: 10}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("1\t7\t8\tonly one sentence", "line 23: 4 fields; expected 5 tab-separated fields"),
        ("1\t7\t8\tone\ttwo\tthree", "line 23: 6 fields; expected 5 tab-separated fields"),
        ("2\t7\t8\tone\ttwo", "line 23: Quality is '2'; expected 5 tab-separated fields"),
        ("\t7\t8\tone\ttwo", "line 23: Quality is ''; expected 5 tab-separated fields"),
    ],
)
def test_a_malformed_line_is_named(mrpc_directory: Path, line: str, complaint: str) -> None:
    path = mrpc_directory / "msr_paraphrase_train.txt"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigurationError) as caught:
        mrpc_pairs(mrpc_directory)
    assert f"{path}, {complaint}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files_are_named(mrpc_directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere is not a directory; give the one that holds"):
        mrpc_pairs(mrpc_directory / "nowhere")
    path = mrpc_directory / "msr_paraphrase_test.txt"
    path.write_bytes(b"Quality\n1\t2\t3\t\xff\xfe\t\n")
    with pytest.raises(ConfigurationError, match=r"test\.txt is not UTF-8 text \(byte 14\)"):
        mrpc_pairs(mrpc_directory)
    path.write_text("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n")
    with pytest.raises(ConfigurationError, match=r"test\.txt holds no pairs"):
        mrpc_pairs(mrpc_directory)
    path.unlink()
    with pytest.raises(ConfigurationError, match=r"test\.txt does not exist"):
        mrpc_pairs(mrpc_directory)


@pytest.mark.slow
def test_the_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*_: object) -> None:
        raise ConnectionError("a long story")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr("mrpc.go_offline_if_unreachable", lambda: None)
    with pytest.raises(ConfigurationError, match=r"hub \(ConnectionError\); give --data-dir"):
        mrpc_from_hub()


def test_the_default_task_takes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--data-dir does not go with --task topics"):
        load_pairs("topics", tmp_path, seed=0)


def test_topics_are_balanced_reproducible_and_held_out_by_document() -> None:
    train, evaluation = topic_pairs(seed=3)
    assert topic_pairs(seed=3) == (train, evaluation)
    assert topic_pairs(seed=4) != (train, evaluation)
    assert len(train) > 2500
    assert len(evaluation) > 500
    for pairs in (train, evaluation):
        assert sum(pair.label for pair in pairs) * 2 == len(pairs)
    seen = {sentence for pair in train for sentence in (pair.first, pair.second)}
    assert not [pair for pair in evaluation if pair.first in seen or pair.second in seen]


def test_topics_are_prose() -> None:
    sentences = [s for document in distinct_documents() for paragraph in document for s in paragraph]
    assert not [s for s in sentences if "::=" in s or ">>>" in s or "\n" in s]
    assert sum(len(s.split()) for s in sentences) / len(sentences) > 10


def test_every_epoch_has_its_own_order_with_every_sample_once() -> None:
    _, tokenizer = load_model("tiny", seed=0)
    pairs = [SentencePair("a" * (1 + index % 5), "b" * index, index % 2) for index in range(11)]
    dataset = PairDataset(pairs, tokenizer, max_length=12)
    loader = train_loader(dataset, tokenizer, batch_size=4, seed=1)
    orders = []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)
        orders.append(list(loader.sampler))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[1]) == list(range(11))
    batches = list(eval_loader(dataset, tokenizer, batch_size=4))
    assert [len(batch["labels"]) for batch in batches] == [4, 4, 3]
    assert steps_per_epoch(11, 4) == len(batches)
    # Padded to the longest of the batch, not of the dataset.
    assert batches[0]["input_ids"].shape[1] < batches[2]["input_ids"].shape[1] <= 12


def test_metrics_count_every_sample_of_ragged_batches() -> None:
    import torch

    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 3.0], [1.0, 0.0], [0.0, 0.5]])
    labels = torch.tensor([0, 1, 0, 1, 1])
    counts = Counts()
    for part in (slice(0, 2), slice(2, 5), slice(5, 5)):
        counts.add(logits[part], labels[part])
    metrics = counts.metrics()
    assert (metrics.accuracy, metrics.samples) == (0.6, 5)
    assert metrics.f1 == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert metrics.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item())
