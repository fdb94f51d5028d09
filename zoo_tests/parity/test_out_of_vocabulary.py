"""Ids and labels that no row of a vocabulary belongs to are refused where plain torch refuses them.

What breaks here first: a row of padding that an id reaches, and a sum over ranks of which none has the row.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from shardformer.cross_entropy.vocab_parallel import cross_entropy_sum
from shardformer.layers.embedding import OutOfVocabularyError, check_indices
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import DEVICE_VARIABLE, distributed
from zoo_tests.harness.reference import loss_of
from zoo_tests.harness.train_sharded import Boosted, boost

_HEADS = {"llama": "causal_lm", "bert": "masked_lm", "t5": "generation"}


def _wrong_batches(family: str, vocabulary: int) -> list[tuple[str, int, str]]:
    """(entry, value, message) of what torch refuses."""
    of_id = rf"token id {{}} in {{}}\[2, 1\] is outside of the vocabulary of {vocabulary}; use 0 to {vocabulary - 1}$"
    of_label = rf"label {{}} in {{}}\[2, 1\] is outside of the vocabulary of {vocabulary}; use .*, or -100 for a label"
    of_labels = of_id if family == "t5" else of_label  # T5 makes decoder inputs of its labels
    wrong = [("input_ids", value, of_id) for value in (vocabulary, -1)]
    wrong += [("labels", value, of_labels) for value in (vocabulary, -1)]
    if family == "t5":
        wrong += [("decoder_input_ids", vocabulary, of_id)]
    return [(entry, value, text.format(value, entry)) for entry, value, text in wrong]


def _check_refusals(boosted: Boosted, case: Case) -> None:
    plain, batch = case.recipe.model(), case.recipe.batch(0)
    vocabulary = plain.get_input_embeddings().num_embeddings
    on_gpu = boosted.plugin.grid.device.type == "cuda"  # which asserts without a wait, and so without the value
    for entry, value, message in _wrong_batches(case.recipe.family, vocabulary):
        wrong: dict[str, Any] = {key: tensor.clone() for key, tensor in batch.items()}
        wrong.setdefault(entry, torch.ones_like(batch["labels"]))[2, 1] = value
        if on_gpu:
            message = f"a {'label' if message.startswith('label') else 'token id'} is outside of the vocabulary of"
        with pytest.raises(IndexError):
            plain(**wrong)
        for backward in (boosted.pipeline_backward, boosted.ordinary_backward):
            with pytest.raises(RuntimeError if on_gpu else OutOfVocabularyError, match=message):
                backward(wrong)
    # A batch after it trains as if nothing had been.
    expected = loss_of(plain, case.recipe.zoo_head, batch)
    found = boosted.pipeline_backward(batch).cpu()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)
    boosted.finish_step()


@pytest.mark.skipif(os.environ.get(DEVICE_VARIABLE) == "gpu", reason="after a failed assertion a GPU runs nothing")
@pytest.mark.parametrize("family", ["llama", "bert", pytest.param("t5", marks=pytest.mark.slow)])
@distributed(2)
def test_ids_and_labels_outside_of_the_vocabulary(family: str) -> None:
    for padding in (1, 64):
        case = Case(
            recipe=Recipe(family=family, head=_HEADS[family], steps=1),
            layout="tp2",
            options=(("make_vocab_size_divisible_by", padding), ("num_microbatches", 1)),
        )
        _check_refusals(boost(case), case)


def test_the_first_index_outside_is_named() -> None:
    check_indices(torch.full((2, 3), 7, device="meta"), 5, "token id")
    with pytest.raises(
        OutOfVocabularyError, match=re.escape("label 5 is outside of the vocabulary of 5; use 0 to 4, or")
    ):
        check_indices(torch.tensor([0, -100, 5, 6]), 5, "label", ignored=-100)
    with pytest.raises(IndexError):
        cross_entropy_sum(torch.zeros(1, 5), torch.tensor([5]))
