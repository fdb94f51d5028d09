"""Pipelines whose ranks hold several stages: outputs, checkpoints, lazy models, debug mode, what a step records.

What breaks here first: a module that one stage of a rank sees in the place of another's. Look in
`shardformer/stages/layout.py`; where weights are wrong, in `shardformer/matmul/kernel.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Action, Kind
from plugins.hybrid_parallel.pipeline.timeline import read_timelines
from shardformer import PipelineStageManager, ShardConfig, ShardFormer, record_module_init
from shardformer.layers.parallel_module import defer_weight_grads
from shardformer.matmul.kernel import WeightGradStore, linear, run_deferred
from shardformer.stages.placeholders import StagePlaceholder
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.reference import inputs_of, train_reference
from zoo_tests.harness.train_sharded import Boosted, boost

HEADS = {"bert": "masked_lm", "llama": "causal_lm", "gpt2": "lm_head", "t5": "generation"}
SEVERAL_STAGES = [name for name, schedule in SCHEDULES.items() if schedule.chunks != 1]


def _case(family: str, style: str, layout: str = "pp2", recipe: dict[str, Any] | None = None, **options: Any) -> Case:
    options = {"pp_style": style, "num_microbatches": 4, **options}
    return Case(
        recipe=Recipe(family=family, head=HEADS[family], **(recipe or {})),
        layout=layout,
        options=tuple(options.items()),
    )


# ----- what a rank holds and sees -----


def test_a_rank_with_two_stages_shows_each_its_own_modules() -> None:
    model = Recipe(family="bert", head="masked_lm").model()
    manager = PipelineStageManager(stage=0, num_stages=4, layers_per_stage=(1, 1, 1, 2), further_stages=(3,))
    ShardFormer(ShardConfig(pipeline_stage_manager=manager)).optimize(model)
    layers = model.bert.encoder.layer

    def seen() -> list[str]:
        return [type(layer).__name__ for layer in layers] + [
            type(model.bert.embeddings).__name__,
            type(model.cls).__name__,
        ]

    between = seen()
    with model.stage_views.running(0, None):
        assert seen() == [
            "BertLayer",
            "Boundary",
            *["UnreachablePlaceholder"] * 3,
            "BertEmbeddings",
            "UnreachablePlaceholder",
        ]
    with model.stage_views.running(3, (torch.zeros(1, 1, 1),)):
        assert seen() == [*["Skipped"] * 3, "BertLayer", "BertLayer", "Received", "BertOnlyMLMHead"]
    assert seen() == between
    held = [type(layer).__name__ for layer in layers if not isinstance(layer, StagePlaceholder)]
    assert held == ["BertLayer"] * 3
    assert not isinstance(model.bert.embeddings, StagePlaceholder) and not isinstance(model.cls, StagePlaceholder)


def test_a_pass_that_fails_leaves_the_modules_in_place() -> None:
    model = Recipe(family="bert", head="masked_lm").model()
    manager = PipelineStageManager(stage=0, num_stages=4, layers_per_stage=(1, 1, 1, 2), further_stages=(3,))
    ShardFormer(ShardConfig(pipeline_stage_manager=manager)).optimize(model)
    before = dict(model.named_parameters())
    with pytest.raises(ZeroDivisionError), model.stage_views.running(3, None):
        raise ZeroDivisionError
    assert dict(model.named_parameters()).keys() == before.keys()


def test_too_few_layers_for_the_stages_names_a_size_that_does() -> None:
    message = (
        "pp_size=2 with 3 chunks a rank makes 6 stages, more than the model's 5 layers; use fewer chunks, "
        "or a pp_size of at most 1"
    )
    with pytest.raises(ValueError, match=message):
        PipelineStageManager(0, 6, further_stages=(2, 4)).split(5)


# ----- gradients that are put off -----


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_weights_wait_for_the_second_half(transposed: bool) -> None:
    torch.manual_seed(0)
    shape = (3, 5) if transposed else (5, 3)
    weight, bias = nn.Parameter(torch.randn(shape).double()), nn.Parameter(torch.randn(5).double())
    x = torch.randn(2, 4, 3).double().requires_grad_()
    matrix = weight.t() if transposed else weight
    expected = torch.autograd.grad(torch.nn.functional.linear(x, matrix, bias).square().sum(), [x, bias, weight])
    deferred, store = [], WeightGradStore()
    with store.split_backward():
        out = linear(x, weight.t() if transposed else weight, bias, store=store).square().sum()
    with store.split_backward(deferred):
        out.backward()
    torch.testing.assert_close([x.grad, bias.grad], list(expected[:2]))
    assert weight.grad is None
    run_deferred(deferred)
    torch.testing.assert_close(weight.grad, expected[2])
    assert not deferred


def test_a_weight_that_is_put_together_is_not_put_off() -> None:
    """Its gradient has to go on through what put it together."""
    weight = nn.Parameter(torch.randn(4, 3))
    deferred, store = [], WeightGradStore()
    with store.split_backward():
        out = linear(torch.randn(2, 3), weight[1:3], store=store).sum()
    with store.split_backward(deferred):
        out.backward()
    assert not deferred
    assert weight.grad[1:3].abs().min() > 0 and weight.grad[0].abs().max() == 0


def test_native_layers_put_off_theirs_and_nothing_else_changes() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Conv1D(5, 4), nn.LayerNorm(5), nn.Linear(5, 2, bias=False))
    x = torch.randn(2, 3)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    deferred, store = [], WeightGradStore()
    defer_weight_grads(model, store)
    with store.split_backward():
        out = model(x).sum()
    with store.split_backward(deferred):
        out.backward()
    late = [name for name, param in model.named_parameters() if param.grad is None]
    assert late == ["0.weight", "1.weight", "3.weight"]
    run_deferred(deferred)
    torch.testing.assert_close([param.grad for param in model.parameters()], list(expected))
    torch.testing.assert_close(torch.autograd.grad(model(x).sum(), list(model.parameters())), expected)


# ----- what goes with training -----


@pytest.mark.parametrize("style", SEVERAL_STAGES)
@distributed(2)
def test_outputs_and_evaluation(style: str) -> None:
    """In evaluation mode and out of it, on every rank, also where the last stage lies on the first rank."""
    case = _case("bert", style)
    boosted, plain = boost(case), case.recipe.model()
    boosted.model.eval(), plain.eval()
    for step in range(2):  # of other lengths
        batch = case.recipe.batch(step)
        with torch.no_grad():
            expected = plain(**inputs_of(case.recipe.zoo_head, batch))
        for optimizer in (None, boosted.optimizer):
            result = boosted.booster.execute_pipeline(
                iter([batch]), boosted.model, optimizer=optimizer, return_outputs=True
            )
            torch.testing.assert_close(result.outputs.logits, expected.logits, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(result.loss, expected.loss, rtol=1e-9, atol=1e-12)


def _one_step(case: Case, step: int, directory: Path) -> float:
    boosted = boost(case)
    objects = {"model": boosted.model, "optimizer": boosted.optimizer, "lr_scheduler": boosted.scheduler}
    if step:
        boosted.booster.load_checkpoint(directory / str(step), **objects)
    loss = _trained(boosted, case, step)
    boosted.booster.save_checkpoint(directory / str(step + 1), **objects)
    return loss


def _trained(boosted: Boosted, case: Case, step: int) -> float:
    loss = boosted.pipeline_backward(boosted.share(case.recipe.batch(step))).item()
    boosted.finish_step()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_checkpoint_of_one_schedule_opens_under_the_others(family: str, tmp_path: Path) -> None:
    styles = ["1f1b", *SEVERAL_STAGES, "gpipe"]
    recipe = {"optimizer": "momentum", "steps": len(styles), "max_norm": 0.5}
    losses = [
        run_on_ranks(2, _one_step, _case(family, style, recipe=recipe), step, tmp_path)[0]
        for step, style in enumerate(styles)
    ]
    plain = train_reference(Recipe(family=family, head=HEADS[family], **recipe))
    assert losses == pytest.approx(plain.losses, rel=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["interleaved", "zbv"])
@distributed(2)
def test_a_model_without_values_gets_the_pieces_of_all_its_stages(style: str) -> None:
    recipe = Recipe(family="gpt2", head="lm_head")
    with record_module_init():
        lazy = type(plain := recipe.model())(plain.config)
    case = _case("gpt2", style)
    booster = boost(case).booster
    model, optimizer = booster.boost(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))
    loss = booster.execute_pipeline(iter([recipe.batch(0)]), model, optimizer=optimizer).loss
    assert 0 < loss.item() < 20
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("style", SEVERAL_STAGES)
@distributed(2)
def test_debug_mode_names_the_module_that_went_bad(style: str) -> None:
    case = _case("bert", style, recipe={"precision": "fp32"}, debug=True)
    boosted = boost(case)
    assert torch.isfinite(torch.tensor(_trained(boosted, case, 0)))
    for name, param in boosted.model.unwrap().named_parameters():
        if name == "bert.encoder.layer.4.output.dense.weight":
            param.data[0, 0] = torch.nan
    with pytest.raises(Exception, match=r"bert\.encoder\.layer\.4\.output\.dense"):
        _trained(boosted, case, 1)


# ----- records -----


def _record(case: Case) -> int:
    boosted = boost(case)
    for step in range(2):
        _trained(boosted, case, step)
    return boosted.plugin.stage_index


@pytest.mark.slow
@pytest.mark.parametrize("style", ["1f1b", "zbv"])
def test_a_recorded_step_is_the_schedule(style: str, tmp_path: Path) -> None:
    case = _case("bert", style, "tp2pp2", record_schedule=str(tmp_path / "times"))
    run_on_ranks(4, _record, case)
    steps = read_timelines(tmp_path / "times")
    assert list(steps) == [1, 2]
    schedule = SCHEDULES[style]
    for timeline in steps.values():
        for rank, done in enumerate(timeline.ranks):
            assert [timed.action for timed in done] == schedule.actions(rank, 2, 4, schedule.chunks)
            times = [time for timed in done for time in (timed.begin, timed.end)]
            assert times == sorted(times) and times[0] >= 0
        first = {timed.action: timed for done in timeline.ranks for timed in done}
        forward = [first[Action(Kind.FORWARD, stage, 0)] for stage in range(2 * schedule.chunks)]
        assert all(one.end <= two.end for one, two in zip(forward, forward[1:], strict=False))


@distributed(2)
def test_a_directory_that_one_rank_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"FileExistsError on rank 0: .*/file"):
        boost(_case("bert", "1f1b", record_schedule=str(tmp_path / "file")))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no recording; train with HybridParallelPlugin"),
        (["{"], "is damaged .*; record it again"),
        ([json.dumps({"step": 1, "actions": [["X", 0, 0, 0, 1]]})], "is damaged .*; record it again"),
        ([""], "has no step of all ranks"),
    ],
)
def test_a_recording_that_is_none(lines: list[str], message: str, tmp_path: Path) -> None:
    if lines:
        (tmp_path / "rank0.jsonl").write_text("".join(line + "\n" for line in lines if line))
    with pytest.raises(ConfigurationError, match=message):
        read_timelines(tmp_path)
