"""What keeps documents of a row apart, and what is refused: borders, caches, masks, models that cannot.

What breaks here first: a release of transformers whose models build their masks in another way. Look in
`shardformer/attention/packed_documents.py` and `plugins/hybrid_parallel/boosted/forward_options.py`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.boosted.forward_options import with_positions
from shardformer.attention import backend
from shardformer.attention.packed_documents import flash_arguments, mask_calls, reason_not_kept_apart
from zoo_tests.harness.documents import language_model, one_by_one, one_row
from zoo_tests.harness.ranks import distributed, run_on_ranks

_DOCUMENTS = [[5, 6, 7, 8], [9], [10, 11, 12], [13, 14, 15, 16, 17]]


def _outcomes(options: dict[str, Any], extra: dict[str, Any]) -> list[Any]:
    """Losses of both loops, or messages of their errors, and what was logged."""
    backend._log_once.cache_clear()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(backend.__name__).addHandler(handler)
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model = language_model("Llama")
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = one_row(_DOCUMENTS) | extra
    calls: list[Callable[[], Any]] = [
        lambda: model(**batch).loss,
        lambda: booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss,
    ]
    found: list[Any] = []
    for call in calls:
        try:
            found.append(call().item())
        except ConfigurationError as error:
            found.append(str(error))
    logging.getLogger(backend.__name__).removeHandler(handler)
    return [*found, sum("keeps documents that are packed into a row apart" in line for line in lines)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}], ids=str)
def test_documents_are_kept_apart_unless_the_batch_says_otherwise(options: dict[str, Any]) -> None:
    ranks = 2 if options else 1
    model = language_model("Llama")
    expected, leaks = one_by_one(model, _DOCUMENTS)[0], model(**one_row(_DOCUMENTS)).loss.item()
    assert abs(leaks - expected) > 1e-3, "the documents are not told apart"
    for loop, step, lines in run_on_ranks(ranks, _outcomes, options, {}):
        assert [loop, step] == pytest.approx([expected] * 2, rel=1e-6) and lines == 1
    for loop, step, lines in run_on_ranks(ranks, _outcomes, options, {"use_cache": False}):
        assert [loop, step] == pytest.approx([expected] * 2, rel=1e-6) and not lines
    for loop, step, _ in run_on_ranks(ranks, _outcomes, options, {"attention_mask": torch.ones(1, 13)}):
        assert [loop, step] == pytest.approx([leaks] * 2, rel=1e-6)
    for loop, step, _ in run_on_ranks(ranks, _outcomes, options, {"use_cache": True}):
        assert "neither fills nor reads caches" in step or "asks for a cache of whole sequences" in step
        if "pp_size" in options or "cp_size" in options:
            assert "use_cache" in loop
        else:
            assert loop == pytest.approx(leaks, rel=1e-6)


def _wrong(**changes: Any) -> dict[str, Any]:
    return one_row(_DOCUMENTS, "both") | changes


_ENDS_EARLY = torch.tensor([0, 4, 5, 8, 12])
_SHIFTED = torch.tensor([[*range(5), *range(3), *range(5)]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seq_lens_k": _ENDS_EARLY}, r"cu_seq_lens_k ends at 12, and the batch has 13 tokens \(1 x 13\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 4, 8, 13])}, "cu_seq_lens_q has 4 behind 5, and borders of documents"),
        ({"cu_seq_lens_q": torch.tensor([4, 5, 8, 13])}, r"cu_seq_lens_q has shape \(4,\) and starts with 4"),
        ({"cu_seq_lens_k": torch.tensor([0, 4, 8, 13])}, "cu_seq_lens_k in the batch start a document|token 5"),
        ({"position_ids": _SHIFTED}, "the borders in the batch start a document at token 4, and position_ids do not"),
        ({"position_ids": torch.arange(13)[None]}, "start a document at token 4, and position_ids do not"),
        ({"max_length_q": 4}, "max_length_q=4 is less than the 5 tokens of the longest document"),
        ({"seq_idx": torch.zeros(1, 13)}, "start a document at token 4, and seq_idx do not"),
        ({"seq_idx": torch.zeros(13)}, r"seq_idx has shape \(13,\), and the tokens \(1, 13\)"),
        ({"attention_mask": torch.ones(1, 13)}, "and attention_mask, which lets them see each other"),
        ({"use_cache": True}, "and use_cache, which lets them see each other"),
    ],
)
def test_borders_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        with_positions(_wrong(**changes))


def test_borders_become_positions() -> None:
    """Those of several rows count the tokens of all rows; a border is missing where a document spans two rows."""
    expected = one_row(_DOCUMENTS)["position_ids"]
    for tells in ("borders", "both"):
        batch = with_positions(one_row(_DOCUMENTS, tells))
        assert torch.equal(batch["position_ids"], expected)
        assert not {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"} & set(batch)
    rows = {"input_ids": torch.ones(2, 4, dtype=torch.long), "cu_seq_lens_q": [0, 3, 4, 8]}
    assert with_positions(rows)["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    with pytest.raises(ConfigurationError, match="has no border at token 4, where row 1 starts"):
        with_positions(rows | {"cu_seq_lens_q": [0, 3, 5, 8]})
    empty = {"input_ids": torch.ones(0, 4, dtype=torch.long), "cu_seq_lens_q": torch.zeros(0)}
    assert with_positions(empty)["position_ids"].shape == (0, 4)


def test_flash_attn_is_told_of_documents_in_all_rows() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    found = flash_arguments(positions, 2)
    assert found["cu_seq_lens_q"].tolist() == [0, 3, 5, 10] and found["max_length_k"] == 5
    assert found["cu_seq_lens_q"].dtype == torch.int32
    assert flash_arguments(positions[:1], 2)["cu_seq_lens_k"].tolist() == [0, 3, 5, 8, 10]


_SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}
_SMALL |= {"vocab_size": 67, "max_position_embeddings": 32, "pad_token_id": 0}
_KEPT = ("GPTNeoX", "Mistral", "Mixtral", "Gemma2", "Qwen2Moe", "Phi3", "GlmMoeDsa")
_NOT_KEPT = ("Bert", "Roberta", "DistilBert", "OPT", "Bloom", "Qwen3Next", "GptOss", "Blt")


def _base(name: str) -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**_SMALL))


@pytest.mark.parametrize("name", _KEPT)
def test_models_that_make_masks_of_positions(name: str) -> None:
    assert not reason_not_kept_apart(_base(name))


@pytest.mark.parametrize("name", _NOT_KEPT)
def test_models_that_do_not(name: str) -> None:
    assert reason_not_kept_apart(_base(name))


def test_positions_that_begin_elsewhere_stay_as_they_are() -> None:
    batch = {"input_ids": torch.ones(1, 5), "cu_seq_lens_q": torch.tensor([0, 3, 5]), "max_length_q": 3}
    for given, expected in (([5, 6, 7, 5, 6], [5, 6, 7, 5, 6]), ([0, 1, 2, 0, 1], [2, 3, 4, 2, 3])):
        found = with_positions({**batch, "position_ids": torch.tensor([given])}, first=2)
        assert found["position_ids"].tolist() == [expected]
    offset = torch.tensor([[5, 6, 7, 5, 6]])
    assert with_positions({**batch, "position_ids": offset})["position_ids"].equal(offset)


def test_masks_that_read_a_fourth_row_of_positions() -> None:
    """Texts have two-dimensional positions, of which Qwen2.5-VL makes three rows, and Qwen3-VL four."""
    calls = {name: mask_calls(getattr(transformers, f"{name}TextModel")) for name in ("Qwen2_5_VL", "Qwen3VL")}
    passes = {name: {call.passes_positions for call in found} for name, found in calls.items()}
    assert passes == {"Qwen2_5_VL": {False}, "Qwen3VL": {True}}


def _encoder(head: str, family: str = "Bert") -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(embedding_size=16, **_SMALL)
    return getattr(transformers, f"{family}For{head}")(config).eval()


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
@distributed(1)
def test_an_encoder_keeps_documents_apart(family: str) -> None:
    """transformers makes its masks without positions: all tokens of a row see each other, unless borders are given.

    RoBERTa's positions begin behind that of padding.
    """
    plain = _encoder("MaskedLM", family)
    model = Booster(plugin=HybridParallelPlugin()).boost(copy.deepcopy(plain)).eval()
    expected = torch.cat([plain(torch.tensor([each])).logits for each in _DOCUMENTS], dim=1)
    for tells in ("both", "borders"):
        assert torch.allclose(model(**one_row(_DOCUMENTS, tells)).logits, expected, atol=1e-6)
    row = one_row(_DOCUMENTS)
    whole = plain(row["input_ids"], position_ids=row["position_ids"]).logits
    assert torch.allclose(model(**row).logits, whole, atol=1e-6) and not torch.allclose(whole, expected)
    ones = one_row(_DOCUMENTS) | {"attention_mask": torch.ones(1, 13, dtype=torch.long)}
    assert torch.allclose(model(**ones).loss, plain(**ones).loss)


@distributed(1)
def test_a_head_that_passes_use_cache_on_unnamed_keeps_documents_apart() -> None:
    """As those of GraniteMoe, LLaVA and Qwen3-VL: with a cache, transformers looks for no documents."""
    plain = language_model("GraniteMoe")
    expected, _ = one_by_one(plain, _DOCUMENTS)
    assert abs(plain(**one_row(_DOCUMENTS)).loss.item() - expected) > 1e-3, "the documents are not told apart"
    booster = Booster(plugin=HybridParallelPlugin())
    model = booster.boost(copy.deepcopy(plain))
    losses = [model(**one_row(_DOCUMENTS)).loss, booster.execute_pipeline(iter([one_row(_DOCUMENTS)]), model).loss]
    assert [loss.item() for loss in losses] == pytest.approx([expected] * 2, rel=1e-6)
    assert model(input_ids=torch.tensor([[5, 6, 7]])).past_key_values.get_seq_length() == 3


@pytest.mark.parametrize(
    ("head", "family", "reason"),
    [
        ("QuestionAnswering", "Bert", "makes its masks without position_ids"),
        ("MaskedLM", "MobileBert", "makes its masks without position_ids"),
        ("TokenClassification", "Falcon", "takes no position_ids"),
    ],
)
@distributed(1)
def test_a_model_that_cannot_is_refused(head: str, family: str, reason: str) -> None:
    """A head that answers one question a row reads all of it; MobileBERT's embeddings read their neighbours.

    Falcon's heads take any arguments, and leave them unread.
    """
    model = Booster(plugin=HybridParallelPlugin()).boost(_encoder(head, family))
    batch = {name: value for name, value in one_row(_DOCUMENTS, "borders").items() if name != "labels"}
    with pytest.raises(ConfigurationError, match=f"{family}For{head} {reason}, so that"):
        model(**batch)


@distributed(1)
def test_what_is_counted_from_the_start_of_a_row_is_refused() -> None:
    """Llama 4 counts its chunks and the places of its temperature so: shorter rows alone are those of documents."""
    model = Booster(plugin=HybridParallelPlugin()).boost(language_model("Llama4"))
    for documents in ([[5, 6, 7, 8]], [[5, 6], [7, 8, 9]]):
        expected, _ = one_by_one(language_model("Llama4"), documents)
        assert model(**one_row(documents)).loss.item() == pytest.approx(expected, rel=1e-6)
    assert "of 13 tokens: above 5, by attention_chunk_size of Llama4" in _refusal(lambda: model(**one_row(_DOCUMENTS)))


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return ""


_ROTARY = {
    "dynamic": {"max_position_embeddings": 4, "rope_parameters": {"factor": 4.0}},
    "longrope": {
        "rope_parameters": {
            **{"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [3.0, 4.0, 5.0, 6.0], "factor": 4.0},
            "original_max_position_embeddings": 4,
        },
    },
}


_ROWS = {"input_ids": torch.tensor([[3, 4, 5, 6, 7, 8], [3, 4, 0, 0, 5, 6]]), "attention_mask": torch.ones(2, 6)}
_ROWS |= {"labels": _ROWS["input_ids"], "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 1, 1, 2, 3]])}


def _with_rotary(kind: str) -> nn.Module:
    config = copy.deepcopy(_ROTARY[kind])
    config["rope_parameters"] |= {"rope_type": kind, "rope_theta": 10000.0}
    return language_model("Llama", **config)


@distributed(2)
def test_replicas_refuse_the_longest_sample_together() -> None:
    """Here each has one sample, of which one is long."""
    rank, model = torch.distributed.get_rank(), Booster(plugin=HybridParallelPlugin()).boost(_with_rotary("dynamic"))
    share = {name: value[rank : rank + 1] for name, value in _ROWS.items()}
    assert "of 6 tokens: above 4" in _refusal(lambda: model(**share))


@pytest.mark.parametrize("kind", _ROTARY)
@distributed(1)
def test_rotary_embeddings_that_depend_on_the_longest_sample(kind: str) -> None:
    """Micro-batches would each have another one, and documents that of their row."""
    plain = _with_rotary(kind)
    for parts in (1, 2):
        booster = Booster(plugin=HybridParallelPlugin(num_microbatches=parts))
        model = booster.boost(copy.deepcopy(plain))
        usual = {name: value for name, value in _ROWS.items() if name != "position_ids"}
        end_alike = usual | {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 1, 1, 2, 5]])}
        for batch in (usual, end_alike, _ROWS)[: 4 - parts]:
            loss = booster.execute_pipeline(iter([batch]), model).loss.item()
            assert loss == pytest.approx(copy.deepcopy(plain)(**batch).loss.item(), rel=1e-6)
    for batch, tokens, whole in ((_ROWS, 6, "batch"), (one_row(_DOCUMENTS), 5, "row")):
        refusal = _refusal(lambda batch=batch: booster.execute_pipeline(iter([batch]), model))
        assert f"of {tokens} tokens: above 4, by rope_parameters of " in refusal and f"the whole {whole};" in refusal
    assert not _refusal(lambda: booster.execute_pipeline(iter([one_row(_DOCUMENTS[:3])]), model))


def test_an_encoder_decoder_does_not() -> None:
    reason = reason_not_kept_apart(_base("T5Gemma"))
    assert reason == "has a decoder that reads whole rows of its encoder"


@distributed(1)
def test_virtual_tokens_are_refused() -> None:
    """peft's prompt tuning puts them in front of the row, where the first document alone follows them."""
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = Booster(plugin=HybridParallelPlugin()).boost(peft.get_peft_model(language_model("Llama"), config))
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM stands behind virtual tokens of peft"):
        model(**one_row(_DOCUMENTS, "borders"))


def _tensor_facts(value: Tensor) -> Any:
    return getattr(value, "known_fact", None)


@distributed(1)
def test_a_batch_of_the_user_stays_as_it_is() -> None:
    """What the host has found out about positions must not stay on a tensor that the user may change."""
    batch = one_row(_DOCUMENTS, "both")
    before = dict(batch)
    Booster(plugin=HybridParallelPlugin()).boost(language_model("Llama"))(**batch)
    assert batch.keys() == before.keys() and _tensor_facts(batch["position_ids"]) is None
