"""Contrastive losses compare the samples of the global batch, under replicas as in one process.

What breaks here first: a release of transformers whose models compute their features in other modules. Look in
`plugins/hybrid_parallel/loss/choice.py`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import SGD
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.data.microbatch import without_rows
from plugins.hybrid_parallel.loss import choice as contrastive
from zoo_tests.harness.ranks import distributed, run_on_ranks

_EXACT = {"rtol": 1e-9, "atol": 1e-11}
# Take `return_loss` and compare samples; which modules return their features is not told here.
_REFUSED = {"ClvpModelForConditionalGeneration", "FlavaForPreTraining", "VideoPrismClipModel", "XCLIPModel"}
_REFUSED |= {"PeAudioFrameLevelModel", "PeAudioModel", "PeAudioVideoModel", "PeVideoModel"}


def _model(kind: str) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 50, "max_position_embeddings": 8, "eos_token_id": 49, "projection_size": 16}
    options = {"text_config": text, "vision_config": {**sizes, "image_size": 8, "patch_size": 4}}
    config, made = {"CLIP": (CLIPConfig, CLIPModel), "Siglip": (SiglipConfig, SiglipModel)}[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return made(config(**options)).double()


def _batch(rows: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(2, 49, (rows, 7), generator=generator)
    ids[:, 5] = 49
    images = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "pixel_values": images, "return_loss": True}


def _share(batch: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    rows = len(batch["input_ids"])
    cut = slice(rows * rank // size, rows * (rank + 1) // size)
    share = {name: each[cut] if isinstance(each, Tensor) else each for name, each in batch.items()}
    return share if len(share["input_ids"]) else without_rows(batch)


def _compare(kind: str, layout: dict[str, Any], rows: int) -> None:
    plain, batch = _model(kind), _batch(rows)
    model, plugin = copy.deepcopy(plain), HybridParallelPlugin(**layout)
    booster = Booster(plugin=plugin)
    model, optimizer = booster.boost(model, SGD(model.parameters(), lr=0.5))
    share = _share(batch, plugin.dp_rank, plugin.dp_size)
    if layout.get("contrastive") == "replica":
        shares = [_share(batch, rank, plugin.dp_size) for rank in range(plugin.dp_size)]
        expected = sum(plain(**each).loss * len(each["input_ids"]) / rows for each in shares)
    else:
        expected = plain(**batch).loss
    own = len(share["input_ids"])
    parts = min(layout.get("num_microbatches", 1), own)
    if parts > 1 and plugin.pp_size == 1:
        result = booster.execute_pipeline(share, model, optimizer=optimizer, return_loss=True, return_outputs=True)
        loss, outputs = result.loss, result.outputs
    else:
        outputs = model(**share)
        loss = outputs.loss
        booster.backward(loss, optimizer)
    torch.testing.assert_close(loss, expected, **_EXACT)
    embeds = plain(**share).text_embeds[:own].detach() if own else outputs.text_embeds
    torch.testing.assert_close(outputs.text_embeds.detach(), embeds, **_EXACT)
    assert parts > 1 or outputs.logits_per_text.shape == (own, own)
    expected.backward()
    optimizer.step()
    SGD(plain.parameters(), lr=0.5).step()
    torch.testing.assert_close(plugin.checkpoint_io.whole_state_dict(model), dict(plain.state_dict()), **_EXACT)


@pytest.mark.parametrize(
    ("ranks", "kind", "layout", "rows"),
    [
        (2, "Siglip", {"zero_stage": 3}, 3),
        (2, "Siglip", {}, 1),
        (2, "CLIP", {"contrastive": "replica"}, 3),
        (2, "CLIP", {"num_microbatches": 2}, 5),
        (2, "CLIP", {"contrastive": "replica", "num_microbatches": 2, "zero_stage": 2}, 5),
        (2, "CLIP", {"pp_size": 2, "num_microbatches": 3}, 5),
        (2, "Siglip", {"tp_size": 2, "num_microbatches": 3}, 4),
        pytest.param(4, "CLIP", {"tp_size": 2}, 5, marks=pytest.mark.slow),
        pytest.param(4, "CLIP", {"pp_size": 2, "num_microbatches": 2}, 5, marks=pytest.mark.slow),
    ],
)
def test_samples_of_all_replicas_are_compared(ranks: int, kind: str, layout: dict[str, Any], rows: int) -> None:
    run_on_ranks(ranks, _compare, kind, layout, rows)


class OfUnknownFeatures(SiglipModel):
    """Compares samples in a way that only its user knows."""


@distributed(2)
def test_what_cannot_be_compared_is_refused() -> None:
    for options, parts in (({}, "dp_size=2 replicas"), ({"contrastive": "replica", "num_microbatches": 2}, "2 micro")):
        model = OfUnknownFeatures(_model("Siglip").config)
        booster = Booster(plugin=HybridParallelPlugin(**options))
        model, optimizer = booster.boost(model, SGD(model.parameters(), lr=0.1))
        with pytest.raises(ConfigurationError, match=rf"of which {parts}.* have parts; .*contrastive='replica'"):
            booster.execute_pipeline(_batch(4), model, optimizer=optimizer)


def test_the_models_that_compare_samples_are_known() -> None:
    models = Path(transformers.__file__).parent / "models"
    parts = [part for file in models.glob("*/modeling_*.py") for part in file.read_text("utf-8").split("\nclass ")[1:]]
    asked = {part[: part.index("(")]: part for part in parts if f" {contrastive._ASKED}: bool" in part}
    known, others = contrastive._FEATURES, contrastive._OTHERS
    assert {name for name in asked if not name.startswith(others)} - set(known) <= _REFUSED
    assert len(known.keys() & asked.keys()) > 10
    for name in known.keys() & asked.keys():
        assert all(f"self.{module}" in asked[name] for module in known[name]), name
