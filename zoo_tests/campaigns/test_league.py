"""The league finds what is right and what is wrong, and tells refusals from crashes."""

from __future__ import annotations

import numpy
import pytest
from torch import nn

from benchmarks.league.outcome import EXACT, REFUSED, WRONG, Outcome, RefusedError, refusals
from benchmarks.league.page import page
from benchmarks.league.pipelines import middle_layer
from benchmarks.league.system import assembled
from benchmarks.league.worker import judge
from zoo_tests.harness.ranks import run_on_ranks


@pytest.mark.parametrize(
    ("system", "kind"),
    [("ours", EXACT), ("ours with a fault", WRONG), ("torch parallelize_module", EXACT), ("torch pipelining", REFUSED)],
)
def test_a_class_is_judged(system: str, kind: str) -> None:
    for found in run_on_ranks(2, judge, system, "llama", "LlamaForCausalLM", 2, 1, timeout_s=120):
        assert found.kind == kind, found
        assert bool(found.plain_seconds) == (kind == EXACT)
        assert kind != WRONG or "gradient of" in found.why


def test_a_message_is_a_refusal_and_an_accident_a_crash() -> None:
    with pytest.raises(RefusedError, match="no such style"), refusals():
        raise ValueError("no such style")
    with pytest.raises(AssertionError), refusals():
        raise AssertionError
    with pytest.raises(KeyError), refusals():
        raise KeyError("layers")


def test_parts_of_a_parameter_are_concatenated() -> None:
    for rank in run_on_ranks(2, _assembled_parts):
        assert rank.tolist() == [[0, 0], [1, 1]]


def _assembled_parts() -> numpy.ndarray:
    import torch.distributed as dist

    own = {"whole": numpy.zeros(3), "part": numpy.full((1, 2), dist.get_rank())}
    return assembled(own, {"whole": (3,), "part": (2, 2)})["part"]


def test_a_model_is_split_where_half_of_its_layers_lie() -> None:
    model = nn.Module()
    model.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    assert middle_layer(model) == "decoder.1"
    with pytest.raises(RefusedError, match="no list of layers"):
        middle_layer(nn.Linear(2, 2))


def test_the_page_counts_refusals_apart_from_wrong_numbers() -> None:
    known = {("ours", "tp2", name): Outcome(EXACT, "", 0.3, 0.2) for name in "ABCDE"}
    known |= {
        ("ours", "tp2", "F"): Outcome(REFUSED, "no plan"),
        ("DeepSpeed AutoTP", "tp2", "A"): Outcome(WRONG, "the loss differs"),
        ("DeepSpeed AutoTP", "tp2", "B"): Outcome(EXACT, "", 0.3, 0.2),
    }
    text = page(known, "ABCDEF", 40)
    assert "| ours | tp2 | 6 | 5 | 0 | 0 | 1 | 0 | 0 | 0 | 1.50 |" in text
    assert "| DeepSpeed AutoTP | tp2 | 2 | 1 | 1 | 0 | 0 | 0 | 0 | 0 |  |" in text
    assert "| ours | tp2 | no plan | 1 |" in text
