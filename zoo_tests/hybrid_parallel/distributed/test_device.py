"""Which GPU a rank trains on; torch's own functions are replaced, as no GPU is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed import mesh
from plugins.hybrid_parallel.distributed.mesh import check_own_device, claim_device
from plugins.hybrid_parallel.shard_report import fake_rank


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Four GPUs, of which 0 is current; yields those that are chosen."""
    chosen: list[torch.device] = []
    replacements: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: chosen[-1].index if chosen else 0,
        "set_device": chosen.append,
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    with fake_rank(1, 2):
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        yield chosen


def test_the_device_that_the_default_group_is_bound_to(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`init_process_group(device_id=...)` binds NCCL to it, and leaves torch's current device as it is."""
    shown: list[str] = []
    monkeypatch.setattr(mesh, "all_gather_json", lambda value: shown.append(value) or ["GPU-0", value])
    dist.group.WORLD.bound_device_id = torch.device("cuda", 3)
    assert claim_device() == torch.device("cuda", 3)
    assert (gpus, shown) == ([torch.device("cuda", 3)], ["GPU-3"])


def test_ranks_of_a_users_group_that_all_use_the_first_gpu_are_refused(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "all_gather_json", lambda value: [value, value])
    with pytest.raises(ConfigurationError, match=r"^ranks 0 and 1 use the same GPU \(GPU-0\), and NCCL needs one for"):
        claim_device()
    assert not gpus


def test_a_gpu_for_each_rank_or_none_that_is_known() -> None:
    check_own_device(["GPU-0", "GPU-1"])
    check_own_device([None, None])
