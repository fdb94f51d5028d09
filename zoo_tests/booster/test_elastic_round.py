"""All ranks of a round get one name for it, whatever earlier rounds have left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from booster.elastic.job_environment import agree_on_round


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def joined(store: dist.Store, world_size: int, order: list[int] | None = None) -> set[str]:
    """The names that the ranks of a round get, who come in this order."""
    clients = {rank: store.clone() for rank in range(world_size)}
    with ThreadPoolExecutor(world_size) as ranks:
        work = [ranks.submit(agree_on_round, clients[rank], rank, world_size, 20.0) for rank in order or clients]
        return {each.result() for each in work}


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_every_round_has_a_name_of_its_own(store: dist.TCPStore, order: list[int]) -> None:
    rounds = [joined(store, 3, order) for _ in range(3)]
    assert all(len(names) == 1 for names in rounds)
    assert len(set.union(*rounds)) == 3


def test_rounds_of_other_sizes(store: dist.TCPStore) -> None:
    """Machines come and go."""
    assert [len(joined(store, world_size)) for world_size in (2, 4, 2, 3)] == [1, 1, 1, 1]


def test_ranks_that_died_while_they_joined(store: dist.TCPStore) -> None:
    for rank in (1, 2):
        with pytest.raises(TimeoutError, match="rank 0 did not join the job within timeout_s=0.1; look at why, or"):
            agree_on_round(store.clone(), rank, 3, 0.1)
    with pytest.raises(TimeoutError, match="2 of 3 ranks did not join the job within timeout_s=0.2; look at why, or"):
        agree_on_round(store.clone(), 0, 3, 0.2)
    assert len(joined(store, 3)) == 1
