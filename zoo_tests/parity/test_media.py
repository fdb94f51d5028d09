"""Images and sounds in some samples alone: a micro-batch or a replica may have none, and another sample two.

What breaks here first: a tower that runs on nothing, and gathers of its parameters for which a replica without images
does not come. Look in `plugins/hybrid_parallel/data/media.py` and `in_pass`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.data.media import is_media, media_tokens
from plugins.hybrid_parallel.data.microbatch import split_batch
from plugins.hybrid_parallel.setup import optimizer as setup_of_optimizers
from plugins.hybrid_parallel.verify.train import VerifyCase, train_reference
from zoo_tests.campaigns.census.classes import head_classes
from zoo_tests.campaigns.census.trained import PlainRun, sharded_verdict
from zoo_tests.campaigns.images import plain_with_inputs
from zoo_tests.harness.ranks import run_on_ranks

_KINDS = {
    "Qwen2_5_VLForConditionalGeneration": "lists of patches",
    "LlavaForConditionalGeneration": "a list of pictures",
    "Idefics3ForConditionalGeneration": "pictures of each sample, blank ones among them",
    "LlavaNextForConditionalGeneration": "a list of tiles",
    "Qwen2AudioForConditionalGeneration": "sounds",
}


def _plain(name: str) -> PlainRun:
    [head] = [head for head in head_classes() if head.name == name]
    return plain_with_inputs(head, in_some=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "dp2", "cp2"])
@pytest.mark.parametrize("name", _KINDS)
def test_media_in_some_samples_alone(name: str, layout: str) -> None:
    [head] = [head for head in head_classes() if head.name == name]
    options = {"num_microbatches": 2, "gradient_checkpointing": "full"} if layout == "cp2" else {}
    if layout == "cp2" and _KINDS[name] == "sounds":  # the ring would cut its masks
        options["sequence_parallelism_mode"] = "all_to_all"
    assert sharded_verdict(head, layout, _plain(name), **options) == "exact"


def _train(case: VerifyCase, expected: dict[str, numpy.ndarray], zero_stage: int, options: dict[str, Any]) -> None:
    """Train by both loops on ranks that send each other parameters, as on two machines, in one order."""
    with mock.patch.object(setup_of_optimizers, "meet_neighbours", return_value=None):
        for is_ordinary in (False, True):
            plugin = HybridParallelPlugin(dp_size=2, zero_stage=zero_stage, zero_bucket_size_in_mb=0.02, **options)
            booster, model = Booster(plugin=plugin), case.tiny_model.build()
            batches = [case.tiny_model.batch(model, step, case.rows) for step in (0, 1, 0)]
            tokens = media_tokens(model)
            model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
            for number, batch in enumerate(batches):
                # The second is of texts alone on all replicas: what a unit is followed by must not be learnt from some.
                share = split_batch(batch, 2, tokens=tokens)[0 if number == 1 else plugin.dp_rank]
                if is_ordinary:
                    # A collator may list no images instead of leaving the entry out.
                    share = {name: value[:0] for name, value in batch.items() if is_media(name)} | share
                    booster.backward(model(**share).loss, optimizer)
                else:
                    booster.execute_pipeline(iter([share]), model, optimizer=optimizer)
                if number != 1:
                    found = optimizer.full_gradients()
                    assert set(found) == set(expected)
                    for name, gradient in found.items():
                        numpy.testing.assert_allclose(
                            gradient.numpy(), expected[name], rtol=1e-5, atol=1e-7
                        )  # norms round to fp32
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize(
    ("zero_stage", "options"),
    [
        (3, {}),
        *(
            pytest.param(stage, options, marks=pytest.mark.slow)
            for stage, options in [
                *((stage, {}) for stage in (0, 1, 2)),
                (3, {"num_microbatches": 2, "gradient_checkpointing": "full"}),
                (3, {"offload_parameters": "cpu", "offload_optimizer": "cpu"}),
                (2, {"num_microbatches": 2}),
            ]
        ),
    ],
)
def test_a_tower_that_one_replica_alone_runs(zero_stage: int, options: dict[str, Any]) -> None:
    plain = _plain("Qwen2_5_VLForConditionalGeneration")
    case = replace(plain.case, tiny_model=replace(plain.case.tiny_model, dtype=torch.float64), steps=1)
    names = {name for name, _ in case.tiny_model.build().named_parameters()}
    gradients = {name: each for name, each in train_reference(case).steps[0].gradients.items() if name in names}
    run_on_ranks(2, _train, case, gradients, zero_stage, options)
