"""Heads with labels of every kind: each trains over two ranks as plainly, on the batch that `booster verify` makes up.

What breaks here first: labels that are no tensor, and counts of boxes. Look in `plugins/hybrid_parallel/verify` for the
batch and in `shardformer/loss` for the loss.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from plugins.hybrid_parallel.verify.compare import Tolerance, compare
from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, small_config
from plugins.hybrid_parallel.verify.train import VerifyCase, train_on_rank, train_reference
from zoo_tests.harness.ranks import run_on_ranks

_TP2, _PARTS, _DP2 = {"tp_size": 2}, {"tp_size": 2, "num_microbatches": 4}, {"dp_size": 2, "num_microbatches": 2}


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
    ],
)
def test_trains_as_plainly(family: str, name: str, options: dict[str, Any]) -> None:
    module = f"transformers.models.{family}.modeling_{family}"
    config = getattr(import_module(module), name).config_class()
    tiny = TinyModel(module, name, small_config(config, TwinSizes(kv_heads=4, is_faithful=False)), torch.float32)
    case = VerifyCase(tiny, 6, 2, options)
    verdict = compare(train_reference(case), run_on_ranks(2, train_on_rank, case), Tolerance(1e-4, 1e-3, 1e-4))
    losses, gradients, _ = verdict.worst
    assert verdict.first is None, verdict.first.text
    assert losses.count == 2 and gradients.count > 10
