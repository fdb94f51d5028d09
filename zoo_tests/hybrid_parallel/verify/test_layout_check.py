"""The layout check: silent on what is exact, and planted faults of all kinds are found before anything is changed."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from booster import Booster, ConfigurationError
from booster.data.rows import PackingCollator
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.data.microbatch import PackedRow
from plugins.hybrid_parallel.distributed.local_ranks import run_on_threads
from plugins.hybrid_parallel.setup import input_checks
from plugins.hybrid_parallel.verify import before_boost, image_twin, layout_check
from plugins.hybrid_parallel.verify.before_boost import LayoutReport, checked_layouts
from plugins.hybrid_parallel.verify.layout_check import CheckedModel, check_layout
from zoo_tests.campaigns.census.classes import HeadClass
from zoo_tests.campaigns.census.trained import twin_of
from zoo_tests.campaigns.checked import model_of, verdict_of
from zoo_tests.harness.ranks import distributed

TP, PP, CP = {"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}, {"cp_size": 2}
SP = {"tp_size": 2, "enable_sequence_parallelism": True}
EP = {"ep_size": 2}
EXCHANGED = {**SP, "sequence_parallelism_mode": "all_to_all"}
MLP, LAYER = modeling_llama.LlamaMLP.forward, modeling_llama.LlamaDecoderLayer.forward
ROUTER, EXPERTS = modeling_mixtral.MixtralTopKRouter, modeling_mixtral.MixtralSparseMoeBlock
ROUTES, MIXES = ROUTER.forward, EXPERTS.forward
SIZES = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama() -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))


def mixtral() -> nn.Module:
    with torch.device("meta"):
        return MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=4))


def _mlp(features: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A forward of a feed-forward that passes both of its columns through a function."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.down_proj(features(self.gate_proj(x), self.up_proj(x)))

    return forward


def _layer(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A forward of a layer with another output."""
    return lambda self, *args, **kwargs: change(LAYER(self, *args, **kwargs))


def _positions(x: Tensor) -> Tensor:
    return torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None].log1p()


def _weight_outside(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """A parameter that ranks divide is read by another module than its own."""
    return LAYER(self, *args, **kwargs) + self.mlp.down_proj.weight.mean()


def _weight_of_another_stage(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    attention, weight = self.self_attn, self.input_layernorm.weight
    if attention.layer_idx == 0:
        attention.config._kept = weight
    return LAYER(self, *args, **kwargs) * vars(attention.config).get("_kept", weight)


def _balanced(self: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of experts are relative to what all tokens of the batch give them."""
    logits, scores, indices = ROUTES(self, hidden)
    return logits, scores / scores.mean(0), indices


def _sum_of_experts(self: nn.Module, hidden: Tensor) -> Tensor:
    return MIXES(self, hidden) + self.experts.down_proj.mean()


def _handed_on(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """The first layer's output is kept aside, and read by the last."""
    attention, hidden = self.self_attn, LAYER(self, *args, **kwargs)
    kept = vars(attention.config).get("_kept")
    attention.config._kept = hidden if attention.layer_idx == 0 else kept
    return hidden + kept if attention.layer_idx == 3 and kept is not None else hidden


# What is planted -> the method of Llama's that it replaces, and the layouts under which it is a fault.
FAULTS: dict[str, tuple[type, Callable[..., Any], tuple[dict[str, Any], ...]]] = {
    **{
        name: (modeling_llama.LlamaMLP, _mlp(features), (TP,))
        for name, features in {
            "softmax": lambda g, u: (g * u).softmax(-1),
            "logsumexp": lambda g, u: g - u.logsumexp(-1, keepdim=True),
            "mean": lambda g, u: g * u - (g * u).mean(-1, keepdim=True),
            "standard deviation": lambda g, u: g / (1 + u.std(-1, keepdim=True)),
            "norm": lambda g, u: nn.functional.normalize(g * u, dim=-1),
            "layer norm": lambda g, u: nn.functional.layer_norm(g * u, g.shape[-1:]),
            "top k": lambda g, u: g * (u >= u.topk(8, -1).values[..., -1:]),
            "sorted": lambda g, u: g * u.sort(-1).values,
            "cumulative sum": lambda g, u: g * u.cumsum(-1),
            "largest": lambda g, u: g / u.abs().max(),
            "comparison": lambda g, u: g * (u >= u.max(-1, keepdim=True).values),
            "in another order": lambda g, u: g * u.flip(-1),
            "neighbours": lambda g, u: g * u.roll(1, -1),
            "first feature": lambda g, u: g * u[..., :1],
            "number of features": lambda g, u: g * u * u.shape[-1] ** -0.5,
            "numbers of features": lambda g, u: g * u * torch.arange(u.shape[-1]).to(u.dtype),
        }.items()
    },
    **{
        name: (modeling_llama.LlamaDecoderLayer, _layer(change), layouts)
        for name, (change, layouts) in {
            "mean of samples": (lambda x: x - x.mean(0, keepdim=True), (PP,)),
            "largest of samples": (lambda x: x / x.abs().max(), (PP, CP)),
            "number of samples": (lambda x: x / len(x), (PP,)),
            "mean of tokens": (lambda x: x - x.mean(1, keepdim=True), (SP, CP, EXCHANGED)),
            "cumulative sum of tokens": (lambda x: x + 0.1 * x.cumsum(1), (CP,)),
            "next token": (lambda x: x + x.roll(1, 1), (SP,)),
            "first token": (lambda x: x + x[:, :1], (CP,)),
            "positions by length": (lambda x: x * _positions(x), (CP, EXCHANGED)),
            "length": (lambda x: x * x.shape[1] ** -0.5, (CP,)),
        }.items()
    },
    "between stages": (modeling_llama.LlamaDecoderLayer, _handed_on, (PP,)),
    "weight outside": (modeling_llama.LlamaDecoderLayer, _weight_outside, (TP,)),
    "weight of another stage": (modeling_llama.LlamaDecoderLayer, _weight_of_another_stage, (PP,)),
    "balanced experts": (ROUTER, _balanced, (EP,)),
    "sum of experts": (EXPERTS, _sum_of_experts, (EP,)),
}
FAST = ("softmax", "mean of samples")
CASES = [
    pytest.param(name, layout, id=f"{name}-{index}", marks=() if name in FAST else pytest.mark.slow)
    for name, (_, _, layouts) in FAULTS.items()
    for index, layout in enumerate(layouts)
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_planted_fault_is_found(name: str, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, forward, _ = FAULTS[name]
    monkeypatch.setattr(owner, "forward", forward)
    model = mixtral() if layout is EP else llama()
    report = check_layout(CheckedModel(model), layout, 2)
    assert len(report.findings) == 1 and not report.proved
    assert f"under {next(iter(layout))}=2" in report.findings[0] and "check_layout='warn'" in report.findings[0]


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ({**TP, **PP}, 4),
        (EP, 2),
        ({**TP, "enable_jit_fused": True}, 2),  # its kernels take longer to compile than the check may
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(CP, 2), (SP, 2), (EXCHANGED, 2), (TP | CP, 8)]),
    ],
)
def test_nothing_is_found_where_training_is_exact(layout: dict[str, Any], world_size: int) -> None:
    numbers = torch.get_rng_state()
    report = check_layout(CheckedModel(mixtral() if layout is EP else llama()), layout, world_size)
    assert len(report.proved) == 1 and not report.findings + report.not_checked
    assert torch.equal(torch.get_rng_state(), numbers) and not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "last row of a cut vocabulary belongs to nobody",
        "clipping counts every copy",
        "gradient of the head from the last chunk",
    ],
)
def test_a_mutant_is_found(name: str) -> None:
    """Three of those that `zoo_tests.campaigns.checked` counts; a process of its own has each."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        assert process.submit(verdict_of, name).result()["mutant"].startswith("found")


def _sum_over_rows(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    labels = batch["labels"][:, 1:].flatten()
    losses = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels, reduction="none")
    return losses.sum(), len(batch["labels"])


def _mean_as_sum(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """A mistake: micro-batches of other numbers of rows weigh alike."""
    total, count = _sum_over_rows(outputs, batch)
    return total / count, 1


CUTS, WITH = PackedRow.cuts, ", with the criterion"


@pytest.mark.parametrize(
    ("layout", "world_size", "given", "what"),
    [
        (PP, 2, {"packed_rows": 1}, ", packed rows"),
        (TP | PP, 4, {"criterion": _sum_over_rows}, WITH),
        pytest.param(CP, 2, {"packed_rows": 1}, ", packed rows", marks=pytest.mark.slow),
        pytest.param(PP, 4, {"packed_rows": 1}, ", packed rows", marks=pytest.mark.slow),  # a row for each replica
        pytest.param(TP | PP, 8, {"packed_rows": 3}, ", packed rows", marks=pytest.mark.slow),
        pytest.param(CP, 2, {"criterion": _sum_over_rows}, WITH, marks=pytest.mark.slow),
        # a mean is tried of one micro-batch
        pytest.param(PP, 4, {"criterion": lambda *given: _mean_as_sum(*given)[0]}, WITH, marks=pytest.mark.slow),
    ],
)
def test_packed_rows_and_a_criterion_are_tried_too(
    layout: dict[str, Any], world_size: int, given: dict[str, Any], what: str
) -> None:
    report = check_layout(CheckedModel(llama(), **given), layout, world_size)
    own, further = report.proved
    assert further == own + what and not report.findings + report.not_checked


def test_faults_of_packed_rows_and_of_a_criterion_are_found_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PackedRow, "cuts", lambda *given: [0, *(each + 1 for each in CUTS(*given)[1:-1]), CUTS(*given)[-1]]
    )
    report = check_layout(CheckedModel(llama(), packed_rows=1, criterion=_mean_as_sum), PP, 2)
    packed, criterion = report.findings
    assert len(report.proved) == 1 and "packed rows: " in packed and f"{WITH[2:]}: " in criterion


@pytest.mark.parametrize(
    ("model", "given", "reason"),
    [
        (llama, {"criterion": lambda outputs, batch: batch["weights"].sum()}, "KeyError: 'weights'"),
        (lambda: model_of("bert/BertForMaskedLM", None), {"packed_rows": 1}, "makes its masks without position_ids"),
    ],
)
def test_what_else_cannot_be_tried_is_told(model: Callable[[], nn.Module], given: dict[str, Any], reason: str) -> None:
    report = check_layout(CheckedModel(model(), **given), TP, 2)
    [line] = report.not_checked
    assert len(report.proved) == 1 and reason in line and not report.findings


def test_packed_rows_are_known_by_the_first_batch() -> None:
    places = torch.tensor([0, 1, 2, 0, 1])
    samples = [{"input_ids": torch.arange(5), "position_ids": each} for each in (torch.arange(5), places, places)]
    documents = [[{"input_ids": torch.arange(3), "labels": torch.arange(3)}] * 2]
    loaders = [
        None,
        DataLoader(samples[:1]),
        DataLoader(samples, 3),
        DataLoader([each | {"attention_mask": torch.ones(5)} for each in samples], 3),
        DataLoader(documents, collate_fn=PackingCollator()),
    ]
    batches = [partial(before_boost._first_samples, loader) for loader in loaders]
    found = [before_boost._packed_rows(*each, llama()) for each in zip(loaders, batches, strict=True)]
    assert found == [0, 0, 3, 0, 1]
    files = {before_boost._cache_file(llama(), TP, 2, loader) for loader in loaders}
    assert len(files) == 4  # two have samples of the same entries


def test_large_layouts_are_tried_by_their_axes() -> None:
    options = {"tp_size": 8, "cp_size": 8, "pp_size": 16, "num_microbatches": 64, "precision": "bf16"}
    sizes = [
        ([small[f"{axis}_size"] for axis in ("tp", "pp", "cp", "ep", "dp")], count)
        for small, count in checked_layouts(options, 8 * 8 * 16 * 64)
    ]
    assert sizes == [([2, 2, 2, 1, 1], 8), ([8, 1, 1, 1, 1], 8), ([1, 1, 8, 1, 1], 8), ([1, 8, 1, 1, 1], 8)]


def test_what_cannot_be_checked_is_one_sentence() -> None:
    report = check_layout(CheckedModel(nn.Linear(3, 5)), TP, 2)
    [reason] = report.not_checked
    assert reason.startswith("Linear, tp 2 x pp 1 x dp 1, not checked: ") and not report.findings


def test_a_copy_has_at_least_the_parts_of_the_model() -> None:
    with torch.device("meta"):
        model = BeitForImageClassification(BeitConfig())  # small copies also have a token for masks
        assert check_layout(CheckedModel(model), TP, 2).proved
        model.added = nn.Parameter(torch.empty(3))
    [line] = check_layout(CheckedModel(model), TP, 2).not_checked
    assert line.endswith("not checked: its parameters are not those that its class makes of its configuration")


def test_parts_of_different_widths_and_what_lies_between_are_copied() -> None:
    kind = transformers.MusicgenForConditionalGeneration
    parts = (transformers.T5Config(), transformers.EncodecConfig(), transformers.MusicgenDecoderConfig())
    config = transformers.MusicgenConfig(**dict(zip(("text_encoder", "audio_encoder", "decoder"), parts, strict=True)))
    with torch.device("meta"):
        report = check_layout(CheckedModel(kind(config)), PP, 2)
    assert report.proved and not report.findings + report.not_checked, report


@pytest.mark.parametrize(
    ("layout", "world_size", "name"),
    [
        (TP, 2, "CLIPModel"),
        (TP | PP, 4, "SiglipModel"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (PP, 2, "CLIPModel"),
                (PP, 4, "MetaClip2Model"),  # two replicas
                (TP | PP, 4, "ChineseCLIPModel"),
                (TP | PP, 4, "AltCLIPModel"),
                (TP | PP, 4, "OwlViTModel"),
                ({"pp_size": 4}, 4, "Owlv2Model"),
            ]
        ),
    ],
)
def test_pairs_of_texts_and_images_are_trained_by_their_own_loss(
    layout: dict[str, Any], world_size: int, name: str
) -> None:
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        report = check_layout(CheckedModel(model_class(model_class.config_class())), layout, world_size)
    assert report.proved and not report.findings + report.not_checked, report


@pytest.mark.parametrize(
    "head",
    [
        HeadClass("detr", "DetrForObjectDetection", (("auxiliary_loss", True),)),
        pytest.param(HeadClass("grounding_dino", "GroundingDinoForObjectDetection"), marks=pytest.mark.slow),
    ],
    ids=lambda head: head.family,
)
def test_detectors_that_stack_the_outputs_of_layers_have_whole_sequences(head: HeadClass) -> None:
    """Grounding DINO also has texts beside its images, and labels that are no tensor."""
    model = twin_of(head).build()
    report = check_layout(CheckedModel(model), TP, 2)
    assert report.proved and not report.findings + report.not_checked, report
    refused = check_layout(CheckedModel(model), SP, 2)
    assert not refused.proved and "whose plan does not tell where its tokens meet; use" in refused.not_checked[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "changes", "finding"),
    [
        ("doge", "DogeForCausalLM", {"is_moe": True, "num_experts": 16}, "first unsqueeze"),  # by the router
        ("doge", "DogeForCausalLM", {"is_moe": False}, None),
        ("nllb_moe", "NllbMoeForConditionalGeneration", {}, "NllbMoeTop2Router"),  # by places of experts
        ("nllb_moe", "NllbMoeForConditionalGeneration", {"expert_capacity": 1_000_000}, None),
        ("switch_transformers", "SwitchTransformersForConditionalGeneration", {}, None),  # places for each sample
    ],
)
def test_samples_that_are_mixed_are_found_also_where_boost_knows_nothing_of_it(
    family: str, name: str, changes: dict[str, Any], finding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = twin_of(HeadClass(family, name))
    config = type(twin.config)(**{**twin.config.to_dict(), **changes})
    subject = CheckedModel(replace(twin, config=config).build())
    if finding is not None:
        assert "use one replica and num_microbatches=1" in check_layout(subject, PP, 2).not_checked[0]
    monkeypatch.setattr(input_checks, "_MIXERS", {})
    report = check_layout(subject, PP, 2)
    assert len(report.proved) == 1 if finding is None else finding in report.findings[0], report


@pytest.mark.slow
def test_rounding_that_the_first_step_amplifies_is_no_finding() -> None:
    """D-FINE computes in fp32: its second step differs by 3e-3 under tp2, and not at all in fp64."""
    report = check_layout(CheckedModel(model_of("d_fine/DFineForObjectDetection", None)), TP, 2)
    assert report.proved and not report.findings + report.not_checked, report


@pytest.mark.slow
def test_a_model_whose_images_were_not_tried_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_twin, "STYLES", {"pictures": _fails})
    report = check_layout(CheckedModel(model_of("llava/LlavaForConditionalGeneration", {})), TP, 2)
    [line] = report.not_checked
    assert report.proved and line.startswith("LlavaForConditionalGeneration, images not checked: no batch of images")


class _ReadsValues(nn.Module):
    """Of a class that no census has; its control flow depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) if x.sum().item() > 0 else self.first(x)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": torch.ones(4, 3)}, "not checked: model class _ReadsValues"),
        ({"y": torch.ones(4, 3)}, "TypeError"),
        (None, "boost() got no model with values and data loader"),
    ],
)
def test_a_model_of_ones_own_is_one_line(batch: dict[str, Tensor] | None, said: str) -> None:
    subject = CheckedModel(_ReadsValues(), lambda out, _: out.square().mean(), batch and (lambda: batch))
    report = check_layout(subject, TP, 2)
    assert [said in line for line in report.not_checked] == [True] and not report.findings, report


def test_a_forward_set_on_a_module_is_tried_as_it_is() -> None:
    """A copy by the class would not have it."""
    model, ids = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)), torch.arange(1, 33).view(4, 8)
    model.model.layers[1].mlp.forward = MethodType(_mlp(lambda x, y: (x * y).softmax(-1)), model.model.layers[1].mlp)
    assert not check_layout(CheckedModel(model), TP, 2).proved
    report = check_layout(CheckedModel(model, batch=lambda: {"input_ids": ids, "labels": ids}), TP, 2)
    assert "model.layers.1.mlp" in "".join(report.findings), report


def _fails(x: Tensor) -> Tensor:
    if x.requires_grad and dist.is_initialized():
        raise ValueError("no")
    return x


def test_what_fails_under_the_layout_is_told_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", _layer(_fails))
    report = check_layout(CheckedModel(llama()), TP, 2)
    assert "does not train under the layout: ValueError: no" in report.not_checked[0] and not report.findings


class _Counting(Dataset):
    """Samples of random numbers, whose generator and count of calls a check must not move."""

    def __init__(self) -> None:
        self.numbers, self.calls = torch.Generator().manual_seed(1), 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        self.calls += 1
        return torch.randn(3, generator=self.numbers)


def test_the_caller_notices_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job, seen = {"num_processes": 2}, []
    monkeypatch.setattr(PartialState, "_shared_state", job)  # by which losses would reduce over the ranks of a job
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda *args: (seen.append(_state()), MLP(*args))[1])
    data = _Counting()
    numbers = data.numbers.get_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            report = check_layout(CheckedModel(llama()), TP, 2)
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    loader = DataLoader(data, 4, collate_fn=lambda samples: {"x": torch.stack(samples)})
    batch = before_boost._first_samples(loader)
    assert len(report.proved) == 1 and batch["x"].shape == (4, 3)
    assert seen and not any(seen) and PartialState._shared_state is job
    assert data.calls == 0 and torch.equal(data.numbers.get_state(), numbers)


def _state() -> dict[str, Any]:
    return dict(PartialState._shared_state)


def _in_a_job(mode: str, folder: str) -> str:
    os.environ["XDG_CACHE_HOME"] = folder
    before = os.environ.pop("BOOSTER_CHECK_LAYOUT", None)
    model = LlamaForCausalLM(llama().config)
    weights = {name: param.clone() for name, param in model.named_parameters()}
    try:
        plugin = HybridParallelPlugin(**TP, check_layout=mode)
        Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except ConfigurationError as error:
        assert all(torch.equal(param, weights[name]) for name, param in model.named_parameters())
        return str(error)
    finally:
        os.environ["BOOSTER_CHECK_LAYOUT"] = before or "off"
    return "boosted"


@distributed(2)
def test_boost_refuses_on_all_ranks_before_anything_is_changed(tmp_path: str) -> None:
    modeling_llama.LlamaMLP.forward = FAULTS["softmax"][1]
    try:
        assert "model.layers.0.mlp.down_proj" in _in_a_job("refuse", f"{tmp_path}/faulty")
        assert [_in_a_job(mode, f"{tmp_path}/faulty") for mode in ("warn", "off")] == ["boosted"] * 2
    finally:
        modeling_llama.LlamaMLP.forward = MLP
    assert _in_a_job("refuse", f"{tmp_path}/sound") == "boosted"


@distributed(2)
def test_a_criterion_that_boost_did_not_get_is_told_once() -> None:
    told: list[str] = []
    before, before_boost.log_once = before_boost.log_once, lambda *said: told.append(said[1])
    mode = os.environ.pop("BOOSTER_CHECK_LAYOUT", None)
    try:
        booster = Booster(plugin=HybridParallelPlugin(**TP, check_layout="warn"))
        model = LlamaForCausalLM(llama().config)
        os.environ["BOOSTER_CHECK_LAYOUT"] = "off"
        model, optimizer, own = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), _mean_as_sum)
        del os.environ["BOOSTER_CHECK_LAYOUT"]
        batch = {"input_ids": torch.arange(1, 9)[None], "labels": torch.arange(1, 9)[None]}
        for criterion in (None, own, _sum_over_rows, _sum_over_rows):
            booster.execute_pipeline(batch, model, criterion, optimizer)
    finally:
        before_boost.log_once = before
        os.environ["BOOSTER_CHECK_LAYOUT"] = mode or "off"
    assert told == [
        "the criterion is not checked, because execute_pipeline() got it alone; give it to boost(), too"
    ] * (dist.get_rank() == 0)


def test_an_answer_is_kept_until_a_source_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[int] = []
    monkeypatch.setattr(layout_check, "check_layout", lambda *_: asked.append(1) or LayoutReport(findings=["wrong"]))
    for changed in (0, 0, 1):
        monkeypatch.setattr(before_boost, "_sources", lambda changed=changed: changed)
        objects = SimpleNamespace(model=llama(), criterion=None, dataloaders=[])
        assert before_boost._report(objects, TP, 2).findings == ["wrong"]
    assert len(asked) == 2


def _talk() -> tuple[list[float], float]:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    total, parts = torch.tensor([float(rank + 1)]), torch.empty(2)
    work = dist.all_reduce(total, async_op=True)
    received = torch.empty(1)
    works = [dist.irecv(received, other), dist.isend(torch.tensor([10.0 + rank]), other)]
    drawn = torch.rand(()).item()
    for each in (work, *works):
        each.wait()
    dist.all_gather_into_tensor(parts, received)
    return [*total.tolist(), *parts.tolist()], drawn


def test_threads_talk_as_ranks_do() -> None:
    results = run_on_threads(_talk, 2)
    assert [values for values, _ in results] == [[3.0, 11.0, 10.0]] * 2
    assert results[0][1] == results[1][1]  # each rank has torch's random numbers for itself


def _compute_for_long() -> None:
    if dist.get_rank() == 0:
        time.sleep(1)
    dist.barrier()


def test_a_rank_that_takes_too_long_ends_with_the_others() -> None:
    world, threads = dist.distributed_c10d._world, threading.active_count()
    with pytest.raises(TimeoutError):
        run_on_threads(_compute_for_long, 2, timeout_s=0.2)
    assert threading.active_count() > threads and dist.distributed_c10d._world is not world
    while threading.active_count() > threads:
        time.sleep(0.1)
    assert not dist.is_initialized()
    dist.distributed_c10d._world = world


def _wait_in_vain() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), 1)


def _fail_alone() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no")
    dist.barrier()


@pytest.mark.parametrize(("function", "error"), [(_wait_in_vain, RuntimeError), (_fail_alone, ValueError)])
def test_no_thread_waits_forever(function: Callable[[], None], error: type[Exception]) -> None:
    with pytest.raises(error):
        run_on_threads(function, 3)
