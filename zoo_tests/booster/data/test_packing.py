"""Packing documents into rows: nothing is lost or repeated, rows keep to the budget, and steps are balanced.

What breaks here first: a packing or an order that depends on more than the data, the seed and the epoch. Look in
`booster/data`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

from booster.data import PackedDataset, PackingCollator, pack
from booster.data.rows import first_fit
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader, shard_dataloader
from plugins.hybrid_parallel.data.random_stream import OrderStream


def _documents(number: int = 90, longest: int = 24, seed: int = 0) -> list[dict[str, list[int]]]:
    """Each has tokens of its own: its number, and places."""
    source = random.Random(seed)
    lengths = [source.randint(1, longest) for _ in range(number)]
    return [{"input_ids": [1000 * index + place for place in range(length)]} for index, length in enumerate(lengths)]


def _tokens(batches: Iterator[dict[str, Any]]) -> list[int]:
    return [token for batch in batches for token in batch["input_ids"].flatten().tolist()]


@settings(deadline=None)
@given(st.integers(1, 20), st.data())
def test_each_document_goes_into_the_first_row_with_room(room: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, room), max_size=40))
    rows: list[list[int]] = []
    for index, length in enumerate(lengths):
        row = next((row for row in rows if sum(lengths[each] for each in row) + length <= room), None)
        rows.append([index]) if row is None else row.append(index)
    assert first_fit(lengths, room) == rows


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5), st.integers(24, 60), st.integers(1, 5), st.booleans())
def test_an_epoch_has_each_document_once(seed: int, budget: int, batch_size: int, shuffle: bool) -> None:
    documents = _documents(seed=seed)
    packed = pack(documents, budget, shuffle=shuffle, seed=seed, rows_per_step=4)
    assert all(sum(len(each["input_ids"]) for each in row) <= budget for row in packed)
    epochs = [_tokens(iter(packed.loader(batch_size))) for _ in range(2)]
    expected = Counter(token for each in documents for token in each["input_ids"])
    assert Counter(epochs[0]) == Counter(epochs[1]) == expected
    assert (epochs[0] == epochs[1]) is not shuffle
    assert packed.num_tokens == expected.total() and 0.5 < packed.fill <= 1


def test_the_order_depends_on_the_seed_and_the_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        packed = pack(_documents(), 40, seed=seed)
        loader = packed.loader()
        packed.sampler.set_epoch(epoch)
        return _tokens(iter(loader))

    assert order(3, 2) == order(3, 2)
    assert len({tuple(order(seed, epoch)) for seed in (3, 4) for epoch in (0, 1)}) == 4
    packed = pack(_documents(), 40, seed=3)
    counted = [_tokens(iter(packed.loader())) for _ in range(3)]
    assert counted[2] == order(3, 2), "epochs are counted where nothing sets them"


def test_batches_are_those_of_transformers_collator() -> None:
    documents = _documents(6)
    rows = [
        [{name: torch.tensor(each["input_ids"]) for name in ("input_ids", "labels")} for each in part]
        for part in (documents[:4], documents[4:])
    ]
    found = PackingCollator(cu_seq_lens=True)(rows)
    expected = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(documents)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
        assert torch.as_tensor(found[name]).dtype == torch.as_tensor(value).dtype
    own = PackingCollator()([[{"input_ids": torch.tensor([7, 8, 9]), "labels": torch.tensor([1, 2, 3])}]])
    assert own["labels"].tolist() == [[-100, 2, 3]] and "cu_seq_lens_q" not in own


def test_steps_are_balanced_by_cost() -> None:
    """A long document costs more than short ones of as many tokens."""
    source = random.Random(1)
    lengths = [min(int(source.lognormvariate(4, 1.2)) + 1, 1024) for _ in range(3000)]
    packed = pack([[1]] * len(lengths), 1024, rows_per_step=4, attention_length=256, lengths=lengths)
    costs = [sum((end - start) * (256 + end - start) for _, start, end in row) for row in packed.rows]

    def spread(order: list[int]) -> float:
        """The cost of the most expensive row of a step over the mean, for all steps of four rows."""
        steps = [[costs[row] for row in order[start : start + 4]] for start in range(0, len(order) - 3, 4)]
        return sum(max(step) for step in steps) / sum(sum(step) / 4 for step in steps)

    assert spread(list(packed.sampler)) < 1.02 < 1.1 < spread(list(range(len(costs))))


def _shares(packed: PackedDataset, dp_size: int, batch_size: int) -> list[ShardedDataLoader]:
    """The loaders of all replicas."""
    streams = [OrderStream.seeded(0) for _ in range(dp_size)]
    loaders = [packed.loader(batch_size, cu_seq_lens=True) for _ in range(dp_size)]
    device = torch.device("cpu")
    return [shard_dataloader(each, rank, dp_size, device, streams[rank]) for rank, each in enumerate(loaders)]


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 2), (4, 1)), ((4, 1), (1, 1))])
def test_training_resumes_under_another_layout(before: tuple[int, int], after: tuple[int, int]) -> None:
    """In the second epoch, after three steps: no document is lost or repeated. Layouts: (dp_size, batch_size).

    The script computes `rows_per_step` from its new layout: that of the saved order holds.
    """
    documents = _documents()
    first = [pack(documents, 40, rows_per_step=4) for _ in range(before[0])]
    loaders = [_shares(packed, *before)[rank] for rank, packed in enumerate(first)]
    for loader in loaders:
        list(loader)
    seen = [token for loader in loaders for token in _tokens(_take(iter(loader), 3))]
    state = loaders[0].state_dict()
    rest: list[int] = []
    for rank in range(after[0]):
        loader = _shares(pack(documents, 40, rows_per_step=3), *after)[rank]
        loader.load_state_dict(state)
        rest += _tokens(iter(loader))
    assert Counter(seen + rest) == Counter(token for each in documents for token in each["input_ids"])
    whole = pack(documents, 40, rows_per_step=4)
    whole.sampler.set_epoch(1)
    assert set(seen) == set(_tokens(_take(iter(whole.loader(before[0] * before[1])), 3)))


def _take(batches: Iterator[Any], number: int) -> Iterator[Any]:
    return (next(batches) for _ in range(number))


def test_long_documents_are_refused_cut_or_split() -> None:
    documents = [[1, 2, 3], list(range(10, 20)), []]
    with pytest.raises(
        ConfigurationError, match="document 1 has 10 tokens, more than max_tokens=4; use max_tokens=10,"
    ):
        pack(documents, 4)
    for too_long, expected in (("truncate", [3, 4]), ("split", [2, 3, 4, 4])):
        packed = pack(documents, 4, too_long=too_long)
        lengths = sorted(len(each["input_ids"]) for row in packed for each in row)
        assert lengths == expected
    split = next(iter(pack(documents[1:2], 4, too_long="split", shuffle=False).loader(3)))
    assert split["input_ids"][0].tolist() == list(range(10, 20))
    assert split["labels"][0].tolist() == [-100, 11, 12, 13, -100, 15, 16, 17, -100, 19]
    assert split["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ([[1]], {"max_tokens": 0}, "max_tokens=0 is no positive integer"),
        ([[1]], {"max_tokens": 4.5}, "max_tokens=4.5 is no positive integer"),
        ([[1]], {"rows_per_step": 0}, "rows_per_step=0 is no positive integer"),
        ([[1]], {"too_long": "drop"}, "too_long='drop' is unknown; use 'refuse', 'truncate', 'split'"),
        ([[1]], {"lengths": [1, 2]}, "lengths has 2 entries for a data set of 1 items"),
        ([{"text": "a"}], {}, "an item of the data set has text, and no input_ids"),
        ([[], []], {}, "the data set of 2 items has no token"),
        (iter([[1]]), {"lengths": [1]}, "lengths= is for data sets whose items have numbers"),
        (7, {}, "the data set is a int; give pack"),
    ],
)
def test_wrong_options_are_refused(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pack(dataset, **{"max_tokens": 4, **options})


def test_lengths_that_are_not_those_of_the_documents_are_refused() -> None:
    packed = pack([[1, 2]], 8, lengths=[3])
    with pytest.raises(ConfigurationError, match="item 0 of the data set has 2 input_ids and 2 labels"):
        packed[0]
    assert isinstance(packed.loader(), DataLoader)
