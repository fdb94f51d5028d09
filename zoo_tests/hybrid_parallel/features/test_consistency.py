"""Ranks that have come apart: the first thing that differs is named, on all ranks, and a sound job is left alone.

What breaks here first: something that ranks hold differently on purpose. Look in `plugins/hybrid_parallel/features/`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from booster.errors import ConfigurationError, SynchronyError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer import TPInfo
from zoo_tests.harness.faulty import LAYER, LAYOUTS, SIZES, Job, on, told
from zoo_tests.harness.ranks import run_on_ranks, under_load

# A fault in the job of the last rank -> what the message calls it.
NORM, SHARD = LAYER.format(1) + "output.LayerNorm.weight", LAYER.format(1) + "intermediate.dense.weight"
TIED = "bert.embeddings.word_embeddings.weight"


def _change(name: str) -> Callable[[Job], None]:
    def change(job: Job) -> None:
        job.parameter(name).data.view(-1)[2] += 0.25

    return change


def _other_rate(job: Job) -> None:
    job.optimizer.param_groups[0]["lr"] *= 2


def _other_scale(job: Job) -> None:
    job.optimizer.loss_scale.value = 2.0


def _other_stream(job: Job) -> None:
    job.model.stream.load_state_dict({"cpu": torch.Generator().manual_seed(5).get_state()})


def _other_count(job: Job) -> None:
    piece = job.optimizer.buckets[0].pieces[0].parameter
    job.optimizer.state[piece]["step"] += 1


FAULTS = {
    "copied_weight": (_change(NORM), re.escape(NORM)),
    "cut_weight": (_change(SHARD), re.escape(SHARD)),
    "tied_weight": (_change("cls.predictions.decoder.weight"), "the tied weight .*weight"),
    "learning_rate": (_other_rate, "lr of parameter group 0"),
    "loss_scale": (_other_scale, "the loss scale"),
    "random_stream": (_other_stream, r"the shared random stream \(cpu\)"),
    "step_count": (_other_count, r"the optimizer's step count of [\w.]+"),
}
# layout, zero stage, fault, axis in the message, the two ranks
CASES = [
    ("tp2", 1, "copied_weight", "tensor-parallel ", (0, 1)),
    ("dp2", 1, "copied_weight", "data-parallel ", (0, 1)),
    ("dp2", 0, "cut_weight", "data-parallel ", (0, 1)),
    ("tp2pp2", 1, "copied_weight", "tensor-parallel ", (2, 3)),
    ("pp2", 1, "tied_weight", "tied ", (0, 1)),
    ("tp2pp2", 1, "tied_weight", "tied ", (1, 3)),
    ("tp2", 1, "learning_rate", "", (0, 1)),
    ("tp2pp2", 1, "learning_rate", "", (0, 3)),
    ("pp2", 1, "loss_scale", "", (0, 1)),
    ("tp2", 1, "random_stream", "tensor-parallel ", (0, 1)),
    ("dp2", 0, "step_count", "data-parallel ", (0, 1)),
]


def _out_of_sync(layout: str, zero_stage: int, fault: str) -> str:
    job = Job.start(**LAYOUTS[layout], zero_stage=zero_stage)
    job.train(range(2))
    job.booster.check_synchrony(job.model, job.optimizer)
    job.train(range(2, 3))
    if dist.get_rank() == dist.get_world_size() - 1:
        FAULTS[fault][0](job)
    return told(SynchronyError, job.booster.check_synchrony, job.model)


@pytest.mark.parametrize(
    ("layout", "zero_stage", "fault", "axis", "ranks"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES]
)
def test_the_first_difference_is_named(
    layout: str, zero_stage: int, fault: str, axis: str, ranks: tuple[int, int]
) -> None:
    messages = on(layout, _out_of_sync, zero_stage, fault)
    assert len(set(messages)) == 1, "all ranks say the same"
    what, seen = FAULTS[fault][1], "seen first after step 3, not yet after step 2"
    assert re.match(f"{what} differs between {axis}ranks {ranks[0]} and {ranks[1]}[ ;]", messages[0]), messages[0]
    assert seen in messages[0]
    assert ("(largest difference 0.25)" in messages[0]) == ("weight" in fault)


def _sound(layout: str, options: dict[str, Any]) -> None:
    debugged, plain = Job.start(**LAYOUTS[layout], debug=True, **options), Job.start(**LAYOUTS[layout], **options)
    with mock.patch("plugins.hybrid_parallel.features.nonfinite._logger.warning") as warning:
        for job in (debugged, plain):
            job.train(range(3))
    warning.assert_not_called()  # placeholders of other stages return nan
    expected = dict(plain.model.unwrap().named_parameters())
    for name, param in debugged.model.unwrap().named_parameters():
        # Gradients are added in another order where modules have views of their inputs: rounding differs.
        torch.testing.assert_close(param, expected[name], rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_debug_mode_leaves_a_sound_job_alone(layout: str) -> None:
    on(layout, _sound, {"gradient_checkpointing": "full"} if layout == "tp2" else {})


def _moves_its_state(directory: Path) -> None:
    job = Job.start(tp_size=4, debug=True)
    job.train(range(1))
    job.booster.save_model(job.model, directory)
    job.train(range(1, 2))
    job.plugin = HybridParallelPlugin(tp_size=2, debug=True)
    moved = job.booster.relayout(job.plugin, job.model, job.optimizer, job.scheduler)
    job.model, job.optimizer, job.scheduler = moved
    job.train(range(2, 3))


def test_messages_of_some_ranks_are_no_collectives(tmp_path: Path) -> None:
    """A rank that gathers a model, or has more to move than another, is not out of step afterwards."""
    run_on_ranks(4, _moves_its_state, tmp_path)


def _drifts_after_step_1(layout: str) -> str:
    job = Job.start(**LAYOUTS[layout], debug=True)
    job.train(range(1))
    if dist.get_rank() == dist.get_world_size() - 1:
        _change(NORM)(job)
    return told(SynchronyError, job.train, range(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_debug_mode_compares_before_a_pass_spreads_it(layout: str) -> None:
    axis = "tensor" if layout == "tp2" else "data"
    for message in on(layout, _drifts_after_step_1):
        assert f"{NORM} differs between {axis}-parallel ranks 0 and 1 (largest difference 0.25)" in message
        assert "seen first after step 1, since the comparison at the end of that step" in message


def _drifts_within_a_step() -> str:
    """One rank's optimizer sees a gradient that the other does not."""
    job = Job.start(tp_size=2, debug=True)
    job.train(range(2))
    job.backward(2)
    if dist.get_rank() == 1:
        param = job.parameter(NORM)
        bucket = next(each for each in job.optimizer.buckets if any(own is param for own in each.params))
        bucket.shard_grads.neg_()
    return told(SynchronyError, job.optimizer.step)


def test_debug_mode_compares_after_every_step() -> None:
    for message in run_on_ranks(2, _drifts_within_a_step):
        assert "differs between tensor-parallel ranks 0 and 1 (largest difference" in message
        assert "seen first after step 3, not yet after step 2" in message


# ----- collectives and options -----


def _out_of_step(fault: str) -> str:
    job = Job.start(tp_size=2, debug=True)
    job.train(range(1))
    module = job.module(LAYER.format(0) + "intermediate.dense")
    native = module.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if fault == "operation":
            dist.broadcast(torch.zeros(3), 0, group=job.plugin.grid.group("tp"))
        return native(hidden)[:, :-1] if fault == "shape" else native(hidden.bfloat16().float())

    if dist.get_rank() == 1:
        module.forward = forward
    start = time.monotonic()
    message = told(SynchronyError, job.backward, 1)
    assert time.monotonic() - start < under_load(10)
    return message


@pytest.mark.parametrize("fault", ["shape", "operation"])
def test_debug_mode_names_collectives_that_differ(fault: str) -> None:
    calls = {
        "shape": ("ALLREDUCE of Float [4, 7, 16]", "ALLREDUCE of Float [4, 6, 16]"),
        "operation": ("ALLREDUCE of Float [4, 7, 16]", "BROADCAST of Float [3]"),
    }[fault]
    for rank, message in enumerate(run_on_ranks(2, _out_of_step, fault)):
        assert message.startswith("ranks [0, 1] are out of step: rank 0 calls ")
        assert f"rank {rank} calls {calls[rank]}" in message
        if fault == "shape":
            assert f"rank {1 - rank} calls {calls[1 - rank]}" in message


def _other_options() -> str:
    return told(ConfigurationError, Job.start, tp_size=2, max_norm=1.0 + dist.get_rank())


def test_options_that_differ_between_ranks_are_refused() -> None:
    for message in run_on_ranks(2, _other_options):
        assert message == "max_norm differs between ranks 0 and 1 (1.0 and 2.0); use max_norm=1.0 on all ranks"


def _other_objects(name: str) -> str:
    first = dist.get_rank() == 0
    value: Any = {
        "device_mapping": {"stage_0": {"shard_0": int(not first), "shard_1": int(first)}},
        "tp_info": TPInfo().shard_col("a" if first else "b"),
    }[name]
    return told(ConfigurationError, Job.start, tp_size=2, **{name: value})


@pytest.mark.parametrize("name", ["device_mapping", "tp_info"])
def test_what_is_in_an_option_is_compared_too(name: str) -> None:
    """Ranks that were given other mappings would make other groups, and hang."""
    for message in run_on_ranks(2, _other_objects, name):
        assert message.startswith(f"{name} differs between ranks 0 and 1 (")


# ----- batches -----


def _run(job: Job, batch: dict[str, Any]) -> str:
    return told(ConfigurationError, job.booster.execute_pipeline, iter([batch]), job.model, optimizer=job.optimizer)


def _other_batch(layout: str, fault: str) -> str:
    job = Job.start(**LAYOUTS[layout])
    tokens = torch.arange(1, 29).view(4, 7)
    if dist.get_rank() == dist.get_world_size() - 1:
        tokens = {"values": tokens.flip(0), "length": tokens[:, :5]}.get(fault, tokens)
    batch = {"input_ids": tokens, "labels": tokens}
    if fault == "names" and dist.get_rank() == dist.get_world_size() - 1:
        del batch["labels"]
    return _run(job, batch)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2pp2"])
def test_another_batch_on_one_rank_of_a_replica(layout: str) -> None:
    last = SIZES[layout] - 1
    differs = rf"'input_ids' of the batch differs between rank 0 .* and rank {last} \(.*\("
    told = {
        "values": rf"{differs}other values of int64 \[4, 7\]",
        "length": rf"{differs}int64 \[4, 7\] and int64 \[4, 5\]",
        "names": rf"the batch has 'labels' on rank 0 .* but not on rank {last} ",
    }
    for fault, expected in told.items():
        messages = on(layout, _other_batch, fault)
        assert len(set(messages)) == 1
        assert re.match(expected, messages[0]), messages[0]


def test_replicas_need_batches_of_the_same_names_only() -> None:
    for message in on("dp2", _other_batch, "names"):
        assert re.match(r"the batch has 'labels' on rank 0 \(replica 0\) but not on rank 1", message), message


def _later_batch(debug: bool) -> str | None:
    """In the third step, which is checked in debug mode alone."""
    job = Job.start(tp_size=2, debug=debug)
    job.train(range(2))
    tokens = torch.arange(1, 29).view(4, 7)
    tokens = tokens.flip(0) if dist.get_rank() == 1 else tokens
    batch = {"input_ids": tokens, "labels": tokens}
    if debug:
        return _run(job, batch)
    job.booster.execute_pipeline(iter([batch]), job.model, optimizer=job.optimizer)
    return None


@pytest.mark.slow
def test_later_batches_are_compared_in_debug_mode_alone() -> None:
    assert run_on_ranks(2, _later_batch, False) == [None, None]
    assert all("'input_ids' of the batch differs" in message for message in run_on_ranks(2, _later_batch, True))


def _ordinary_loop() -> str:
    job = Job.start(tp_size=2)
    tokens = torch.arange(1, 29).view(4, 7) + dist.get_rank()
    return told(ConfigurationError, job.model, input_ids=tokens, labels=tokens)


def test_ordinary_loops_are_checked_over_tensor_parallel_ranks() -> None:
    for message in run_on_ranks(2, _ordinary_loop):
        assert message.startswith("'input_ids' of the batch differs between rank 0 (tp rank 0) and rank 1 (tp rank 1)")
