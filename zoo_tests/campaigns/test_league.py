"""The league finds what is right and what is wrong, and tells refusals from crashes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.league import ranks
from benchmarks.league.outcome import CRASHED, EXACT, NOT_PLAIN, REFUSED, WRONG, Outcome, RefusedError, refusals
from benchmarks.league.page import page
from benchmarks.league.pipelines import label_weights, middle_layer
from benchmarks.league.system import assembled
from benchmarks.league.worker import judge, place_of
from zoo_tests.harness.ranks import run_on_ranks


@pytest.mark.parametrize(
    ("system", "pp_size", "kind"),
    [
        ("ours", 1, EXACT),
        ("ours with a fault", 1, WRONG),
        ("torch parallelize_module", 1, EXACT),
        ("torch pipelining", 1, REFUSED),
        pytest.param("torch pipelining", 2, EXACT, marks=pytest.mark.slow),
    ],
)
def test_a_class_is_judged(system: str, pp_size: int, kind: str) -> None:
    for found in run_on_ranks(2, judge, system, "llama", "LlamaForCausalLM", 2 // pp_size, pp_size, timeout_s=300):
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


def test_a_crash_is_told_with_its_place() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    model.model.layers[0].self_attn.k_proj = nn.Linear(4, 8)
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(1, 3, dtype=torch.long))
    assert place_of(caught.value) == "LlamaAttention.forward"
    assert place_of(KeyError("layers")) == ""
    known = {("ours", "tp2", name): Outcome(CRASHED, "it fell", place=f"{name}.forward") for name in "AAABCD"}
    assert "| `A`, `B`, `C`, `D` | crashed | it fell (in `A.forward`, `B.forward`, `C.forward`, …) |" in page(
        known, "ABCD", 1
    )


def test_a_rank_that_waits_for_one_that_failed_has_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outcome is that of the rank that failed, whose message would be lost otherwise."""
    monkeypatch.setattr(ranks, "_GRACE_S", 0.2)
    for failing in (0, 1):
        found = _RanksOfScripts(failing).judge("a system", "llama", "LlamaForCausalLM", 1, 2)
        assert (found.kind, found.why) == (CRASHED, "KeyError: layers")


class _RanksOfScripts(ranks.Ranks):
    """Two ranks that train nothing: one answers that it has crashed, the other never answers."""

    def __init__(self, failing: int) -> None:
        super().__init__(None, timeout_s=60.0)
        self._failing = failing

    def _start(self, count: int) -> None:
        answer = json.dumps([CRASHED, "KeyError: layers", 0.0, 0.0])
        for rank in range(count):
            then = f"print({answer!r}, flush=True)" if rank == self._failing else "time.sleep(60)"
            ours, theirs = socket.socketpair()
            script = [sys.executable, "-c", f"import time; input(); {then}; time.sleep(60)"]
            process = subprocess.Popen(script, stdin=theirs, stdout=theirs)
            theirs.close()
            self._ranks.append(ranks.Rank(process.pid, ours, ours.makefile("r")))


def test_ranks_start_again_after_one_that_ended() -> None:
    """All sets of ranks are forked from one process, which has imported the environment."""
    found = ranks.Ranks(None, timeout_s=60.0)
    try:
        for family, name in (("llama", "LlamaForCausalLM"), ("no_such_family", "NoSuchModel")):
            assert found.judge("accelerate", family, name, 1, 2).kind == REFUSED
        before = [each.pid for each in found._ranks]
        os.kill(before[1], signal.SIGKILL)
        assert found.judge("accelerate", "llama", "LlamaForCausalLM", 1, 2).kind == REFUSED
        assert not set(before) & {each.pid for each in found._ranks}
        assert found.judge("plain transformers", "no_such_family", "NoSuchModel", 1, 1).kind == NOT_PLAIN
    finally:
        found.close()


def test_micro_batches_are_weighted_by_their_labels() -> None:
    labels = torch.tensor([[5, 6, 7], [5, 6, -100], [5, -100, -100], [5, 6, -100]])
    decoder = LlamaForCausalLM(LlamaConfig(hidden_size=4, num_hidden_layers=1, num_attention_heads=1, vocab_size=8))
    assert label_weights(decoder, {"labels": labels}, 2).tolist() == [1.5, 0.5]  # labels of the next position
    assert label_weights(nn.Module(), {"labels": labels[:, 0]}, 2).tolist() == [1.0, 1.0]
    assert label_weights(nn.Module(), {"labels": torch.zeros(4, 3)}, 2).tolist() == [1.0, 1.0]  # no classes


def test_parts_of_a_parameter_are_concatenated() -> None:
    for found in run_on_ranks(2, _assembled_parts):
        assert found.tolist() == [[0, 0], [1, 1]]


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


def test_the_page_puts_failures_in_the_same_words_together() -> None:
    """What is wrong has a first place of its own in each class."""
    known = {("ours", "tp2", name): Outcome(CRASHED, f"size {size}") for name, size in (("A", 3), ("B", 4))}
    known |= {("ours", "tp2", name): Outcome(WRONG, "the loss differs") for name in "CD"}
    known["ours", "tp2", "E"] = Outcome(CRASHED, "no such layer")
    text = page(known, "ABCDE", 1)
    assert "| ours | tp2 | `A`, `B` | crashed | size 3 |" in text
    assert all(f"| ours | tp2 | `{name}` |" in text for name in "CDE")
