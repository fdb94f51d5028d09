"""DeepSpeed's configuration: what each key becomes, and one sentence for each that is refused.

What fails here first is a key that is taken and does nothing.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from booster.errors import ConfigurationError
from plugins import hybrid_parallel
from plugins.hybrid_parallel.compat.deepspeed_3d.config import (
    Bf16,
    DeepSpeedConfig,
    Fp16,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    Zero,
    read_ds_config,
)


def _options(values: dict[str, Any], dp_size: int = 2) -> dict[str, Any]:
    return read_ds_config(values).options(dp_size)


def test_without_keys_everything_is_deepspeeds_default() -> None:
    assert _options({}) == {"zero_stage": 0, "max_norm": None, "precision": "fp32"}


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({"gradient_clipping": 1}, {"max_norm": 1}),
        ({"gradient_clipping": 0.0}, {"max_norm": None}),
        ({"bf16": {"enabled": True}}, {"precision": "bf16"}),
        ({"fp16": {"enabled": False, "initial_scale_power": 3}}, {"precision": "fp32"}),
        (
            {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 500}},
            {"precision": "fp16", "initial_scale": 256.0, "growth_interval": 500},
        ),
        (
            {"fp16": {"enabled": True, "hysteresis": 1, "min_loss_scale": 1, "auto_cast": False}},
            {"precision": "fp16", "initial_scale": 65536.0, "growth_interval": 1000},
        ),
        ({"zero_optimization": {"stage": 1}}, {"zero_stage": 1}),
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "overlap_comm": False}},
            {"zero_stage": 1, "zero_bucket_size_in_mb": 5e8 * 4 / 2**20, "overlap_communication": False},
        ),
        ({"steps_per_print": 10, "wall_clock_breakdown": True}, {}),
    ],
)
def test_a_key_becomes_an_option(values: dict[str, Any], options: dict[str, Any]) -> None:
    assert _options(values) == {"zero_stage": 0, "max_norm": None, "precision": "fp32", **options}


TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ({TOTAL: 16, MICRO: 2, STEPS: 4}, (2, 4)),
        ({TOTAL: 16, MICRO: 2}, (2, 4)),
        ({TOTAL: 16, STEPS: 4}, (2, 4)),
        ({MICRO: 2, STEPS: 4}, (2, 4)),
        ({TOTAL: 16}, (8, 1)),
        ({MICRO: 2}, (2, 1)),
        ({STEPS: 4}, (None, 4)),
        ({}, (None, None)),
    ],
)
def test_any_two_batch_sizes_are_enough(values: dict[str, int], sizes: tuple[int | None, int | None]) -> None:
    assert read_ds_config(values).batch_sizes(dp_size=2) == sizes
    assert _options(values).get("num_microbatches") == sizes[1]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {TOTAL: 32, MICRO: 2, STEPS: 4},
            "train_batch_size=32 is not train_micro_batch_size_per_gpu * gradient_accumulation_steps * replicas = "
            "2 * 4 * 2; use 16, or leave one of them out",
        ),
        (
            {TOTAL: 15, MICRO: 2},
            "train_batch_size=15 is no multiple of train_micro_batch_size_per_gpu=2 times 2 replicas; use 16",
        ),
        (
            {TOTAL: 15, STEPS: 4},
            "train_batch_size=15 is no multiple of gradient_accumulation_steps=4 times 2 replicas; use 16",
        ),
        ({TOTAL: 15}, "train_batch_size=15 is no multiple of gradient_accumulation_steps=1 times 2 replicas; use 16"),
    ],
)
def test_batch_sizes_that_do_not_fit(values: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        _options(values)
    assert str(error.value) == sentence


_SWITCH = "is neither true nor false; use one of them"
REFUSED = [
    ({"train_batchsize": 4}, "the key 'train_batchsize' is not known; use train_batch_size"),
    ({"amp": {"enabled": True}}, "the key 'amp' is not known; use fp16"),
    ({TOTAL: 0}, "train_batch_size=0 is not a positive integer; use 1 or more"),
    ({MICRO: "4"}, "train_micro_batch_size_per_gpu='4' is not a positive integer; use 1 or more"),
    (
        {TOTAL: "auto"},
        "train_batch_size='auto' is a value that transformers' Trainer fills in; use one such as 32",
    ),
    (
        {"gradient_clipping": "auto"},
        "gradient_clipping='auto' is a value that transformers' Trainer fills in; use one such as 1.0",
    ),
    ({"gradient_clipping": -1.0}, "gradient_clipping=-1.0 is not a number of 0 or more; use one such as 1.0"),
    ({"fp16": True}, "fp16=True is no object; use {'enabled': true}"),
    (
        {"fp16": {"enabled": "auto"}},
        "fp16.enabled='auto' is a value that transformers' Trainer fills in; use one such as",
    ),
    ({"fp16": {"enabled": 1}}, f"fp16.enabled=1 {_SWITCH}"),
    ({"fp16": {"opt_level": "O1"}}, "the key 'fp16.opt_level' is not known; use fp16.loss_scale"),
    (
        {"fp16": {"loss_scale": 128}},
        "fp16.loss_scale=128 fixes the loss scale, which is always dynamic here; use 0 and",
    ),
    ({"fp16": {"hysteresis": 2}}, "fp16.hysteresis=2 has no equivalent, since every overflow halves the scale; use 1"),
    ({"fp16": {"min_loss_scale": 2}}, "fp16.min_loss_scale=2 has no equivalent, since the scale stays at 1 or above"),
    ({"fp16": {"auto_cast": True}}, "fp16.auto_cast=True has no equivalent, since the model itself is cast; use false"),
    ({"fp16": {"consecutive_hysteresis": True}}, "fp16.consecutive_hysteresis=True has no equivalent; use false"),
    ({"fp16": {"initial_scale_power": -1}}, "fp16.initial_scale_power=-1 is not an integer of 0 or more; use one such"),
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled and bf16.enabled are both true; use one of them",
    ),
    (
        {"zero_optimization": {"stage": 3}},
        "zero_optimization.stage=3 shards gradients or parameters over replicas, which is not available; use 0 or 1",
    ),
    (
        {"zero_optimization": {"stage": 2}},
        "zero_optimization.stage=2 shards gradients or parameters over replicas, which",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "the key 'zero_optimization.offload_optimizer' is not known; use zero_optimization.",
    ),
    (
        {"zero_optimization": {"reduce_bucket_size": 0}},
        "zero_optimization.reduce_bucket_size=0 is not a positive number",
    ),
    ({"optimizer": {}}, "the key 'optimizer.type' is missing; use 'type': 'AdamW'"),
    ({"optimizer": {"type": "Lamb"}}, "optimizer.type='Lamb' is not available; use Adam, AdamW, SGD, Adagrad, "),
    (
        {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}},
        "the key 'optimizer.params.learning_rate' is not known; use optimizer.params.",
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        "optimizer.params.lr='auto' is a value that transformers' Trainer fills in; use one such as 0.0001",
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": -1.0}}},
        "optimizer.params={'lr': -1.0} is refused by torch.optim.AdamW (Invalid learning rate: -1.0); use",
    ),
    ({"scheduler": {"type": "OneCycle"}}, "scheduler.type='OneCycle' is not available; use WarmupLR, WarmupDecayLR or"),
    (
        {"scheduler": {"type": "WarmupDecayLR"}},
        "the key 'scheduler.params.total_num_steps' is missing; use 'total_num_steps': 10000",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        "scheduler.params.warmup_num_steps='auto' is a value that transformers' Trainer fills in; use one such as 1000",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"total_steps": 5}}},
        "the key 'scheduler.params.total_steps' is not known; use scheduler.params.warmup_num_steps",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
        "scheduler.params.warmup_type='cosine' is not available; use 'log' or 'linear'",
    ),
    ({"wall_clock_breakdown": "yes"}, f"wall_clock_breakdown='yes' {_SWITCH}"),
]


@pytest.mark.parametrize(("values", "sentence"), REFUSED)
def test_a_mistake_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        read_ds_config(values)
    assert str(error.value).startswith(f"ds_config: {sentence}"), error.value
    assert ";" in str(error.value) and str(error.value).count("ds_config:") == 1


def test_several_mistakes_are_told_together() -> None:
    with pytest.raises(ConfigurationError, match="ds_config: fp16.hysteresis=2 .*; ds_config: the key 'zero' is not"):
        read_ds_config({"fp16": {"hysteresis": 2}, "zero": {}})


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({TOTAL: 16, "zero_optimization": {"stage": 1}}))
    assert read_ds_config(str(path)).options(1)["zero_stage"] == 1
    path.write_text("{")
    for wrong, sentence in (
        (path, "is not valid JSON"),
        (tmp_path / "none.json", "does not exist; use a dict, or the path of a JSON file"),
        (3, "ds_config is a int; use a dict, or the path of a JSON file"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            read_ds_config(wrong)


def test_what_changes_nothing_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    values = {"steps_per_print": 10, "wall_clock_breakdown": False, "zero_optimization": {"contiguous_gradients": True}}
    with caplog.at_level(logging.INFO):
        read_ds_config(values).tell_what_is_left()
        read_ds_config({}).tell_what_is_left()
    assert [record.getMessage() for record in caplog.records] == [
        "ds_config: steps_per_print, wall_clock_breakdown, zero_optimization.contiguous_gradients change nothing here"
    ]


@pytest.mark.parametrize("model", [DeepSpeedConfig, Fp16, Bf16, Zero, WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_every_key_says_what_would_do(model: Any) -> None:
    """A key without it would be refused without a sentence."""
    for name, each in model.model_fields.items():
        assert each.description and each.examples, name
        needed = {} if model not in (WarmupDecayLR, WarmupCosineLR) else {"total_num_steps": 10}
        assert model(**{**needed, name: each.examples[0]}) is not None


# ----- optimizers -----


@pytest.mark.parametrize(
    ("block", "kind", "settings"),
    [
        ({"type": "AdamW"}, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),
        (
            {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}},
            torch.optim.AdamW,
            {"lr": 1e-4, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1},
        ),
        # DeepSpeed's Adam decouples its weight decay unless it is told not to.
        ({"type": "Adam", "params": {"torch_adam": True}}, torch.optim.AdamW, {"weight_decay": 0.0}),
        (
            {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}},
            torch.optim.Adam,
            {"weight_decay": 0.1},
        ),
        ({"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_an_optimizer(block: dict[str, Any], kind: type, settings: dict[str, Any]) -> None:
    layer = nn.Linear(2, 2)
    optimizer = read_ds_config({"optimizer": block}).optimizer.build(layer.parameters())
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in settings} == settings
    assert group["params"] == list(layer.parameters())


# ----- schedules -----


def _lrs(block: dict[str, Any], steps: int, lr: float = 0.5) -> list[float]:
    """The learning rates of the first steps of an optimizer."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr)
    schedule = read_ds_config({"scheduler": block}).scheduler.build(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        (
            "WarmupLR",
            {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.8},
            [0.0, 0.2, 0.4, 0.6, 0.8, 0.8],
        ),
        (
            "WarmupLR",
            {"warmup_num_steps": 4, "warmup_min_lr": 0.1, "warmup_max_lr": 0.3},
            [0.1, 0.2, 0.1 + 0.2 * math.log(3) / math.log(4), 0.3, 0.3],
        ),
        (
            "WarmupDecayLR",
            {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear", "warmup_max_lr": 0.4},
            [0.0, 0.2, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0],
        ),
        (
            "WarmupDecayLR",
            {"warmup_num_steps": 2, "total_num_steps": 4, "warmup_min_lr": 0.1, "warmup_max_lr": 0.2},
            [0.1, 0.2, 0.2, 0.15, 0.1],
        ),
        (  # shares of 0.5; the cosine is a step ahead, as DeepSpeed's is
            "WarmupCosineLR",
            {
                "warmup_num_steps": 2,
                "total_num_steps": 6,
                "warmup_type": "linear",
                "warmup_min_ratio": 0.2,
                "cos_min_ratio": 0,
            },
            [0.1, 0.3, 0.25 * (1 + math.cos(math.pi / 4)), 0.25, 0.25 * (1 - math.cos(math.pi / 4)), 0.0],
        ),
        (
            "WarmupCosineLR",
            {"warmup_num_steps": 0, "total_num_steps": 4, "cos_min_ratio": 0.1},
            [0.0, 0.5, 0.5 * 0.55, 0.5 * 0.1],
        ),
    ],
)
def test_a_schedule(kind: str, params: dict[str, Any], expected: list[float]) -> None:
    assert _lrs({"type": kind, "params": params}, len(expected)) == pytest.approx(expected, abs=1e-12)


def test_a_schedule_of_groups_with_learning_rates_of_their_own() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": first.parameters(), "lr": 1.0}, {"params": second.parameters(), "lr": 0.5}]
    absolute = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.2}}
    shares = {"type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0.2, "total_num_steps": 10000}}
    for block, expected in ((absolute, [0.2, 0.2]), (shares, [0.2, 0.1])):
        optimizer = torch.optim.SGD(groups, lr=1.0)
        read_ds_config({"scheduler": block}).scheduler.build(optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)


def test_a_schedule_of_nothing() -> None:
    with pytest.raises(ConfigurationError, match="the optimizer has lr=0, .* use its largest lr"):
        _lrs({"type": "WarmupLR"}, 1, lr=0.0)


def test_without_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names what to install."""
    monkeypatch.setitem(sys.modules, "pydantic", None)
    for name in ("config", "ds_config"):
        monkeypatch.delitem(sys.modules, f"plugins.hybrid_parallel.compat.deepspeed_3d.{name}", raising=False)
    sentence = "DeepSpeed3DParallelConfig needs the package pydantic; pip install 'hybrid-booster[atorch]'"
    with pytest.raises(ImportError, match=re.escape(sentence)):
        _ = hybrid_parallel.DeepSpeed3DParallelConfig
