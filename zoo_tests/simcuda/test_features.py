"""Features on the simulated CUDA device: each gives the numbers that it gives on the CPU, or those of plain training.

What is not here runs on the device by other tests: `make test-cuda` names them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from plugins.hybrid_parallel.offload.activations import PinnedCopy
from shardformer import record_module_init
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import DEVICE_VARIABLE, run_on_ranks
from zoo_tests.hybrid_parallel.compat import test_auto_accelerate as auto
from zoo_tests.hybrid_parallel.zero.test_user_gradients import check_changed_weights
from zoo_tests.parity import test_offload_activations
from zoo_tests.simcuda import rules, test_training
from zoo_tests.simcuda.test_training import LAYOUTS, STEPS, Training, reference, train
from zoo_tests.zoo import FAMILIES

# ----- families -----

_TWO = (("num_microbatches", 2),)
_RECOMPUTED = (("gradient_checkpointing", "full"), *_TWO)
_EXPERTS = (("ep_size", 2),)
CASES = [  # those of BERT, Llama and GPT-2 are in zoo_tests/parity
    ("t5", "tp2pp2", {"sequence_parallel": True, "options": _RECOMPUTED}),
    ("t5", "dp2", {"zero_stage": 0}),
    ("vit", "tp2pp2", {"sequence_parallel": True, "options": _RECOMPUTED}),
    ("vit", "dp2", {}),
    ("mixtral", "tp2pp2", {"options": _TWO}),
    ("mixtral", "dp2", {"options": _EXPERTS}),
    ("qwen3_moe", "tp2dp2", {"options": (*_EXPERTS, ("gradient_checkpointing", "full"))}),
]


@pytest.mark.parametrize(
    ("family", "layout", "fields"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_family_trains_like_plain_training(
    family: str, layout: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "simcuda")
    members = FAMILIES[family]
    precision = "fp32" if "ep_size" in dict(fields.get("options", ())) else members.precision
    recipe = Recipe(family=family, head=members.main_head, precision=precision, max_norm=0.05, optimizer="momentum")
    check_case(Case(recipe=recipe, layout=layout, **fields), tmp_path)


# ----- options -----


@pytest.mark.parametrize(("layout", "choice"), [("tp2", "full"), ("pp2", "full"), ("cp2", "operators")])
def test_recomputation(layout: str, choice: str) -> None:
    world_size, options = LAYOUTS[layout]
    options = {**options, "gradient_checkpointing": choice}
    for device, losses in run_on_ranks(world_size, train, "llama", options, device="simcuda"):
        assert device == "cuda"
        assert losses == pytest.approx(reference("llama"), rel=1e-5)


def losses_of(options: dict[str, Any]) -> list[float]:
    training = Training("llama", **options)
    return [training.step(number) for number in range(STEPS)]


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_fp8(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    options = {**options, "precision": "fp8", "enable_sequence_parallelism": layout == "tp2"}
    expected = run_on_ranks(world_size, losses_of, options, device="cpu")
    found = run_on_ranks(world_size, losses_of, options, device="simcuda")
    for losses, same in zip(found, expected, strict=True):
        assert losses == pytest.approx(same, rel=2e-2)
        assert losses != pytest.approx(reference("llama"), rel=1e-6), "nothing was multiplied in 8 bit"


def train_recorded(options: dict[str, Any]) -> list[float]:
    """Train a model whose values are drawn piece by piece, when it has been sharded."""
    built = test_training.build

    def build(family: str) -> Any:
        with record_module_init():
            return built(family)

    with mock.patch.object(test_training, "build", build):
        return losses_of(options)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_lazy_initialisation(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    expected = run_on_ranks(1, train_recorded, {}, device="cpu")[0]
    for losses in run_on_ranks(world_size, train_recorded, options, device="simcuda"):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_changed_weights_stay_changed_under_master_weights(zero_stage: int) -> None:
    run_on_ranks(2, check_changed_weights, zero_stage, device="simcuda")


# ----- activations elsewhere -----


def compare_offloaded(case: Case, place: str) -> tuple[int, int]:
    """Train with and without; return how often copies were read from page-locked memory and from a file."""
    take = mock.patch.object(PinnedCopy, "take", autospec=True, side_effect=PinnedCopy.take)
    # What goes and what comes are in order on one stream, without a wait of the host.
    with take as pinned, rules.without("late_copies"):
        files = test_offload_activations.compare(case, place)
    return pinned.call_count, files


@pytest.mark.parametrize("where", ["cpu", "directory"])
def test_offloaded_activations(where: str, tmp_path: Path) -> None:
    recipe = Recipe(family="bert", head="masked_lm", precision="fp32", config=(("num_hidden_layers", 4),))
    place = "cpu" if where == "cpu" else str(tmp_path)
    ((pinned, files),) = run_on_ranks(
        1, compare_offloaded, Case(recipe=recipe, layout="single"), place, device="simcuda"
    )
    assert bool(pinned) == (where == "cpu") and bool(files) == (where == "directory")


# ----- checkpoints between layouts -----


def save(directory: str, options: dict[str, Any], asynchronous: bool) -> None:
    training = Training("llama", **options)
    training.step(0)
    training.booster.save_checkpoint(
        directory, model=training.model, optimizer=training.optimizer, asynchronous=asynchronous
    )
    training.booster.finish_saving()


def resume(directory: str, options: dict[str, Any]) -> list[float]:
    training = Training("llama", **options)
    training.booster.load_checkpoint(directory, model=training.model, optimizer=training.optimizer)
    return [training.step(number) for number in range(1, STEPS)]


@pytest.mark.parametrize("source", ["tp2", "dp2", "pp2"])
def test_checkpoint_of_another_layout(source: str, tmp_path: Path) -> None:
    world_size, options = LAYOUTS[source]
    directory = str(tmp_path / "checkpoint")
    run_on_ranks(world_size, save, directory, options, source != "pp2", device="simcuda")
    for target in {"tp2", "dp2", "pp2", "single"} - {source}:
        world_size, options = LAYOUTS[target]
        for losses in run_on_ranks(world_size, resume, directory, options, device="simcuda"):
            assert losses == pytest.approx(reference("llama")[1:], rel=1e-5), target


# ----- auto_accelerate -----


@pytest.mark.parametrize(
    "strategy",
    [
        {"tp_size": 2, "pp_size": 1, "zero_stage": 1, "enable_sequence_parallelism": True},
        [("parallel_mode", ([("data", 1), ("pipeline", 2)], None)), "module_replace", ("checkpoint", None), "zero1"],
    ],
    ids=["options", "methods"],
)
def test_auto_accelerate(strategy: Any) -> None:
    for losses, _, _ in run_on_ranks(2, auto._train, strategy, device="simcuda"):
        assert losses == pytest.approx(auto._plain(), rel=1e-5)


def test_auto_accelerate_finds_a_strategy(tmp_path: Path) -> None:
    run_on_ranks(2, auto._search, tmp_path, device="simcuda")
    losses, best, found = json.loads((tmp_path / "0.json").read_text())
    assert losses == pytest.approx(auto._plain(), rel=1e-5)
    assert best in [row["options"] for row in found["tried"] if row["measured"] is not None]
