"""Faults of the CUDA path that a reading of the code found: hangs of pipelines, tensors on the wrong device, waits.

Each test failed before its fault was mended. An `xfail` is strict: what is mended loses its mark.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from plugins.hybrid_parallel.data.checks import FIRST_STEPS
from plugins.hybrid_parallel.planner import calibrate
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.world import join_world
from zoo_tests.simcuda import nccl, rules
from zoo_tests.simcuda.test_training import LAYOUTS, Training, build, reference, train

HANGS_AFTER_S = 5.0
WARM = tuple(rules.DEFAULT - {"lazy_communicators"})  # every communicator exists before the first step
PIPELINES: dict[str, tuple[int, int, dict[str, Any]]] = {  # name -> (ranks, rows, options)
    "1f1b": (2, 8, {"pp_size": 2, "num_microbatches": 4}),
    "1f1b-few": (2, 8, {"pp_size": 2, "num_microbatches": 2}),
    "1f1b-unequal": (3, 7, {"pp_size": 3, "num_microbatches": 2}),
    "gpipe": (2, 8, {"pp_size": 2, "num_microbatches": 4, "pp_style": "gpipe"}),
    "gpipe-unequal": (2, 7, {"pp_size": 2, "num_microbatches": 3, "pp_style": "gpipe"}),
    "interleaved": (2, 8, {"pp_size": 2, "num_microbatches": 4, "pp_style": "interleaved"}),
    "interleaved-one": (2, 8, {"pp_size": 2, "num_microbatches": 1, "pp_style": "interleaved"}),
    "zero_bubble": (2, 8, {"pp_size": 2, "num_microbatches": 4, "pp_style": "zero_bubble"}),
    "zbv": (2, 8, {"pp_size": 2, "num_microbatches": 4, "pp_style": "zbv"}),
    "dualpipev": (2, 8, {"pp_size": 2, "num_microbatches": 4, "pp_style": "dualpipev"}),
}


# Every other one is sampled.
PARAMETERS = [pytest.param(name, marks=pytest.mark.slow if number % 2 else ()) for number, name in enumerate(PIPELINES)]


def check_pipeline(name: str, active: tuple[str, ...]) -> None:
    world_size, rows, options = PIPELINES[name]
    arguments = "llama", {"rows": rows, **options}, active, HANGS_AFTER_S
    for kind, losses in run_on_ranks(world_size, train, *arguments, device="simcuda"):
        assert kind == "cuda"
        assert losses == pytest.approx(reference("llama", rows), rel=1e-5)


@pytest.mark.parametrize("name", PARAMETERS)
def test_pipeline_makes_communicators_when_they_are_needed(name: str) -> None:
    check_pipeline(name, tuple(rules.DEFAULT))


@pytest.mark.parametrize("name", PARAMETERS)
def test_pipeline_loads_kernels(name: str) -> None:
    check_pipeline(name, (*rules.DEFAULT, "module_loading"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_pipeline_waits_for_the_device_in_any_action(name: str) -> None:
    check_pipeline(name, (*WARM, "random_drains"))


# ----- collectives on the wrong device -----


def test_stage_without_trained_parameters() -> None:
    options = {
        "pp_size": 2,
        "num_microbatches": 2,
        "frozen": ("model.embed_tokens", "model.layers.0", "model.layers.1"),
    }
    results = run_on_ranks(2, train, "llama", options, WARM, HANGS_AFTER_S, device="simcuda")
    (_, (first, *_)), _ = results
    assert first == pytest.approx(reference("llama")[0], rel=1e-5)


def in_world(backend: str, function: Callable, *args: Any) -> Any:
    """Call a function in a world of another backend; the pool's own world is put back."""
    place = c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    join_world(backend, *place)
    try:
        return function(*args)
    finally:
        join_world(nccl.BACKEND, *place)


@pytest.mark.parametrize("layout", ["tp2", "dp2", "pp2"])
def test_process_group_of_nccl_alone(layout: str) -> None:
    _, options = LAYOUTS[layout]
    for _, losses in run_on_ranks(2, in_world, "nccl", train, "llama", options, WARM, device="simcuda"):
        assert losses == pytest.approx(reference("llama"), rel=1e-5)


# ----- checkpoints and the planner -----


def resume_fused(directory: str) -> tuple[float, float]:
    """The loss after two more steps, without and with a checkpoint between them."""
    first = Training("llama")
    first.step(0)
    assert first.optimizer.param_groups[0]["fused"]  # the user has chosen no kernel
    first.booster.save_checkpoint(directory, model=first.model, optimizer=first.optimizer)
    second = Training("llama")
    second.booster.load_checkpoint(directory, model=second.model, optimizer=second.optimizer)
    return tuple([training.step(number) for number in (1, 2)][-1] for training in (first, second))


def test_fused_optimizer_resumes(tmp_path: Path) -> None:
    ((went_on, resumed),) = run_on_ranks(1, resume_fused, str(tmp_path / "checkpoint"), device="simcuda")
    assert went_on == pytest.approx(resumed, rel=1e-6)


def communicators_of_a_save(directory: str, options: dict[str, Any]) -> set[tuple[str, str]]:
    training = Training("llama", **options)
    training.step(0)
    before = nccl.communicators()
    training.booster.save_model(training.model, directory)
    return nccl.communicators() - before


def test_save_makes_no_communicators(tmp_path: Path) -> None:
    for made in run_on_ranks(2, communicators_of_a_save, str(tmp_path), {"tp_size": 2}, device="simcuda"):
        assert not made


def calibrate_here() -> str:
    native, calibrate._kernels = calibrate._kernels, lambda device, precision: (1e12, 1e6, 1e11)  # sized for a GPU
    cases = [calibrate.Case(tp_size=1, sequence=False, rows=2)]
    try:
        return in_world(nccl.BACKEND, calibrate._measure, lambda: build("llama"), 8, "fp32", cases)[0].name
    finally:
        calibrate._kernels = native


def test_calibration_of_this_machine() -> None:
    assert run_on_ranks(1, calibrate_here, device="simcuda") == ["this-machine"]


# ----- waits of the host -----


def waits_in_a_step(family: str, options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The waits of the host in `execute_pipeline`, and in `optimizer.step`."""
    training = Training(family, **options)
    for early in range(FIRST_STEPS):  # whose batches are compared over ranks
        training.step(early)
    share = training.share(FIRST_STEPS)
    with rules.only(*WARM):
        with rules.host_syncs() as in_the_loop:
            training.booster.execute_pipeline(iter([share]), training.model, optimizer=training.optimizer)
        with rules.host_syncs() as in_the_update:
            training.optimizer.step()
    return in_the_loop, in_the_update


BUDGETED = {
    **{name: ("llama", *LAYOUTS[name]) for name in LAYOUTS},
    "bert-tp2": ("bert", *LAYOUTS["tp2"]),
    "fp16": ("llama", 2, {"dp_size": 2, "precision": "fp16"}),
    "ragged": ("llama", 2, {"pp_size": 2, "num_microbatches": 3, "pp_style": "zero_bubble"}),
}


@pytest.mark.parametrize("layout", BUDGETED)
def test_waits_of_the_host_in_a_step(layout: str) -> None:
    """One for the norm, and none for micro-batches; transformers itself reads each attention mask once."""
    family, world_size, options = BUDGETED[layout]
    for in_the_loop, in_the_update in run_on_ranks(world_size, waits_in_a_step, family, options, device="simcuda"):
        own = [each for each in in_the_loop if "transformers/masking_utils.py" not in each]
        assert not own, "\n".join(in_the_loop)
        assert len(in_the_update) <= 1, "\n".join(in_the_update)


def waits_of_experts(options: dict[str, Any]) -> list[str]:
    training = Training("mixtral", **options)
    training.step(0)
    with rules.only(*WARM), rules.host_syncs() as found:
        training.step(1)
    return found


def test_experts_are_counted_without_a_wait() -> None:
    for found in run_on_ranks(2, waits_of_experts, {"dp_size": 2, "ep_size": 2}, device="simcuda"):
        assert not [each for each in found if "bincount" in each], "\n".join(found)
