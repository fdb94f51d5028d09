"""ZeRO stages and `zero_size`: the same numbers as plain training, whatever ranks keep of gradients and states.

What breaks here first: a pass whose shard is lost or counted twice (`plugins/hybrid_parallel/zero/passes.py`), and
copies of a shard that differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.train_sharded import Boosted, boost
from zoo_tests.hybrid_parallel.checkpoint.test_resharding import reassembled

_HEADS = {"bert": "masked_lm", "llama": "causal_lm", "gpt2": "lm_head", "t5": "generation"}
_CLIP = 0.05


def _case(family: str, layout: str, stage: int = 2, loop: bool = False, **recipe: Any) -> Case:
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
        _case("llama", "dp2", rows=7, max_norm=_CLIP, optimizer="adamw", options={"num_microbatches": 3}),
        _case("gpt2", "pp2dp2", optimizer="momentum", max_norm=_CLIP),
        _case("bert", "dp4", 1, optimizer="adamw", max_norm=_CLIP, options={"zero_size": 2}),
    ]
    slow = [
        _case(
            "bert", "dp4", optimizer="adamw", rows=11, options={"zero_size": 2, "num_microbatches": 2}, max_norm=_CLIP
        ),
        _case("bert", "dp4", 1, optimizer="momentum", options={"zero_size": 1}, max_norm=_CLIP),
        _case("t5", "tp2dp2", loop=True, optimizer="adamw", max_norm=_CLIP),
        _case("llama", "pp2dp2", loop=True, optimizer="momentum", config=(("tie_word_embeddings", True),)),
        _case("bert", "pp2dp2", precision="fp16", optimizer="momentum", max_norm=_CLIP),
        _case("llama", "cp2dp2", optimizer="adamw", options={"zero_size": 2}, max_norm=_CLIP),
        _case("bert", "dp2", frozen=("bert.embeddings", "bert.encoder.layer.1"), options={"num_microbatches": 2}),
        _case("llama", "dp2", adapters=("q_proj", "v_proj"), optimizer="adamw", options={"num_microbatches": 2}),
        _case("mixtral", "tp2dp2", precision="fp32", optimizer="momentum", options={"ep_size": 2}, max_norm=_CLIP),
        _case(
            "qwen3_moe",
            "dp4",
            precision="fp32",
            optimizer="momentum",
            options={"ep_size": 2, "num_microbatches": 2},
            max_norm=_CLIP,
        ),
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
    case = _case("llama", "dp2", options={"num_microbatches": 3})
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


def test_zero_size_replicas_share_the_states() -> None:
    for size, of_one in ((1, 1.0), (2, 0.5), (None, 0.25)):
        options = {} if size is None else {"zero_size": size}
        found = run_on_ranks(4, _shards, _case("bert", "dp4", optimizer="adamw", options=options))
        assert sum(own for own, _ in found) == round(4 * of_one * found[0][1])
        assert all(own <= 1.05 * of_one * whole for own, whole in found)


# ----- checkpoints between stages -----

_STAGES = {
    "zero0": ("dp2", 0, {}),
    "zero2": ("dp2", 2, {"num_microbatches": 2}),
    "zero2 of 2": ("dp4", 2, {"zero_size": 2}),
    "zero1 of 2": ("dp4", 1, {"zero_size": 2}),
    "pipeline": ("pp2dp2", 2, {}),
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
