"""Losses of the heads of families that need no plan in this package, because transformers has one or none fits."""

from __future__ import annotations

from torch import nn

from shardformer.loss.heads import USUAL_HEAD_LOSSES, with_further_entries
from shardformer.loss.several import words_and_answers
from shardformer.loss.terms import HeadLoss
from shardformer.loss.text import causal_lm, causal_lm_of_tokens, conditional_generation


def _without_z_loss(model: nn.Module) -> HeadLoss | None:
    """Return the causal loss, unless the model adds the squared normalisers of its logits to it."""
    return None if model.z_loss_coefficient else causal_lm(model)


HEAD_LOSSES = {
    # Compute the usual losses in their own forward.
    **dict.fromkeys(("eurobert", "gemma3", "qwen3_5", "ultrabert", "ultravbert"), USUAL_HEAD_LOSSES),
    **{
        family: {**USUAL_HEAD_LOSSES, f"{prefix}ForConditionalGeneration": causal_lm_of_tokens}
        for family, prefix in (
            ("granite_speech", "GraniteSpeech"),
            ("granite_speech_plus", "GraniteSpeechPlus"),
            ("qwen2_audio", "Qwen2Audio"),
        )
    },
    "bamba": {"BambaForCausalLM": _without_z_loss},
    "lxmert": {"LxmertForPreTraining": words_and_answers},
    "vibevoice": {
        "VibeVoiceForConditionalGeneration": with_further_entries(conditional_generation, "acoustic_loss_mask")
    },
}
