"""Ranks that share a GPU (`zoo_tests/gpu/staging.py`), tried on the simulated device: its NCCL is used by nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from zoo_tests.gpu.staging import shared_gpu
from zoo_tests.gpu.training import train
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.simcuda import nccl, rules

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2, sequence parallelism": (2, {"tp_size": 2, "enable_sequence_parallelism": True}),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 4}),
    "dp2, ZeRO-1": (2, {"dp_size": 2, "zero_stage": 1}),
    "cp2, ring": (2, {"cp_size": 2}),
}


def train_sharing(options: dict[str, Any]) -> tuple[list[float], list[float], int]:
    """Losses of boosted and of plain training, and the number of communicators that it made."""
    with rules.only("device_tensors"), shared_gpu():
        before = len(nccl.communicators())
        return *train("llama", options), len(nccl.communicators()) - before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    for losses, plain, made in run_on_ranks(world_size, train_sharing, options, device="simcuda"):
        assert losses == pytest.approx(plain, rel=1e-5)
        assert made == 0


def exchange() -> dict[str, Any]:
    """The results of each operation on tensors of the device, from this rank's point of view."""
    rank, found = dist.get_rank(), {}
    with shared_gpu():
        mine = torch.arange(4.0, device="cuda") + 10 * rank
        work = dist.all_reduce(summed := mine.clone(), async_op=True)
        work.wait()
        dist.reduce(reduced := mine.clone(), dst=0)
        dist.broadcast(flags := torch.tensor([rank == 1], device="cuda"), src=1)
        gathered = [torch.empty(4, device="cuda") for _ in range(2)]
        dist.all_gather(gathered, mine)
        dist.all_gather_into_tensor(joined := torch.empty(8, device="cuda"), mine)
        dist.reduce_scatter_tensor(part := torch.empty(2, device="cuda"), mine)
        dist.all_to_all_single(swapped := torch.empty(4, device="cuda"), mine)
        received = torch.empty(4, device="cuda")
        operations = [dist.P2POp(dist.irecv, received, 1 - rank), dist.P2POp(dist.isend, mine, 1 - rank)]
        for each in dist.batch_isend_irecv(operations):
            each.wait()
        dist.barrier()
        found = {"all_reduce": summed, "reduce": reduced, "broadcast": flags, "all_gather": torch.cat(gathered)}
        found |= {"all_gather_into": joined, "reduce_scatter": part, "all_to_all": swapped, "p2p": received}
    with rules.only("lazy_communicators"):  # which closes those of earlier tests
        dist.all_reduce(mine)
        assert nccl.communicators(), "the operations were not given back"
    return {name: tensor.tolist() for name, tensor in found.items()}


def test_operations() -> None:
    first, second = [0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]
    total = [10.0, 12.0, 14.0, 16.0]
    for rank, found in enumerate(run_on_ranks(2, exchange, device="simcuda")):
        own, other = (first, second) if rank == 0 else (second, first)
        assert found == {
            "all_reduce": total,
            "reduce": total if rank == 0 else own,
            "broadcast": [True],
            "all_gather": first + second,
            "all_gather_into": first + second,
            "reduce_scatter": total[2 * rank :][:2],
            "all_to_all": first[2 * rank :][:2] + second[2 * rank :][:2],
            "p2p": other,
        }
