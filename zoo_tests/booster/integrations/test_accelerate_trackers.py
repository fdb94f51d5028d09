"""The meter's figures reach TensorBoard, W&B and MLflow through `accelerator.log`, from one rank.

What breaks here first: a tracker that is started on each rank. Look in `Accelerator.init_trackers` of accelerate.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.tracking import GeneralTracker
from torch.optim import SGD

from booster.integrations.accelerate import Accelerator
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.booster.integrations.accelerate_loop import LAYOUTS, bert, fresh_accelerate, loader
from zoo_tests.harness.ranks import run_on_ranks, under_load

_ROWS, _PER_STEP, _PEAK = 10, 4, 1e9


class Memory(GeneralTracker):
    """A tracker of the user's own."""

    name, requires_logging_directory = "memory", False

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> list[Any]:
        return self.values

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.values.append((None, values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.values.append((step, values))


class _Clock:
    """A clock that a test sets."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def _train(accelerator: Accelerator, clock: _Clock) -> list[dict[str, float]]:
    """Train with a meter; each step takes two seconds on rank 0, by which all figures are made here."""
    model = bert()
    optimizer = SGD(model.parameters(), lr=0.1)
    batches = loader(_ROWS, _PER_STEP // accelerator.num_processes)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    meter = accelerator.booster.meter(model, total_steps=6, every=1, peak_flops=_PEAK, bar=False)
    logged = []
    for step, batch in enumerate(batches):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        clock.now += 2.0
        meter.step(loss.detach(), batch, lr=0.1)
        accelerator.log(meter.figures(), step=step)
        logged.append(meter.figures())
    return logged


def _measured(layout: str) -> tuple[list[dict[str, float]], int]:
    memory, clock = Memory(), _Clock()
    resident = 100.0 + 50.0 * (dist.get_rank() == dist.get_world_size() - 1)
    with (
        fresh_accelerate(),
        mock.patch("booster.meter.time", clock),
        mock.patch("booster.meter._memory_of_this_rank", lambda: resident * 2**20),
    ):
        plugin = HybridParallelPlugin(**LAYOUTS[layout][1])
        accelerator = Accelerator(plugin=plugin, log_with=memory)
        accelerator.init_trackers("run", config={"layout": layout})
        logged = _train(accelerator, clock)
        if accelerator.is_main_process:
            assert accelerator.get_tracker("memory", unwrap=True) is memory.values
            assert memory.values == [(None, {"layout": layout}), *enumerate(logged)]
        return logged, len(memory.values)


@pytest.mark.parametrize("layout", ["dp2", "tp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_figures_do_not_depend_on_the_layout(layout: str) -> None:
    """By hand: tokens and samples of a step over two seconds, each counted once for a replica."""
    found = run_on_ranks(2, _measured, layout)
    assert [times for _, times in found] == [4, 0], "one rank logs"
    logged = found[0][0]
    assert logged == found[1][0], "all ranks have the figures"
    words = [int(batch["attention_mask"].sum()) for batch in loader(_ROWS, _PER_STEP)]
    assert [each["tokens_per_second"] for each in logged] == [count / 2.0 for count in words]
    assert [each["samples_per_second"] for each in logged] == [2.0, 2.0, 1.0]
    assert [each["eta_s"] for each in logged] == [10.0, 8.0, 6.0]
    assert {each["memory_mib"] for each in logged} == {150.0} and {each["learning_rate"] for each in logged} == {0.1}
    # Of a batch as wide as the longest sentence of a replica; a backward pass costs twice the forward pass.
    assert all(0 < each["mfu"] < 1 for each in logged)


def _mfu(layout: str) -> float:
    """With sentences of one length the work is the same in each layout, and spread over the ranks."""
    clock = _Clock()
    with fresh_accelerate(), mock.patch("booster.meter.time", clock):
        plugin = HybridParallelPlugin(**LAYOUTS[layout][1])
        accelerator = Accelerator(plugin=plugin)
        model = accelerator.prepare(bert())
        meter = accelerator.booster.meter(model, every=1, peak_flops=_PEAK, bar=False)
        rows = _PER_STEP // plugin.dp_size
        clock.now = 2.0
        meter.step(0.0, {"input_ids": torch.ones(rows, 8, dtype=torch.long)})
        return meter.figures()["mfu"] * dist.get_world_size()


def test_utilization_is_the_count_of_the_planner() -> None:
    found = {layout: run_on_ranks(LAYOUTS[layout][0], _mfu, layout)[0] for layout in ("dp2", "tp2", "pp2")}
    hidden, inner, length = 16, 20, 8
    a_layer = 4 * 2 * hidden * hidden + 2 * 2 * hidden * inner + 4 * length * hidden
    by_hand = 3 * _PER_STEP * length * 2 * a_layer / 2.0 / _PEAK
    assert found["tp2"] == pytest.approx(found["dp2"]) == pytest.approx(found["pp2"])
    assert found["dp2"] == pytest.approx(by_hand, rel=0.05)


def _track(folder: str) -> None:
    variables = {"WANDB_MODE": "offline", "WANDB_DIR": folder, "WANDB_SILENT": "true"}
    variables |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": f"file:{folder}/mlruns"}
    # The ranks of the pool go on.
    with fresh_accelerate(), mock.patch("torch.distributed.destroy_process_group") as leave:
        os.environ.update(variables)
        trackers = ["tensorboard", "wandb", "mlflow"]
        plugin = HybridParallelPlugin(tp_size=2)
        accelerator = Accelerator(plugin=plugin, log_with=trackers, project_dir=folder)
        accelerator.init_trackers("run", config={"seed": 3})
        meter = accelerator.booster.meter(accelerator.prepare(bert()), every=1, bar=False)
        meter.step(0.5, {"input_ids": torch.ones(2, 8, dtype=torch.long)}, lr=0.25)
        accelerator.log(meter.figures(), step=1)
        accelerator.end_training()
    leave.assert_called_once()


def _written_by_its_service(file: Path, part: bytes) -> bytes:
    """What W&B's process has written once it has come to this part; it goes on after the end of the run."""
    until = time.monotonic() + under_load(60)
    while part not in (written := file.read_bytes()):
        assert time.monotonic() < until, written
        time.sleep(0.1)
    return written


@pytest.mark.slow
def test_figures_are_written_once_to_each_tracker(tmp_path: Path) -> None:
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "out").mkdir()
    run_on_ranks(2, _track, str(tmp_path / "out"))
    events = EventAccumulator(str(tmp_path / "out" / "run")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5)]
    assert {"learning_rate", "tokens_per_second", "samples_per_second", "memory_mib"} <= set(events.Tags()["scalars"])
    assert len(list((tmp_path / "out" / "run").glob("events.*"))) == 1
    [folder] = (tmp_path / "out" / "wandb").glob("offline-run-*")
    written = _written_by_its_service(next(folder.glob("run-*.wandb")), b"tokens_per_second")
    assert json.dumps(0.25).encode() in written
    with mock.patch.dict(os.environ, {"MLFLOW_ALLOW_FILE_STORE": "true"}):
        client = MlflowClient(f"file:{tmp_path}/out/mlruns")
        [run] = client.search_runs([client.get_experiment_by_name("run").experiment_id])
        assert (run.data.metrics["loss"], run.data.params["seed"]) == (0.5, "3")
        assert [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")] == [
            (1, 0.5)
        ]
