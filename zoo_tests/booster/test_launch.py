"""What `launch` reads and refuses, and what a failure says; no processes here (see `test_run.py` for those)."""

from __future__ import annotations

import re

import pytest
import torch

from booster import failure
from booster.errors import ConfigurationError
from booster.launch import RankInfo, _choose_gpu, place_from_environment

WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_torchruns_environment() -> None:
    assert place_from_environment(WHOLE) == RankInfo(rank=1, world_size=4, local_rank=1)


def test_no_environment_is_one_process() -> None:
    assert place_from_environment({"MASTER_ADDR": "somewhere"}) == RankInfo(rank=0, world_size=1, local_rank=0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"WORLD_SIZE": None}, "RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set but not WORLD_SIZE; set all, or"),
        ({"RANK": "one"}, "RANK='one' is not a whole number; start the script with"),
        ({"RANK": "4"}, "rank=4 is not one of the world_size=4 ranks; use 0 to 3"),
        ({"RANK": "-1"}, "rank=-1 is not one of the world_size=4 ranks; use 0 to 3"),
        ({"WORLD_SIZE": "0"}, "world_size=0 is below 1; use the number of ranks of the job"),
    ],
)
def test_an_environment_that_makes_no_sense(changes: dict[str, str | None], sentence: str) -> None:
    environment = {name: value for name, value in (WHOLE | changes).items() if value is not None}
    with pytest.raises(ConfigurationError) as refused:
        place_from_environment(environment)
    assert str(refused.value).startswith(sentence)


def test_a_failure_is_one_line() -> None:
    failed = failure.Failure.of(KeyError("layers.0\nweight"), "booster.save_model", rank=3)
    assert failed.line() == r"error on rank 3 in booster.save_model: KeyError: 'layers.0\nweight'"
    line = failure.Failure.of(ConfigurationError("tp_size=3; use 2"), "x", 1).line()
    assert re.fullmatch(r"error: tp_size=3; use 2 \(\S+test_launch.py, line \d+\)", line), "of the user's code"
    assert failure.Failure.of(KeyboardInterrupt(), "x", 1).line() == "interrupted"


def test_guard_passes_errors_on_and_does_nothing_else_without_a_launch() -> None:
    @failure.guard("work")
    def work(value: int) -> float:
        return 1 / value

    assert work(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        work(0)
    with pytest.raises(KeyboardInterrupt), failure.guard("work"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("local_rank", "num_gpus", "visible", "chosen"),
    [(2, 4, None, 2), (2, 4, "0,1,2,3", 2), (2, 1, "2", 0), (0, 1, None, 0)],
)
def test_the_gpu_of_a_rank(
    local_rank: int, num_gpus: int, visible: str | None, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that sees a single GPU, as Slurm and Ray start them, uses it, whatever its local rank is."""
    found: list[int] = []
    set_visible(monkeypatch, num_gpus, visible)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    _choose_gpu(local_rank)
    assert found == [chosen]


@pytest.mark.parametrize(
    ("local_rank", "num_gpus", "visible", "sentence"),
    [
        (2, 1, None, "local_rank=2 has no GPU: this machine has 1 and each rank needs its own; use --nproc-per-node 1"),
        (2, 2, "0,1", "local_rank=2 has no GPU: this machine has 2"),
        (0, 0, "", "backend='nccl' needs a GPU for each rank, and torch finds none; use backend='gloo'"),
    ],
)
def test_a_rank_without_a_gpu(
    local_rank: int, num_gpus: int, visible: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_visible(monkeypatch, num_gpus, visible)
    with pytest.raises(ConfigurationError) as refused:
        _choose_gpu(local_rank)
    assert str(refused.value).startswith(sentence)


def set_visible(monkeypatch: pytest.MonkeyPatch, num_gpus: int, visible: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
