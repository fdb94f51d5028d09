"""Documents packed into rows train as the documents one by one through the plain model, in any packing and layout.

What breaks here first: a cache or a mask that lets documents of a row see each other, a label that crosses a border,
and a mean over micro-batches or replicas with other numbers of tokens. Look in
`shardformer/attention/packed_documents.py` and `plugins/hybrid_parallel/data/microbatch.py`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from booster import Booster
from booster.data import pack
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.documents import (
    TOLERANCE,
    difference,
    language_model,
    one_by_one,
    one_row,
    random_documents,
    several_rows,
)
from zoo_tests.harness.ranks import run_on_ranks

_ULYSSES = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp1": {"num_microbatches": 2},
    "dp2": {},
    "tp2": {"tp_size": 2},
    "tp2 split_gather": {"tp_size": 2, "enable_sequence_parallelism": True},
    "tp2 all_to_all": {"tp_size": 2, **_ULYSSES},
    "cp2 ring_attn": {"cp_size": 2},
    "cp2 all_to_all": {"cp_size": 2, **_ULYSSES},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
}


_SLOW = ("dp1", "tp2 split_gather", "cp2 all_to_all")
_FURTHER: dict[str, dict[str, Any]] = {
    "tp2pp2": {"tp_size": 2, "pp_size": 2, "enable_sequence_parallelism": True, "num_microbatches": 2},
    "cp2pp2": {"cp_size": 2, "pp_size": 2, "num_microbatches": 2},
    "ep2": {"ep_size": 2, "num_microbatches": 2},
    "dp2pp2": {"pp_size": 2, "pp_style": "gpipe", "gradient_checkpointing": "full"},
}


def _batches(documents: list[list[int]], packing: str, replicas: int) -> list[dict[str, Any]]:
    """The batch of each replica: documents in one row or several, in shares of other sizes."""
    border = max(len(documents) // 3, 1)
    shares = [documents] if replicas == 1 else [documents[:border], documents[border:]]
    if packing == "rows":
        return [several_rows(share, 11) if share else _empty(documents) for share in shares]
    return [one_row(share, packing) if share else _empty(documents, packing) for share in shares]


def _empty(documents: list[list[int]], packing: str = "positions") -> dict[str, Any]:
    row = one_row(documents, packing)
    return {name: value[:0] if isinstance(value, torch.Tensor) else value for name, value in row.items()}


def _train(family: str, options: dict[str, Any], seed: int, packing: str, loop: str) -> dict[str, float]:
    documents = random_documents(seed, least=3)
    plugin = HybridParallelPlugin(**options)
    booster, model = Booster(plugin=plugin), language_model(family)
    expected_loss, expected = one_by_one(language_model(family), documents)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = _batches(documents, packing, plugin.dp_size)[plugin.dp_rank]
    model.eval()
    with torch.no_grad():
        evaluated = booster.execute_pipeline(iter([batch]), model).loss if loop == "step" else model(**batch).loss
    model.train()
    if loop == "step":
        loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss
    else:
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
    return {
        "evaluated": abs(evaluated.item() - expected_loss) / expected_loss,
        "loss": abs(loss.item() - expected_loss) / expected_loss,
        "gradients": difference(optimizer.full_gradients(), expected),
    }


def _check(family: str, layout: str, seed: int, packing: str, loop: str, ranks: int | None = None) -> None:
    options = (LAYOUTS | _FURTHER)[layout]
    for found in run_on_ranks(ranks or (1 if layout == "dp1" else 2), _train, family, options, seed, packing, loop):
        wrong = {name: value for name, value in found.items() if not value < TOLERANCE[family]}
        assert not wrong, f"{family}, {layout}, seed {seed}, {packing}, {loop}: {wrong}"


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=pytest.mark.slow) if each in _SLOW else each for each in LAYOUTS]
)
def test_documents_train_as_they_do_one_by_one(layout: str) -> None:
    """What tells documents apart, and the loop, differ from case to case."""
    for seed, (packing, loop) in enumerate((("positions", "step"), ("borders", "loop"), ("rows", "loop"))):
        _check("GPT2", layout, seed, packing, loop)


@pytest.mark.parametrize(
    "layout",
    [
        "tp2",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("dp1", "tp2 split_gather", "cp2 ring_attn", "ep2")),
    ],
)
def test_token_mixers_run_over_documents(layout: str) -> None:
    """Linear attention and its convolution carry nothing from a document to the next one."""
    for seed, (packing, loop) in enumerate((("positions", "step"), ("rows", "loop"))):
        _check("Qwen3Next", layout, seed, packing, loop)


@pytest.mark.parametrize(
    "layout",
    [
        "tp2",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("dp1", "tp2 all_to_all", "cp2 ring_attn", "pp2")),
    ],
)
def test_masks_that_transformers_makes_without_positions_hide_documents(layout: str) -> None:
    """Where borders say so; positions alone do not (`test_positions_that_mean_no_documents_are_as_plain`)."""
    for seed, (packing, loop) in enumerate((("borders", "step"), ("both", "loop"))):
        _check("GptOss", layout, seed, packing, loop)


_POSITIONS = {
    "skip": [*range(5), *range(9, 15)],
    "repeat": [place // 2 for place in range(11)],
    "padding": [*range(8), 7, 7, 7],
    "zeros": [0] * 11,
    "restart": [*range(5), *range(6)],
}
# Positions that mean documents where transformers looks for them.
_MEANS_DOCUMENTS = {("Llama", "restart")}


def _train_at_positions(options: dict[str, Any]) -> dict[str, float]:
    """Return the differences from the plain model, by family, kind of positions and whether the model fills a cache."""
    found = {}
    for family, kind, use_cache in itertools.product(("Llama", "GptOss"), _POSITIONS, (True, False)):
        if (family, kind) in _MEANS_DOCUMENTS or (options.get("cp_size") and family == "Llama" and not use_cache):
            continue
        config = {} if family == "GptOss" and not use_cache else {"use_cache": use_cache}
        plain, model = (language_model(family, **config) for _ in range(2))
        tokens = torch.randint(1, 67, (2, 11), generator=torch.Generator().manual_seed(3))
        batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.tensor(_POSITIONS[kind]).repeat(2, 1)}
        expected = plain(**batch).loss
        expected.backward()
        booster = Booster(plugin=HybridParallelPlugin(**options))
        model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss
        gradients = {name: each.grad for name, each in plain.named_parameters(remove_duplicate=False)}
        off = difference(optimizer.full_gradients(), gradients)
        found[f"{family} {kind} {use_cache}"] = max(abs(loss.item() - expected.item()), off)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2 ring_attn", "tp2 all_to_all"])
def test_positions_that_mean_no_documents_are_as_plain(layout: str) -> None:
    """They skip, repeat or restart where the model does not look for documents; with and without a cache."""
    for found in run_on_ranks(2, _train_at_positions, LAYOUTS[layout]):
        assert {name: off for name, off in found.items() if off > 1e-6} == {}


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.reuse, Phase.generate))
@given(
    st.sampled_from(("GPT2", "Llama", "Qwen2", "Qwen3", "Mistral")),
    st.sampled_from(tuple(LAYOUTS)),
    st.integers(0, 10_000),
    st.sampled_from(("positions", "borders", "both", "rows")),
    st.sampled_from(("step", "loop")),
)
def test_any_documents_in_any_packing_and_layout(family: str, layout: str, seed: int, packing: str, loop: str) -> None:
    _check(family, layout, seed, packing, loop)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2pp2", "cp2pp2", "dp2pp2"])
def test_documents_train_so_on_four_ranks(layout: str) -> None:
    cases = (("GPT2", "both", "step"), ("Llama", "borders", "loop"), ("Qwen3Next", "borders", "step"))
    for seed, (family, packing, loop) in enumerate(cases):
        _check(family, layout, seed, packing, loop, ranks=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_experts_on_other_replicas(seed: int) -> None:
    """Ranks agree on the number of parts of their rows, which have different numbers of documents."""
    _check("Mixtral", "ep2", seed, "borders", "step")


def _epoch_of_a_loader(cu_seq_lens: bool) -> list[float]:
    """The differences of the losses of the steps of an epoch whose last row is the only one of its step."""
    documents = random_documents(2, least=9)
    packed = pack(documents, max_tokens=14, rows_per_step=2)
    while len(packed) % 2 == 0:
        documents.append([3, 5, 8, 2] * 3)
        packed = pack(documents, max_tokens=14, rows_per_step=2)
    rows = [[each["input_ids"].tolist() for each in packed[row]] for row in packed.sampler]
    packed.sampler.set_epoch(0)
    booster = Booster(plugin=HybridParallelPlugin(num_microbatches=2))
    model = language_model("GPT2")
    model, optimizer, loader = booster.boost(
        model, torch.optim.SGD(model.parameters(), lr=0.0), packed.loader(cu_seq_lens=cu_seq_lens)
    )
    batches, found = iter(loader), []
    for step in range(len(loader)):
        loss = booster.execute_pipeline(batches, model, optimizer=optimizer).loss.item()
        optimizer.zero_grad()
        expected, _ = one_by_one(
            language_model("GPT2"), [each for row in rows[2 * step : 2 * step + 2] for each in row]
        )
        found.append(abs(loss - expected) / expected)
    return found


@pytest.mark.parametrize("cu_seq_lens", [False, True])
def test_an_epoch_of_a_packed_data_set(cu_seq_lens: bool) -> None:
    for found in run_on_ranks(2, _epoch_of_a_loader, cu_seq_lens):
        assert len(found) > 1 and max(found) < 1e-9


def _outputs(options: dict[str, Any], loop: str) -> tuple[torch.Tensor, int]:
    """Logits of all tokens of a row that is cut, and the number of passes that each stage runs."""
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model = language_model("GPT2")
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    passes: list[int] = []
    model.runtime.register_microbatch_hook(lambda *given: passes.append(1))
    batch = one_row(random_documents(5, least=4))
    if loop == "step":
        outputs = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer, return_outputs=True).outputs
    else:
        outputs = model(**batch)
        booster.backward(outputs.loss, optimizer)
    return outputs.logits.detach().cpu(), len(passes)


@pytest.mark.parametrize(
    ("options", "loop"),
    [
        ({"pp_size": 2, "num_microbatches": 3}, "step"),
        ({"tp_size": 2, "microbatch_size": 2}, "step"),
        ({"pp_size": 2, "num_microbatches": 3}, "loop"),
    ],
    ids=str,
)
def test_outputs_of_a_row_that_was_cut_are_those_of_the_row(options: dict[str, Any], loop: str) -> None:
    documents = random_documents(5, least=4)
    model = language_model("GPT2")
    with torch.no_grad():
        expected = torch.cat([model(input_ids=torch.tensor([each])).logits for each in documents], 1)
    for logits, passes in run_on_ranks(2, _outputs, options, loop):
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
        assert passes >= options.get("num_microbatches", -(-len(documents) // 2))


def _own_loss(row: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss of all tokens of a row of logits, [1, seq, vocab], that no head computes."""
    each = torch.nn.functional.cross_entropy(row[0, :-1], labels[0, 1:], reduction="none")
    return (each * torch.linspace(0.5, 2.0, len(each), dtype=each.dtype)).sum()


def _train_with_own_loss() -> tuple[float, int]:
    """The error of the gradients of such a loss, whose labels cross the cuts of a row; and the number of passes."""
    documents = random_documents(5, least=4)
    booster, model = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=3)), language_model("GPT2")
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    passes: list[int] = []
    model.runtime.register_microbatch_hook(lambda *given: passes.append(1))
    batch = one_row(documents)
    labels = batch.pop("labels").masked_fill(batch["position_ids"] == 0, 7)
    booster.backward(_own_loss(model(**batch).logits, labels), optimizer)
    plain = language_model("GPT2")
    row = torch.cat([plain(input_ids=torch.tensor([each])).logits for each in documents], 1)
    _own_loss(row, labels).backward()
    expected = {name: param.grad for name, param in plain.named_parameters(remove_duplicate=False)}
    return difference(optimizer.full_gradients(), expected), len(passes)


def test_a_loss_of_the_script_sees_the_whole_row() -> None:
    for found, passes in run_on_ranks(2, _train_with_own_loss):
        assert found < TOLERANCE["GPT2"]
        assert passes >= 3


def _with_labels_across(options: dict[str, Any]) -> float:
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model = booster.boost(language_model("GPT2"))
    batch = one_row(random_documents(5, least=4))
    return booster.execute_pipeline(iter([batch | {"labels": batch["input_ids"]}]), model).loss.item()


def test_a_label_that_crosses_a_border_is_counted_as_in_the_plain_model() -> None:
    """The row is not cut."""
    batch = one_row(random_documents(5, least=4))
    expected = language_model("GPT2")(**batch | {"labels": batch["input_ids"], "use_cache": False}).loss.item()
    for found in run_on_ranks(2, _with_labels_across, {"pp_size": 2}):
        assert found == pytest.approx(expected, rel=1e-6), "plain losses are computed in fp32"
