"""The layout for fewer ranks than the script's own is for."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.elastic import layouts, planning
from plugins.hybrid_parallel.elastic.layouts import LayoutChoice, PlansAhead
from plugins.hybrid_parallel.elastic.planning import plans
from zoo_tests.elastic.job import CONFIG

_GIVEN = {"tp_size": 2, "pp_size": 2, "num_microbatches": 4, "layers_per_stage": [1, 3], "max_norm": 1.0}
_PP3 = {"tp_size": 1, "pp_size": 3, "cp_size": 1, "microbatch_size": 2}


def _choice(options: dict[str, Any], known: dict[str, Any], global_batch: int | None) -> LayoutChoice:
    return LayoutChoice(options, HybridParallelConfig.from_options(**options), known, global_batch)


@pytest.mark.parametrize(
    ("world_size", "global_batch", "known", "expected"),
    [
        (3, 12, {}, {"tp_size": 1, "pp_size": 1}),
        (2, 12, {}, {"tp_size": 2, "pp_size": 1}),
        (3, 8, {}, None),  # three replicas cannot share it
        (3, 8, {"3": {"options": _PP3}}, {"pp_size": 3, "microbatch_size": 2}),
        (3, 12, {"3": {"reason": "does not fit"}}, None),
        (3, None, {}, {"tp_size": 1, "pp_size": 1}),
    ],
)
def test_the_planned_layout_else_a_part_of_the_given_one(
    world_size: int, global_batch: int | None, known: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    found = _choice(_GIVEN, known, global_batch).best(world_size)
    if expected is None:
        assert found is None
        return
    assert expected.items() <= found.items()
    assert found["max_norm"] == 1.0 and "layers_per_stage" not in found and "num_microbatches" not in found


@pytest.mark.parametrize(
    "layouts",
    [[{"tp_size": 2}, {"pp_size": 3}, {}], lambda count: {"pp_size": count}],
    ids=["list", "function"],
)
def test_layouts_of_the_user(layouts: Any) -> None:
    options = {**_GIVEN, "elastic_layouts": layouts}
    found = _choice(options, {"3": {"options": {"tp_size": 3}}}, 8).best(3)
    assert (found["tp_size"], found["pp_size"]) == (1, 3)


def test_a_layout_whose_shards_do_not_divide_the_replicas_is_left_out() -> None:
    options = {"zero_stage": 2, "elastic_layouts": [{"zero_size": 3}]}
    assert _choice(options, {}, 12).best(2) is None
    assert _choice(options, {}, 12).best(3)["zero_size"] == 3


def test_options_of_sequences_end_with_their_axis() -> None:
    options = {"tp_size": 2, "enable_sequence_parallelism": True}
    assert "enable_sequence_parallelism" not in _choice(options, {}, 12).best(1)


@pytest.mark.slow
def test_a_plan_for_three_of_four_ranks() -> None:
    """Three replicas cannot share eight samples, and three ranks cannot share four heads."""
    request = {
        "model": "LlamaForCausalLM",
        "config": CONFIG,
        "counts": [3],
        "global_batch": 8,
        "length": 9,
        "precision": "fp32",
        "zero_stage": 1,
        "pp_style": "1f1b",
        "num_chunks": 1,
        "sequence": False,
        "recomputation": None,
        "device": None,
        "memory": 4e9,
        "node_size": 4,
        "largest_cp": 1,
    }
    options = plans(request)["3"]["options"]
    assert (options["tp_size"], options["pp_size"], options["cp_size"]) == (1, 3, 1)
    assert "gradient_checkpointing" not in options
    assert "reason" in plans({**request, "memory": 1e4})["3"]


def test_a_machine_plans_once_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that end before their plans are ready do not start one planner each."""
    started: list[subprocess.Popen] = []

    def start(_: Path, lock: int) -> subprocess.Popen:
        started.append(subprocess.Popen(["sleep", "60"], pass_fds=(lock,)))
        return started[-1]

    monkeypatch.setattr(layouts, "_request", lambda *_: {})
    monkeypatch.setattr(layouts, "_start_planner", start)
    monkeypatch.setattr(layouts.dist, "get_rank", lambda: 0)
    place = SimpleNamespace(memory=str(tmp_path))
    config = SimpleNamespace(parallel=SimpleNamespace(elastic_layouts=None))
    model = SimpleNamespace(unwrap=lambda: None)
    rounds = [PlansAhead(place, config) for _ in range(4)]
    try:
        for each in rounds[:2]:
            each.begin(model, object())
        assert len(started) == 1 and rounds[1].known() == {}
        started[0].kill()
        started[0].wait()
        rounds[2].begin(model, object())
        assert len(started) == 2  # the first was killed before it was done
        (request,) = tmp_path.glob("plan-*.json")
        request.with_suffix(".plans").write_text('{"3": {"options": {}}}')
        started[1].kill()
        started[1].wait()
        rounds[3].begin(model, object())
        assert len(started) == 2
        for each in rounds:
            assert each.known() == {"3": {"options": {}}}
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_planner_ends_with_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(planning.os, "_exit", ended.append)
    planning._end_with_job(tmp_path / "removed.json")
    assert ended == [1]
