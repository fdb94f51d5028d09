"""Jobs whose default process group the user has created, as `init_process_group("nccl")` or accelerate does.

What breaks here first: a collective of the library on CPU tensors that uses the default group.
"""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.toy import global_batch, mean_square, share_of, toy

_TIMEOUT = timedelta(seconds=30)
_ROOT = Path(__file__).parents[3]
_COLLECTIVES = tuple(
    f"dist.{name}"
    for name in (
        *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single", "barrier", "broadcast", "gather"),
        *("irecv", "isend", "recv", "reduce_scatter_tensor", "scatter", "send", "P2POp"),
    )
)


def _replace_default_group(backend: str, store: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        backend, store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size, timeout=_TIMEOUT
    )


def _train_without_cpu_backend(folder: Path) -> list[float]:
    """Train in a job whose default group takes GPU tensors only, and save."""
    _replace_default_group("cuda:gloo", folder / "first")  # stands for "nccl"
    try:
        return _train(folder)
    finally:
        _replace_default_group("gloo", folder / "second")


def _train(folder: Path) -> list[float]:
    rank = dist.get_rank()
    booster = Booster(plugin=HybridParallelPlugin(max_norm=1.0, debug=True))
    model = toy()
    with torch.no_grad():
        for param in model.parameters():
            param += rank  # all ranks are to take the weights of rank 0
    model, optimizer, scheduler, _ = booster.boost(model, *_adamw(model), mean_square)
    losses = []
    for step in range(2):
        batch = iter([share_of(global_batch(step))])
        losses.append(float(booster.execute_pipeline(batch, model, optimizer=optimizer).loss))
        optimizer.step()
        optimizer.zero_grad()
    booster.save_checkpoint(str(folder / "checkpoint"), model=model, optimizer=optimizer, lr_scheduler=scheduler)
    booster.load_checkpoint(str(folder / "checkpoint"), model=model, optimizer=optimizer, lr_scheduler=scheduler)
    booster.save_lr_scheduler(scheduler, str(folder / "scheduler.json"))
    return losses


def _adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_a_default_group_for_gpu_tensors_only(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, _train_without_cpu_backend, tmp_path)
    plain = toy()
    optimizer, _ = _adamw(plain)
    expected = []
    for step in range(2):
        loss = mean_square(plain(global_batch(step)["x"]), global_batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        expected.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(first, expected, rtol=1e-10, atol=0)
    assert first == second


@pytest.mark.slow
def test_every_collective_of_the_library_names_its_group() -> None:
    """Without an argument torch takes the default group, which may refuse CPU tensors; `world_group()` never does."""
    found = []
    for folder in ("booster", "plugins", "shardformer"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                called = ast.unparse(node.func)
                names_group = any(keyword.arg == "group" for keyword in node.keywords)
                if called == "dist.barrier":
                    names_group |= bool(node.args)
                if called in _COLLECTIVES and not names_group:
                    found.append(f"{path.relative_to(_ROOT)}:{node.lineno}: {called}")
    assert not found
