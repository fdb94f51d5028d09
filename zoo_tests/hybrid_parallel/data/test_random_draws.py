"""Random numbers that loading draws: other ones on every replica, and one warning where they are not the plain ones.

If this fails, look in `plugins/hybrid_parallel/data/random_stream.py`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from plugins.hybrid_parallel.data import checks
from plugins.hybrid_parallel.data.dataloader import ShardedDataLoader, shard_dataloader
from plugins.hybrid_parallel.data.random_stream import OrderStream, generators_of

GENERATOR = torch.Generator()
DATA = TensorDataset(torch.arange(8))


def _numbers(count: int) -> Tensor:
    return torch.rand(count, generator=GENERATOR)


def _mask(samples: list[Any]) -> Tensor:
    return _numbers(len(samples))


def _mask_by_default(samples: list[Any]) -> Tensor:
    return torch.rand(len(samples))


def _mask_by_sample(samples: list[Any]) -> Tensor:
    return torch.stack([torch.rand((), generator=torch.Generator().manual_seed(int(sample))) for (sample,) in samples])


class _Noisy(Dataset):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(2)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (torch.rand((), generator=self.generator),)


def _sharded(collate: Any, replicas: int, dataset: Any = DATA, **options: Any) -> list[ShardedDataLoader]:
    loaders = [DataLoader(dataset, batch_size=4 // replicas, collate_fn=collate, **options) for _ in range(replicas)]
    return [
        shard_dataloader(loader, rank, replicas, torch.device("cpu"), OrderStream.seeded(0))
        for rank, loader in enumerate(loaders)
    ]


def _epochs(loader: ShardedDataLoader, count: int = 1) -> list[float]:
    GENERATOR.manual_seed(1)
    return torch.cat([batch for _ in range(count) for batch in loader]).tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_replicas_draw_other_numbers_and_one_replica_the_plain_ones(workers: int) -> None:
    GENERATOR.manual_seed(1)
    plain = torch.cat(list(DataLoader(DATA, batch_size=4, collate_fn=_mask, num_workers=workers))).tolist()
    assert _epochs(*_sharded(_mask, 1, num_workers=workers)) == plain
    first, second = (_epochs(loader) for loader in _sharded(_mask, 2, num_workers=workers))
    assert first == plain[:4]
    assert not set(first) & set(second)


def test_one_replica_draws_order_and_samples_in_turns_as_a_plain_loop() -> None:
    def collate(samples: list[Any]) -> Tensor:
        return torch.stack([torch.stack([sample.float(), torch.rand(())]) for (sample,) in samples])

    torch.manual_seed(0)
    plain = [batch for loader in [DataLoader(DATA, 4, True, collate_fn=collate)] * 2 for batch in loader]
    (loader,) = _sharded(collate, 1, shuffle=True)
    torch.testing.assert_close([batch for _ in range(2) for batch in loader], plain, rtol=0.0, atol=0.0)


def test_numbers_of_a_replica_go_on_and_begin_anew_with_the_users() -> None:
    _, loader = _sharded(_mask, 2)
    drawn = _epochs(loader, 2)
    assert len(set(drawn)) == 8
    assert torch.equal(GENERATOR.get_state(), torch.Generator().manual_seed(1).get_state()), "the user's was left so"
    GENERATOR.manual_seed(5)
    other = torch.cat(list(loader)).tolist()
    assert not set(other) & set(drawn)
    assert _epochs(loader) == drawn[:4], "seeded as at first"


def test_a_generator_of_the_order_stays_alike_on_all_replicas() -> None:
    states = []
    for loader in _sharded(_mask, 2, shuffle=True, generator=GENERATOR):
        _epochs(loader)
        states.append(GENERATOR.get_state())
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("collate", "dataset", "replicas", "expected"),
    [
        (
            _mask,
            DATA,
            2,
            "collate_fn draws random numbers from a torch.Generator of its own, and each of the dp_size=2",
        ),
        (_mask, DATA, 1, None),
        (_mask_by_default, DATA, 1, None),
        (_mask_by_default, DATA, 2, "from torch's default generator, and each of the dp_size=2 replicas draws for its"),
        (_mask_by_sample, DATA, 2, None),
        (torch.utils.data.default_collate, _Noisy(), 2, "the dataset draws .* draws the same for other samples"),
    ],
)
def test_one_warning_where_numbers_are_not_the_plain_ones(
    collate: Any, dataset: Any, replicas: int, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    loader = _sharded(collate, replicas, dataset, shuffle=True)[0]
    for _ in range(2):
        list(loader)
    assert len(caplog.messages) == (expected is not None)
    if expected is not None:
        assert re.search(expected, caplog.messages[0])


def test_generators_are_found_wherever_a_collator_holds_them() -> None:
    own = torch.Generator()

    class Collator:
        def __init__(self) -> None:
            self.steps = [partial(torch.rand, generator=own)]

        def __call__(self, samples: list[Any]) -> Any: ...

    def closure(samples: list[Any]) -> Any:
        return [torch.rand(1, generator=own) for _ in samples]

    for holder in (Collator(), Collator().__call__, closure, partial(closure, [])):
        assert generators_of(holder) == [own]
    assert generators_of(_mask) == [GENERATOR]
    assert generators_of(_mask_by_sample) == []


def test_looking_at_samples_leaves_the_datasets_generator_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "all_gather_json", lambda value, group: [value])
    dataset = _Noisy()
    before = dataset.generator.get_state()
    checks.check_same_data(DataLoader(dataset, batch_size=2), None)
    assert torch.equal(dataset.generator.get_state(), before)
