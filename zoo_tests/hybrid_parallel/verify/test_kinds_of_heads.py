"""Heads with labels of every kind: each trains over two ranks as plainly, on the batch that `booster verify` makes up.

What breaks here first: labels that are no tensor, and counts of boxes. Look in `plugins/hybrid_parallel/verify` for the
batch and in `shardformer/loss` for the loss.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.verify.compare import Tolerance, compare
from plugins.hybrid_parallel.verify.random_batch import distance_from_wave
from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, small_config
from plugins.hybrid_parallel.verify.train import VerifyCase, train_on_rank, train_reference
from zoo_tests.harness.ranks import distributed, run_on_ranks

_TP2, _PARTS, _DP2 = {"tp_size": 2}, {"tp_size": 2, "num_microbatches": 4}, {"dp_size": 2, "num_microbatches": 2}
_PP2 = {"pp_size": 2, "num_microbatches": 2}
_PP2_WHOLE = {"pp_size": 2, "num_microbatches": 1}  # for batch norms


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [
        ("yolos", "YolosForObjectDetection", _PARTS),  # boxes differ in number between samples and replicas
        ("yolos", "YolosForObjectDetection", _DP2),
        ("beit", "BeitForMaskedImageModeling", _TP2),
        ("beit", "BeitForSemanticSegmentation", _TP2),
        ("wav2vec2", "Wav2Vec2ForCTC", _PARTS),
        ("videomae", "VideoMAEForVideoClassification", _PARTS),
        ("deepseek_v32", "DeepseekV32ForCausalLM", _TP2),  # sparse attention, which compares the name of the kernel
        ("bros", "BrosSpadeELForTokenClassification", _DP2),  # a mean over tokens that another entry marks
        ("dia", "DiaForConditionalGeneration", _TP2),  # labels of codebooks, which the decoder does not read
        ("kosmos2", "Kosmos2ForConditionalGeneration", _PP2),  # calls a part of a tower of the first stage
        ("perceiver", "PerceiverForMaskedLM", _PP2),  # decodes with the embeddings of the first stage
        ("lw_detr", "LwDetrForObjectDetection", _PP2_WHOLE),  # its loss sums over ranks, its backbone collects outputs
        ("lxmert", "LxmertForPreTraining", _PP2),  # a sum of three means
        ("wav2vec2", "Wav2Vec2ForXVector", _PP2),  # its head has a feature_extractor, too
        ("neomme", "NeoMMEForMaskedLM", _TP2),  # adds embeddings to the values of each rank's heads
        ("glm5_next", "Glm5NextForConditionalGeneration", _TP2),  # the plan of an attention that has no shards
    ],
)
@pytest.mark.slow
def test_trains_as_plainly(family: str, name: str, options: dict[str, Any]) -> None:
    case = VerifyCase(_tiny(family, name), 6, 2, options)
    verdict = compare(train_reference(case), run_on_ranks(2, train_on_rank, case), Tolerance(1e-4, 1e-3, 1e-4))
    losses, gradients, _ = verdict.worst
    assert verdict.first is None, verdict.first.text
    assert losses.count == 2 and gradients.count > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "options", "least"),
    [
        ("sapiens2", "Sapiens2ForNormalEstimation", _TP2 | {"num_microbatches": 4}, 0.01),
        ("sapiens2", "Sapiens2ForNormalEstimation", _PP2, 0.01),
        ("perceiver", "PerceiverForOpticalFlow", _PP2, 1e-5),  # its decoder reads what the first stage has prepared
    ],
)
def test_outputs_without_a_loss_train_as_plainly(family: str, name: str, options: dict[str, Any], least: float) -> None:
    """With a criterion over them, of which no gradient is so small that rounding would hide what is wrong."""
    tiny = replace(_tiny(family, name), has_labels=False)
    case = VerifyCase(tiny, 6, 2, options, distance_from_wave)
    plain = train_reference(case)
    largest = max(abs(gradient).max() for gradient in plain.steps[0].gradients.values())
    verdict = compare(plain, run_on_ranks(2, train_on_rank, case), Tolerance(1e-4, 1e-3, 1e-4))
    assert verdict.first is None and verdict.worst[1].count > 10 and largest > least


def test_outputs_without_a_gradient_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="none of the outputs has a gradient"):
        distance_from_wave({"logits": torch.ones(2, 3)}, {"input_ids": torch.ones(2, 3)})


@pytest.mark.slow
def test_noise_that_only_the_loss_draws_is_drawn_alike() -> None:
    case = VerifyCase(_tiny("rf_detr", "RfDetrForInstanceSegmentation"), 6, 2, _TP2 | {"num_microbatches": 1})
    case = replace(case, draws_alike=True)
    verdict = compare(train_reference(case), run_on_ranks(2, train_on_rank, case), Tolerance(1e-3, 1e-3, 1e-4))
    assert verdict.worst[0].value < 1e-3, verdict.first


def _tiny(family: str, name: str) -> TinyModel:
    module = f"transformers.models.{family}.modeling_{family}"
    config = small_config(getattr(import_module(module), name).config_class(), TwinSizes(kv_heads=4, is_faithful=False))
    return TinyModel(module, name, config, torch.float32)


def test_parameters_that_a_class_never_initializes_are_the_same_in_every_build() -> None:
    tiny, was_strict = (
        _tiny("qwen3_omni_moe", "Qwen3OmniMoeTalkerForConditionalGeneration"),
        torch.are_deterministic_algorithms_enabled(),
    )
    [first, second] = [dict(tiny.build().named_parameters()) for _ in range(2)]
    experts = first["model.layers.0.mlp.experts.gate_up_proj"]
    assert experts.isfinite().all() and experts.std() > 0.01
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    assert torch.are_deterministic_algorithms_enabled() == was_strict


def test_a_loss_whose_last_digits_depend_on_the_seed_is_not_random() -> None:
    """ViLT shuffles the patches of an image: a sum in another order."""
    assert len(train_reference(VerifyCase(_tiny("vilt", "ViltForMaskedLM"), 6, 2, {})).steps) == 2
    with pytest.raises(ConfigurationError, match="draws random numbers"):  # points at which masks are compared
        train_reference(VerifyCase(_tiny("rf_detr", "RfDetrForInstanceSegmentation"), 6, 2, {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "options"),
    [
        ("yolos", "YolosForObjectDetection", _PP2),  # whose `loss_dict` has numbers of the batch
        ("blip_2", "Blip2ForConditionalGeneration", _TP2),  # logits of a language model inside
        ("bert", "BertForPreTraining", _PP2),
    ],
)
@distributed(2)
def test_outputs_have_the_places_of_the_plain_model(family: str, name: str, options: dict[str, Any]) -> None:
    tiny = _tiny(family, name)
    plain, plugin = tiny.build().eval(), HybridParallelPlugin(precision="fp32", **options)
    batch, model = tiny.batch(plain, 0, 4), Booster(plugin=plugin).boost(tiny.build()).eval()
    with torch.no_grad():
        expected, outputs = plain(**batch), model(**batch)
    assert [*outputs] == [*expected]
    for key, found in outputs.items():
        torch.testing.assert_close(tree_leaves(found), tree_leaves(expected[key]), rtol=1e-4, atol=1e-5)
