"""Why classes have no stages: what of their forward a boundary between stages cannot cross."""

from __future__ import annotations

NOT_IN_STAGES = {
    "ReformerForMaskedLM": "one autograd function holds all layers (reversible residuals) and runs their backward pass",
    "ReformerForSequenceClassification": "as `ReformerForMaskedLM`",
    "ReformerForQuestionAnswering": "as `ReformerForMaskedLM`",
    "BltForCausalLM": "a second model, which every stage would have to run, finds the patches of each text",
    "HrmTextForCausalLM": "its two stacks of layers run in turns, several times each, over the same weights",
    "ViltForImagesAndTextClassification": "its encoder runs once for each image of a sample",
    "LightGlueForKeypointMatching": "not solved: in the stages that were tried its loss is NaN",
    "SuperGlueForKeypointMatching": "not solved: two gradients of its keypoint detector differ by 7e-7",
}
