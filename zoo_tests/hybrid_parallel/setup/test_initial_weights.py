"""Ranks that built the model from different seeds start from rank 0's weights, not from a patchwork.

If this fails, look in `plugins/hybrid_parallel/setup/model.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification

from booster import Booster, ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.setup.initial_weights import share_initial_weights
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.toy import Toy


def _model(seed: int) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 10}
    return BertForSequenceClassification(BertConfig(**sizes, vocab_size=33, max_position_embeddings=8, num_labels=3))


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}, {}], ids=["tp2", "pp2", "dp2"])
@distributed(2)
def test_differing_weights_become_those_of_rank_0(sizes: dict[str, int], tmp_path: Path) -> None:
    booster = Booster(plugin=HybridParallelPlugin(**sizes))
    booster.save_model(booster.boost(_model(seed=dist.get_rank())), tmp_path)
    saved = BertForSequenceClassification.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in _model(seed=0).state_dict().items())


@distributed(2)
def test_one_warning_where_weights_differ_and_none_where_not() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("plugins.hybrid_parallel.setup.initial_weights")
    logger.addHandler(handler)
    try:
        share_initial_weights(_model(seed=0))
        assert not records
        share_initial_weights(_model(seed=dist.get_rank()))
        assert len(records) == (1 if dist.get_rank() == 0 else 0)
    finally:
        logger.removeHandler(handler)


@distributed(2)
def test_a_single_flipped_bit_of_a_16_bit_weight_is_seen() -> None:
    model = Toy().to(torch.bfloat16)
    share_initial_weights(model)
    bits = model.second.weight.detach().view(torch.int16)
    bits[0, 0] ^= dist.get_rank()
    before = bits.clone()
    share_initial_weights(model)
    assert torch.equal(bits, before) == (dist.get_rank() == 0)


@distributed(2)
def test_different_models_are_refused_on_every_rank() -> None:
    model = torch.nn.Linear(3, 2 + dist.get_rank())
    with pytest.raises(ConfigurationError, match="the ranks built different models .* build the same model from the"):
        Booster(plugin=HybridParallelPlugin()).boost(model)


@distributed(2)
def test_other_frozen_parameters_are_refused_on_every_rank() -> None:
    for layout in ({}, {"tp_size": 2}, {"pp_size": 2}):
        model = _model(seed=0)
        model.bert.embeddings.requires_grad_(False)  # which is alike
        model.bert.encoder.layer[1].output.dense.bias.requires_grad_(dist.get_rank() == 0)
        optimizer = torch.optim.SGD(param for param in model.parameters() if param.requires_grad)
        expected = (
            "bert.encoder.layer.1.output.dense.bias is frozen on rank 1, and trained on rank 0; set requires_grad the"
        )
        with pytest.raises(ConfigurationError, match=expected):
            Booster(plugin=HybridParallelPlugin(**layout)).boost(model, optimizer)
