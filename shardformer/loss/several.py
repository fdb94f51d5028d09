"""Losses that are sums of several means, each with labels and a count of its own."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.cross_entropy.vocab_parallel import cross_entropy_sum
from shardformer.loss.terms import IGNORE_INDEX, Batch, HeadLoss, LossTerm
from shardformer.loss.text import not_ignored, token_sum


def words_and_answers(model: nn.Module) -> HeadLoss:
    """Return LXMERT's loss: masked words, whether text and image match, and answers; those whose labels are given."""

    def of_classes(labels: str, logits: str) -> LossTerm:
        def total(outputs: Any, given: Tensor) -> Tensor:
            scores = outputs[logits]
            return cross_entropy_sum(scores.view(-1, scores.shape[-1]), given.view(-1))

        return LossTerm(labels, not_ignored, total)

    words = LossTerm("labels", not_ignored, lambda outputs, given: token_sum(model, outputs.prediction_logits, given))
    tasks = {
        "task_mask_lm": words,
        "task_matched": of_classes("matched_label", "cross_relationship_score"),
        "task_qa": of_classes("ans", "question_answering_score"),
    }
    loss = HeadLoss(*(term for task, term in tasks.items() if getattr(model.config, task)))
    loss.needs_all_labels = False
    loss.further_entries = ("obj_labels",)  # its means are over all objects of a batch, with weights
    return loss


def codebooks_of_sound(model: nn.Module) -> HeadLoss | None:
    """Return Higgs Audio's loss: the sum over codebooks of means over the next frames; None if it adds that of text.

    A frame stands at each placeholder for sound among the tokens.
    """
    config = model.config
    if model.text_lm_head is not None:
        return None

    def of_codebook(number: int) -> LossTerm:
        def of_next(labels: Tensor, batch: Batch) -> Tensor:
            tokens = batch["input_ids"]
            is_frame = (tokens == config.audio_token_id) | (tokens == config.audio_delay_token_id)
            frames = labels[batch["audio_input_ids_mask"]][:, number]
            placed = labels.new_full(tokens.shape, IGNORE_INDEX).masked_scatter(is_frame, frames)
            return F.pad(placed, (0, 1), value=IGNORE_INDEX)[:, 1:]

        def total(outputs: Any, labels: Tensor) -> Tensor:
            logits = outputs.logits.unflatten(-1, (config.num_codebooks, config.codebook_size))
            return cross_entropy_sum(logits[:, :, number].flatten(0, 1), labels.flatten())

        return LossTerm("audio_labels", not_ignored, total, prepare=of_next)

    loss = HeadLoss(*(of_codebook(number) for number in range(config.num_codebooks)), function="ForCausalLMLoss")
    loss.reads_whole_logits = True
    return loss
