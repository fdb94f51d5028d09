"""ZeRO stages and `zero_size`: the same numbers as plain training, whatever ranks keep of gradients and states.

What breaks here first: a pass whose shard is lost or counted twice
(`plugins/hybrid_parallel/zero/reducer.py`), and copies of a shard that differ.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster.errors import ConfigurationError
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.reference import loss_of
from zoo_tests.harness.train_sharded import Boosted, boost, train_sharded
from zoo_tests.hybrid_parallel.checkpoint.test_resharding import reassembled

_HEADS = {"bert": "masked_lm", "llama": "causal_lm", "gpt2": "lm_head", "t5": "generation"}
_CLIP = 0.05


def _case(family: str, layout: str, stage: int = 3, loop: bool = False, **recipe: Any) -> Case:
    options = recipe.pop("options", {})
    head = recipe.pop("head", _HEADS.get(family, "causal_lm"))
    return Case(
        recipe=Recipe(family=family, head=head, **recipe),
        layout=layout,
        zero_stage=stage,
        ordinary_loop=loop,
        options=tuple(options.items()),
    )


def _cases() -> list:
    fast = [
        # 7 rows on 2 replicas: one has fewer samples, and micro-batches of one sample.
        _case("llama", "dp2", 2, rows=7, max_norm=_CLIP, optimizer="adamw", options={"num_microbatches": 3}),
        _case("llama", "dp2", rows=7, max_norm=_CLIP, optimizer="adamw", options={"num_microbatches": 3}),
        _case("gpt2", "pp2dp2", optimizer="momentum", max_norm=_CLIP),
        _case("bert", "dp4", 1, optimizer="adamw", max_norm=_CLIP, options={"zero_size": 2}),
    ]
    two = {"num_microbatches": 2}
    slow = [
        _case("bert", "dp4", 2, optimizer="adamw", rows=11, options={"zero_size": 2, **two}, max_norm=_CLIP),
        _case("bert", "dp4", optimizer="adamw", rows=11, options={"zero_size": 2, **two}, max_norm=_CLIP),
        _case("bert", "dp4", 1, optimizer="momentum", options={"zero_size": 1}, max_norm=_CLIP),
        _case("t5", "tp2dp2", loop=True, optimizer="adamw", max_norm=_CLIP),
        _case("llama", "pp2dp2", loop=True, optimizer="momentum", config=(("tie_word_embeddings", True),)),
        _case("bert", "pp2dp2", 2, precision="fp16", optimizer="momentum", max_norm=_CLIP),
        _case("bert", "tp2dp2", precision="bf16", optimizer="momentum", max_norm=_CLIP),
        _case("llama", "cp2dp2", optimizer="adamw", options={"zero_size": 2}, max_norm=_CLIP),
        _case("bert", "dp2", frozen=("bert.embeddings", "bert.encoder.layer.1"), options=two),
        _case("llama", "dp2", adapters=("q_proj", "v_proj"), optimizer="adamw", options=two),
        _case("llama", "pp2dp2", optimizer="adamw", options={"gradient_checkpointing": "full"}),
        _case("mixtral", "tp2dp2", precision="fp32", optimizer="momentum", options={"ep_size": 2}, max_norm=_CLIP),
        _case("qwen3_moe", "dp4", precision="fp32", optimizer="momentum", options={"ep_size": 2, **two}),
        _case("gpt2", "pp2dp2", 2, optimizer="adamw", options={"pp_style": "interleaved", "num_microbatches": 4}),
    ]
    # Each has another order of passes, and two stages on a rank or split backward passes.
    for style in ("gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev"):
        options = {"pp_style": style, "num_microbatches": 4}
        slow.append(_case("gpt2", "pp2dp2", rows=10, optimizer="adamw", options=options, max_norm=_CLIP))
    return [
        *(pytest.param(case, id=str(case)) for case in fast),
        *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in slow),
    ]


@pytest.mark.parametrize("case", _cases())
def test_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


# ----- what ranks keep -----


def _kept_of_gradients(case: Case) -> list[tuple[int, int]]:
    """After each micro-batch: elements of gradients that this rank keeps, and those of its shards."""
    boosted, kept = boost(case), []
    reducer = boosted.optimizer.reducer
    end_pass = reducer.end_pass

    def look(parameters: Any = None) -> None:
        end_pass(parameters)
        buckets = boosted.optimizer.buckets
        held = [each for bucket in buckets for each in (bucket.flat_grads, bucket.shard_grads, bucket._sum_of_passes)]
        kept.append(
            (sum(each.numel() for each in held if each is not None), sum(bucket.shard_size for bucket in buckets))
        )

    reducer.end_pass = look
    boosted.pipeline_backward(boosted.share(case.recipe.batch(0)))
    return kept


def test_no_whole_gradient_outlives_a_micro_batch() -> None:
    case = _case("llama", "dp2", 2, options={"num_microbatches": 3})
    for kept in run_on_ranks(2, _kept_of_gradients, case):
        assert len(kept) == 3
        assert all(elements == shards for elements, shards in kept)


def _shards(case: Case) -> tuple[int, int]:
    """Elements of this rank's states of AdamW, and of the whole model."""
    boosted = boost(case)
    boosted.pipeline_backward(boosted.share(case.recipe.batch(0)))
    boosted.finish_step()
    states = [state["exp_avg"].numel() for state in boosted.optimizer.state.values()]
    return sum(states), sum(param.numel() for param in boosted.model.parameters())


@pytest.mark.slow
def test_zero_size_replicas_share_the_states() -> None:
    for size, of_one in ((1, 1.0), (2, 0.5), (None, 0.25)):
        options = {} if size is None else {"zero_size": size}
        found = run_on_ranks(4, _shards, _case("bert", "dp4", optimizer="adamw", options=options))
        assert sum(own for own, _ in found) == round(4 * of_one * found[0][1])
        assert all(own <= 1.05 * of_one * whole for own, whole in found)


# ----- stage 3: parameters -----

_DEEP = (("num_hidden_layers", 8),)


def _bytes_held(model: nn.Module) -> int:
    storages = {param.untyped_storage()._cdata: param.untyped_storage().nbytes() for param in model.parameters()}
    return sum(storages.values())


def _held_in_passes(case: Case, apart: bool) -> tuple[int, int, int, int]:
    """Bytes of parameters that this rank has whole after boost(), at most in a step, and of the model and a layer."""
    with _apart() if apart else nullcontext():
        boosted = boost(case)
        model, held = boosted.model.module, []
        for module in list(model.modules())[1:]:
            module.register_forward_hook(lambda *given: held.append(_bytes_held(model)))
            module.register_full_backward_pre_hook(lambda *given: held.append(_bytes_held(model)))
        before = _bytes_held(model)
        boosted.pipeline_backward(boosted.share(case.recipe.batch(0)))
        boosted.finish_step()
    assert _bytes_held(model) == before, "released after the step"
    size = {param: param.numel() * param.element_size() for param in model.parameters()}
    largest = max(sum(size[param] for param in layer.parameters()) for layer in model.model.layers)
    return before, max(held), sum(size.values()), max(largest, *size.values())


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpointing", [None, pytest.param("full", marks=pytest.mark.slow)])
def test_a_rank_has_the_layers_in_flight_and_no_more(apart: bool, checkpointing: str | None) -> None:
    case = _case("llama", "dp2", config=_DEEP, options={"gradient_checkpointing": checkpointing})
    for before, most, whole, layer in run_on_ranks(2, _held_in_passes, case, apart):
        assert before < 0.05 * whole, "only small parameters are whole between passes"
        assert most <= before + (3 if apart else 2) * layer + 4096  # one is gathered ahead


def _apart() -> Any:
    """As if every rank were on a machine of its own: gathers are messages."""
    return mock.patch("plugins.hybrid_parallel.setup.optimizer.meet_neighbours", lambda group: None)


def _train_by_messages(case: Case, directory: Path) -> Any:
    with _apart():
        return train_sharded(case, directory)


@pytest.mark.slow
def test_gathers_by_messages_train_alike(tmp_path: Path) -> None:
    case = _case("gpt2", "pp2dp2", optimizer="adamw", rows=7)
    (tmp_path / "near").mkdir()
    (tmp_path / "far").mkdir()
    near = run_on_ranks(4, train_sharded, case, tmp_path / "near")
    far = run_on_ranks(4, _train_by_messages, case, tmp_path / "far")
    assert [report.losses for report in near] == [report.losses for report in far]


def _read_and_change(case: Case) -> None:
    boosted, plain = boost(case), case.recipe.model()
    name, whole = next(iter(plain.named_parameters()))
    param = dict(boosted.model.named_parameters())[name]
    assert (param.shape, param.dtype, param.numel()) == (whole.shape, whole.dtype, whole.numel())
    assert "sharded" in repr(param)
    for read in (lambda: param.sum(), lambda: param.data, lambda: param.detach(), lambda: param.mul_(2)):
        with torch.no_grad(), pytest.raises(ConfigurationError, match="with model.summon_full_params"):
            read()
    with torch.no_grad(), boosted.model.summon_full_params():
        assert torch.equal(param, whole)
        param.mul_(2)
        whole.mul_(2)
    for key, value in boosted.model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[key]), key
    copied = copy.deepcopy(boosted.model)
    assert all(map(torch.equal, copied.parameters(), plain.parameters()))
    boosted.model.load_state_dict(case.recipe.model().state_dict())
    boosted.model.to(torch.device("cpu"))
    batch = case.recipe.batch(0)
    loss = loss_of(case.recipe.model(), case.recipe.zoo_head, batch)
    share = boosted.share(batch)
    with torch.no_grad():
        torch.testing.assert_close(boosted.model.eval()(**share).loss, loss.detach(), check_device=False)


def test_parameters_are_read_and_changed_where_they_are_summoned() -> None:
    run_on_ranks(2, _read_and_change, _case("llama", "dp2"))


def _generate(case: Case) -> list[list[int]]:
    boosted, plain = boost(case), case.recipe.model().eval()
    prompt = {key: case.recipe.batch(0)[key] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0, "do_sample": False}
    found = boosted.model.eval().generate(**prompt, **options)
    assert torch.equal(found, plain.generate(**prompt, **options))


@pytest.mark.parametrize("layout", ["dp2", pytest.param("pp2dp2", marks=pytest.mark.slow)])
def test_generates_the_tokens_of_the_whole_model(layout: str) -> None:
    run_on_ranks(LAYOUTS[layout].world_size, _generate, _case("llama", layout))


def _unfreeze(case: Case) -> None:
    """Frozen in the first step, trained from the second one on."""
    boosted, plain = boost(case), case.recipe.model()
    optimizer, scheduler = case.recipe.training(plain)
    for step in range(2):
        for model in (plain, boosted.model):
            for name, param in model.named_parameters():
                param.requires_grad_(step > 0 or "layers.1" not in name)
        batch = case.recipe.batch(step)
        loss_of(plain, case.recipe.zoo_head, batch).backward()
        boosted.pipeline_backward(boosted.share(batch))
        for each in (optimizer, scheduler):
            each.step()
        optimizer.zero_grad()
        boosted.finish_step()
    with boosted.model.summon_full_params(writeback=False):
        for found, expected in zip(boosted.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_frozen_parameters_are_sharded_too_and_may_be_unfrozen() -> None:
    run_on_ranks(2, _unfreeze, _case("llama", "dp2", optimizer="momentum"))


# ----- checkpoints between stages -----

_STAGES = {
    "zero0": ("dp2", 0, {}),
    "zero2": ("dp2", 2, {"num_microbatches": 2}),
    "zero2 of 2": ("dp4", 2, {"zero_size": 2}),
    "zero1 of 2": ("dp4", 1, {"zero_size": 2}),
    "zero3": ("dp4", 3, {"zero_size": 2}),
    "pipeline": ("pp2dp2", 3, {}),
}


def _of(name: str) -> Case:
    layout, stage, options = _STAGES[name]
    return _case("gpt2", layout, stage, optimizer="adamw", precision="bf16", options=options)


def _state(boosted: Boosted) -> dict[str, Any]:
    return {"model": boosted.model, "optimizer": boosted.optimizer}


def _save(name: str, folder: Path) -> None:
    case = _of(name)
    boosted = boost(case)
    boosted.pipeline_backward(boosted.share(case.recipe.batch(0)))
    boosted.finish_step()
    boosted.booster.save_checkpoint(folder / name, **_state(boosted))


def _open_and_save(name: str, source: str, folder: Path) -> None:
    boosted = boost(_of(name))
    boosted.booster.load_checkpoint(folder / source, **_state(boosted))
    boosted.booster.save_checkpoint(folder / f"{source} to {name}", **_state(boosted))
    dist.barrier()


@pytest.mark.slow
def test_every_stage_opens_the_checkpoint_of_another_bit_by_bit(tmp_path: Path) -> None:
    names = list(_STAGES)
    for source, target in zip(names, [*names[1:], names[0]], strict=True):
        run_on_ranks(LAYOUTS[_of(source).layout].world_size, _save, source, tmp_path)
        run_on_ranks(LAYOUTS[_of(target).layout].world_size, _open_and_save, target, source, tmp_path)
        saved, again = (reassembled(tmp_path / folder) for folder in (source, f"{source} to {target}"))
        assert saved.keys() == again.keys()
        assert all(torch.equal(saved[name], again[name]) for name in saved)
