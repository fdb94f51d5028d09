"""Losses of text heads, and of models with several heads."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.cross_entropy.fused_linear import loss_of
from shardformer.cross_entropy.vocab_parallel import cross_entropy_of_tokens, cross_entropy_sum
from shardformer.layers.embedding import check_indices, parallel_heads
from shardformer.loss.terms import (
    DIVISOR,
    IGNORE_INDEX,
    IGNORED,
    LOSS_KEYWORDS,
    SHIFTED,
    Batch,
    HeadLoss,
    LossTerm,
    router_loss_of,
    zero_of,
)
from shardformer.utils.module_paths import remembered
from shardformer.utils.source import reads, uses


def not_ignored(labels: Tensor, _: Batch) -> Tensor:
    """Count the labels that are not ignored."""
    return (labels != IGNORE_INDEX).sum()


def token_sum(model: nn.Module, field: str, outputs: Any, labels: Tensor) -> Tensor:
    """Sum the cross-entropy of logits [..., classes], parallel or deferred; `field`: their name in the outputs."""
    logits = getattr(outputs, field)
    head = next(iter(remembered(model, parallel_heads)), None)
    is_whole = head is None or head.gather_output
    check_indices(labels, logits.shape[-1] if is_whole else head.full_out_features, "label", ignored=IGNORE_INDEX)
    loss = loss_of(logits, labels)
    if loss is not None:
        return loss
    flat = logits.reshape(-1, logits.shape[-1])
    if is_whole:
        return cross_entropy_sum(flat, labels.reshape(-1))
    return cross_entropy_of_tokens(flat, labels.reshape(-1), head.vocab_range, head.group).sum()


def causal_lm(model: nn.Module) -> HeadLoss:
    """Return the loss of heads that predict the next token."""
    return _causal(model, lambda labels, _: labels)


def causal_lm_of_tokens(model: nn.Module) -> HeadLoss:
    """Return the causal loss of heads that exclude the labels of padding."""

    def of_tokens(labels: Tensor, batch: Batch) -> Tensor:
        mask = batch.get("attention_mask")
        return labels if mask is None else labels.masked_fill(mask == 0, IGNORE_INDEX)

    return _causal(model, of_tokens)


def _causal(model: nn.Module, counted: Callable[[Tensor, Batch], Tensor]) -> HeadLoss:
    def of_next(labels: Tensor, batch: Batch) -> Tensor:
        if batch.get(SHIFTED) is not None:
            return batch[SHIFTED]
        # Token t predicts label t + 1. Shift the labels, not the logits: no copy of [batch, seq, vocabulary].
        ignored = batch.get(IGNORED)
        return F.pad(counted(labels, batch), (0, 1), value=IGNORE_INDEX if ignored is None else int(ignored))[..., 1:]

    total = partial(token_sum, model, "logits")
    term = LossTerm("labels", not_ignored, total, prepare=of_next, per_token=True, keywords=LOSS_KEYWORDS)
    return HeadLoss(term, function="ForCausalLMLoss", routers=router_loss_of(model))


def masked_lm(model: nn.Module) -> HeadLoss:
    """Return the loss of heads that predict the tokens at masked positions."""
    total = partial(token_sum, model, "logits")
    term = LossTerm("labels", not_ignored, total, per_token=True, keywords=(DIVISOR, IGNORED))
    # A forward that passes the labels as already shifted to transformers' causal loss computes the same.
    function = "ForCausalLMLoss" if uses(type(model).forward, SHIFTED) else "ForMaskedLMLoss"
    return HeadLoss(term, function=function)


def conditional_generation(model: nn.Module) -> HeadLoss:
    """Return the loss of encoder-decoders that predict each token of the target."""
    if not model.config.is_encoder_decoder:
        return causal_lm(model)
    plain = masked_lm(model)
    return HeadLoss(*plain.terms, function=plain.function, decoder_inputs=shift_right(model))


def streams_of_tokens(model: nn.Module) -> HeadLoss:
    """Return ProphetNet's loss: the smoothed cross-entropy of each stream that predicts the labels, in fp32."""
    config = model.config
    further = () if config.disable_ngram_loss or config.ngram == 1 else ("logits_ngram",)
    streams = config.ngram if further else 1

    def count(labels: Tensor, batch: Batch) -> Tensor:
        return streams * not_ignored(labels, batch)

    def total(outputs: Any, labels: Tensor) -> Tensor:
        logits = [outputs.logits, *(stream for name in further for stream in outputs[name].unbind(1))]
        return sum(
            F.cross_entropy(each.float().flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=config.eps)
            for each in logits
        )

    term = LossTerm("labels", count, total)
    return HeadLoss(term, decoder_inputs=shift_right(model) if config.is_encoder_decoder else None)


def language_of_images(model: nn.Module) -> HeadLoss:
    """Return BLIP-2's loss: that of its language model, whose logits it returns."""
    if model.config.use_decoder_only_language_model:
        return causal_lm(model)
    return HeadLoss(*masked_lm(model).terms, decoder_inputs=shift_right(model.language_model))


def shift_right(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the family's function from labels to decoder inputs; None if it has none, as Dia."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels
    family, config = sys.modules[type(model).__module__], model.config.get_text_config()
    if not hasattr(family, "shift_tokens_right"):
        return None
    special = (config.pad_token_id, config.decoder_start_token_id)
    takes = len(inspect.signature(family.shift_tokens_right).parameters) - 1
    return lambda labels: family.shift_tokens_right(labels, *special[:takes])


def replaced_tokens(_: nn.Module) -> HeadLoss:
    """Return the loss of ELECTRA's discriminator: the mean over tokens that are not padding."""

    def of_tokens(labels: Tensor, batch: Batch) -> Tensor:
        mask = batch.get("attention_mask")
        return labels if mask is None else labels.masked_fill(mask != 1, IGNORE_INDEX)

    def total(outputs: Any, labels: Tensor) -> Tensor:
        logits, kept = outputs.logits.view(labels.shape), labels != IGNORE_INDEX
        return F.binary_cross_entropy_with_logits(*_in_one_dtype(logits[kept], labels[kept]), reduction="sum")

    return HeadLoss(LossTerm("labels", not_ignored, total, prepare=of_tokens, per_token=True))


def pretraining(
    model: nn.Module, pair_label: str = "next_sentence_label", pair_logits: str = "seq_relationship_logits"
) -> HeadLoss:
    """Return the sum of a masked-language-model loss and a loss over pairs of sentences."""
    return HeadLoss(
        LossTerm("labels", not_ignored, partial(token_sum, model, "prediction_logits")),
        LossTerm(
            pair_label,
            not_ignored,
            lambda outputs, labels: cross_entropy_sum(outputs[pair_logits].view(-1, 2), labels.view(-1)),
        ),
    )


def plain_classes(_: nn.Module, per_token: bool = False) -> HeadLoss:
    """Return the cross-entropy over classes, of samples or of tokens."""

    def total(outputs: Any, labels: Tensor) -> Tensor:
        return cross_entropy_sum(outputs.logits.reshape(-1, outputs.logits.shape[-1]), labels.reshape(-1))

    return HeadLoss(LossTerm("labels", not_ignored, total, per_token=per_token), function="ForTokenClassification")


def classes_of_marked(entry: str, _: nn.Module) -> HeadLoss:
    """Return the loss of token classes, averaged over the tokens that `entry` marks, where the batch has it."""

    def counted(labels: Tensor, batch: Batch) -> Tensor:
        kept, marked = labels != IGNORE_INDEX, batch.get(entry)
        return kept if marked is None else kept & marked.bool()

    def total(outputs: Any, kept: Tensor) -> Tensor:
        return outputs.loss * kept.sum() if kept.any() else zero_of(outputs.logits)

    return HeadLoss(LossTerm("labels", lambda kept, _: kept.sum(), total, is_input=True, prepare=counted))


def classes_of_tokens(_: nn.Module) -> HeadLoss:
    """Return the loss of token classes, averaged over tokens that are not padding."""
    of_tokens = replaced_tokens(_).terms[0].prepare
    return HeadLoss(replace(plain_classes(_, per_token=True).terms[0], prepare=of_tokens))


def sequence_classification(model: nn.Module) -> HeadLoss:
    """Return the loss of sequence classification: classes, their chances, several labels or regression.

    DeBERTa takes chances where no type of the problem is set; Bloom, Falcon and MPT where it is one class a sample.
    """
    config = model.config
    is_deberta = config.problem_type is None and uses(type(model).forward, "log_softmax")

    def kind_of(labels: Tensor) -> str:
        if is_deberta and config.num_labels > 1 and labels.dim() > 1 and labels.shape[-1] > 1:
            return "chances"
        if config.problem_type == "single_label_classification" and labels.is_floating_point():
            is_whole = reads(type(model).forward, "loss_fct(pooled_logits, labels)")  # others give it `labels.view(-1)`
            return "chances" if is_whole else config.problem_type
        if config.problem_type is not None:
            return config.problem_type
        several = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        kind = "regression" if config.num_labels == 1 else several
        if not is_deberta:  # transformers keeps it: a saved model's pipeline chooses sigmoid or softmax by it
            config.problem_type = kind
        return kind

    def count(labels: Tensor, batch: Batch) -> Tensor:
        if kind_of(labels) == "single_label_classification":
            return not_ignored(labels, batch)
        if kind_of(labels) == "chances":
            return torch.full((), len(labels), device=labels.device)
        return torch.full((), labels.numel(), device=labels.device)  # a fill, not a copy that waits for the device

    def total(outputs: Any, labels: Tensor) -> Tensor:
        logits, kind = outputs.logits, kind_of(labels)
        if kind == "single_label_classification":
            return cross_entropy_sum(logits.view(-1, config.num_labels), labels.view(-1))
        if kind == "chances":
            return -(logits.log_softmax(-1) * labels).sum()
        pointwise = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
        return pointwise(*_in_one_dtype(logits.reshape(-1), labels.reshape(-1)), reduction="sum")

    def is_divided(labels: Tensor) -> bool:
        return kind_of(labels) == "single_label_classification"

    term = LossTerm("labels", count, total, keywords=(DIVISOR,), is_divided=is_divided)
    return HeadLoss(term, function="ForSequenceClassificationLoss")


def question_answering(_: nn.Module) -> HeadLoss:
    """Return the mean of the losses of the first and the last token of the answer."""

    def term(end: str) -> LossTerm:
        def count(positions: Tensor, batch: Batch) -> Tensor:
            tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
            return (positions < tokens.shape[1]).sum()

        def total(outputs: Any, positions: Tensor) -> Tensor:
            logits = outputs[f"{end}_logits"]  # [batch, seq]
            length = logits.shape[1]
            # A position past the end of the (padded) sequence means that the answer was truncated: no loss.
            return cross_entropy_sum(logits, positions.reshape(-1).clamp(0, length), ignore_index=length)

        return LossTerm(f"{end}_positions", count, total, weight=0.5, keywords=(DIVISOR,))

    return HeadLoss(term("start"), term("end"), function="ForQuestionAnsweringLoss")


def recurring_spans(model: nn.Module) -> HeadLoss:
    """Return Splinter's pretraining loss: the span of each question token; the padding position is not a question."""
    padding = model.config.pad_token_id

    def term(end: str) -> LossTerm:
        def inside(positions: Tensor, batch: Batch) -> Tensor:
            tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
            return positions.clamp(0, tokens.shape[1] - 1)

        def total(outputs: Any, positions: Tensor) -> Tensor:
            logits = outputs[f"{end}_logits"]  # [batch, questions, seq]
            return cross_entropy_sum(logits.flatten(0, 1), positions.flatten(), ignore_index=padding)

        def count(positions: Tensor, _: Batch) -> Tensor:
            return (positions != padding).sum()

        return LossTerm(f"{end}_positions", count, total, weight=0.5, prepare=inside)

    return HeadLoss(term("start"), term("end"))


def _in_one_dtype(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in the widest dtype of the two, and of fp32: labels of a regression may be large."""
    dtype = torch.promote_types(torch.promote_types(logits.dtype, labels.dtype), torch.float32)
    return logits.to(dtype), labels.to(dtype)


def words_and_answers(model: nn.Module) -> HeadLoss:
    """Return LXMERT's loss: masked words, whether text and image match, and answers; those whose labels are given."""

    def of_classes(labels: str, logits: str) -> LossTerm:
        def total(outputs: Any, given: Tensor) -> Tensor:
            scores = outputs[logits]
            return cross_entropy_sum(scores.view(-1, scores.shape[-1]), given.view(-1))

        return LossTerm(labels, not_ignored, total)

    words = LossTerm("labels", not_ignored, partial(token_sum, model, "prediction_logits"))
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
    """Return Higgs Audio's loss, a sum over codebooks of means over next frames; None if it adds that of text."""
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


def codebooks_of_music(model: nn.Module) -> HeadLoss:
    """Return MusicGen's loss: the mean over codebooks of means over codes that are neither padding nor ignored."""
    config = getattr(model.config, "decoder", model.config)

    def of_codebook(number: int) -> LossTerm:
        def codes(labels: Tensor, _: Batch) -> Tensor:
            return labels[..., number].masked_fill(labels[..., number] == config.pad_token_id, IGNORE_INDEX)

        def total(outputs: Any, labels: Tensor) -> Tensor:
            logits = outputs.logits.unflatten(0, (-1, config.num_codebooks))[:, number, -labels.shape[1] :]
            return cross_entropy_sum(logits.flatten(0, 1), labels.flatten())

        return LossTerm("labels", not_ignored, total, 1 / config.num_codebooks, is_input=True, prepare=codes)

    loss = HeadLoss(*(of_codebook(number) for number in range(config.num_codebooks)))
    loss.reads_whole_logits = True
    return loss
