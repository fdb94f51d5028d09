"""`reproducible=True`: weights, losses and gradient norms are the same bits under every layout."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.reproducible.feature import check_reproducible
from zoo_tests.campaigns.bits.training import Bits
from zoo_tests.campaigns.bits.trials import CUT, WHOLE, Trial, recipe_of, reference_of
from zoo_tests.campaigns.census.classes import HeadClass
from zoo_tests.campaigns.census.trained import twin_of
from zoo_tests.harness.case import Recipe
from zoo_tests.harness.optimizers import Lamb
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.toy import Toy, global_batch, mean_square, share_of, toy

STEPS = 3


@cache
def _reference(recipe: Recipe, trial: Trial) -> Bits:
    return trial.run(recipe)


@pytest.mark.parametrize(
    ("family", "precision", "trial"),
    [
        ("llama", "bf16", Trial("pp2")),
        ("llama", "bf16", Trial("dp2", 2, ordinary_loop=True)),
        ("llama", "bf16", Trial("dp2", 3, accumulation=2)),
        ("llama", "bf16", Trial("dp2", options=(("gradient_checkpointing", "full"),), resumed_from="pp2")),
        ("llama", "bf16", Trial("tp4")),
        ("bert", "fp32", Trial("tp2", 3, ordinary_loop=True)),
        ("bert", "fp32", Trial("cp2")),
        pytest.param("bert", "fp32", Trial("tp2", options=CUT), marks=pytest.mark.slow),
        pytest.param("llama", "bf16", Trial("cp2tp2", 2, ordinary_loop=True), marks=pytest.mark.slow),
        pytest.param("gpt2", "fp32", Trial("tp2", options=WHOLE), marks=pytest.mark.slow),
        pytest.param("gpt2", "fp32", Trial("tp2pp2"), marks=pytest.mark.slow),
        pytest.param("t5", "bf16", Trial("tp2pp2"), marks=pytest.mark.slow),
        pytest.param("mixtral", "fp32", Trial("tp2dp2", 2), marks=pytest.mark.slow),
        pytest.param("gpt2", "fp32", Trial("tp4", options=CUT), marks=pytest.mark.slow),
        pytest.param("t5", "bf16", Trial("tp2", 2, options=CUT, ordinary_loop=True), marks=pytest.mark.slow),
        pytest.param("mixtral", "bf16", Trial("tp2pp2", options=CUT), marks=pytest.mark.slow),
        pytest.param("bert", "fp32", Trial("pp2dp2"), marks=pytest.mark.slow),
        pytest.param(
            "t5", "fp32", Trial("pp2", options=(("pp_style", "zbv"),), ordinary_loop=True), marks=pytest.mark.slow
        ),
        pytest.param("mixtral", "fp32", Trial("dp4", 0), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_layout_leaves_the_bits_of_one_process(family: str, precision: str, trial: Trial) -> None:
    """Dropout, clipping, tied weights, ragged labels, and 9 samples that no layout shares evenly."""
    recipe = recipe_of(family, precision, STEPS)
    expected, found = _reference(recipe, reference_of(trial, family)), trial.run(recipe)
    assert found.weights == expected.weights and found.norms == expected.norms
    assert trial.accumulation is not None or found.losses == expected.losses


@pytest.mark.slow
def test_without_the_option_bits_differ() -> None:
    recipe = recipe_of("llama", "bf16", STEPS)
    plain = Trial().run(recipe, is_on=False)
    assert not Trial("dp2").run(recipe, is_on=False).same(plain)
    assert not plain.same(_reference(recipe, Trial()))  # units of one sample, other random numbers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"} | {"tp_size": 2},
            "sequence_parallelism_mode='all_to_all' multiplies parts of sequences by whole weights",
        ),
        (
            {"enable_sequence_parallelism": True, "enable_sequence_overlap": True} | {"tp_size": 2},
            "enable_sequence_overlap=True multiplies the tokens of each rank",
        ),
        (
            {"enable_sequence_parallelism": True, "tp_size": 2, "reproducible_sequence_blocks": 3},
            "tp_size=2 does not divide reproducible_sequence_blocks=3, as enable_sequence_parallelism=True needs",
        ),
        (
            {"tp_size": 2, "cp_size": 2, "reproducible_sequence_blocks": 2},
            r"tp_size\*cp_size=2\*2=4 does not divide reproducible_sequence_blocks=2, as cp_size=2 needs; use",
        ),
        ({"cp_size": 3}, "cp_size=3 is no power of two, as the blocks of layers that these ranks share"),
        ({"cp_size": 4, "reproducible_blocks": 2}, "cp_size=4 does not divide reproducible_blocks=2; use"),
        ({"precision": "fp16"}, "precision='fp16' has a loss scale that overflows at other steps"),
        ({"compile_layers": True}, "compile_layers=True chooses kernels by measured time"),
        ({"offload_optimizer": "cpu"}, "offload_optimizer='cpu' adds up gradients outside of the device's memory"),
        ({"reproducible": False, "reproducible_unit": 2}, "reproducible_unit=2 needs reproducible=True"),
        ({"reproducible": False, "reproducible_blocks": 2}, "reproducible_blocks=2 needs reproducible=True"),
        ({"reproducible_blocks": 2, "tp_size": 4}, "tp_size=4 does not divide reproducible_blocks=2; use"),
    ],
)
def test_options_that_do_not_hold_are_refused(options: dict, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        HybridParallelPlugin(**{"reproducible": True, **options})
    assert str(caught.value).count("; ") == 1


class _Normed(Toy):
    """With a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)


class _Masked(Toy):
    """Hides features by numbers of Python and numpy, as SpecAugment does."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        kept = numpy.random.rand(*x.shape) < random.uniform(0.3, 0.7)
        return super().forward(x * torch.from_numpy(kept))


def _losses_of_masked(rows: int) -> list[float]:
    """Of two steps over batches of `rows` samples."""
    random.seed(dist.get_rank())
    numpy.random.seed(dist.get_rank())
    torch.manual_seed(4)
    model = _Masked()
    booster = Booster(plugin=HybridParallelPlugin(reproducible=True, seed=3))
    model, optimizer, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_square)
    losses = []
    for step in range(2):
        share = share_of(global_batch(step, rows, torch.float32))
        losses.append(booster.execute_pipeline(iter([share]), model, optimizer=optimizer).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_what_a_forward_draws_from_numpy_follows_the_position_of_a_sample() -> None:
    assert run_on_ranks(1, _losses_of_masked, 4) * 2 == run_on_ranks(2, _losses_of_masked, 4)


@distributed(2)
def test_what_does_not_hold_is_refused_on_all_ranks() -> None:
    normed, model, double = _Normed(), toy().float(), toy()
    cases = [
        (double, torch.optim.SGD(double.parameters(), lr=0.1), "is in float64, .*; use model.float\\(\\)"),
        (normed, torch.optim.SGD(normed.parameters(), lr=0.1), "norm is a BatchNorm1d, whose running statistics"),
        (model, Lamb(model.parameters()), "Lamb updates a value from other values of its parameter"),
    ]
    for each, optimizer, said in cases:
        with pytest.raises(ConfigurationError, match=said):
            Booster(plugin=HybridParallelPlugin(reproducible=True)).boost(each, optimizer)
    hooked = recipe_of("llama", "fp32", 1).model()
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    for each, why in ((toy().float(), ""), (hooked, "model.layers.0 has .* a part of each sequence")):
        plugin = HybridParallelPlugin(reproducible=True, reproducible_sequence_blocks=2)
        said = f"reproducible_sequence_blocks=2 cannot divide the sequences of {type(each).__name__}: .*{why}"
        with pytest.raises(ConfigurationError, match=said) as caught:
            Booster(plugin=plugin).boost(each, torch.optim.SGD(each.parameters(), lr=0.1))
        assert str(caught.value).count("; ") == 1
    with pytest.raises(
        ConfigurationError, match="the reproducible_blocks=1 of Toy, because .*; use a product"
    ) as caught:
        Booster(plugin=HybridParallelPlugin(reproducible=True, tp_size=2)).boost(toy().float())
    assert str(caught.value).count("; ") == 1


@pytest.mark.parametrize(
    ("device", "precision", "workspace", "said"),
    [
        ("cuda", "bf16", ":4096:8", "refuses 16-bit products on GPUs, which rounded in another way from run to run"),
        ("cuda", "fp32", None, "CUBLAS_WORKSPACE_CONFIG is not set; set CUBLAS_WORKSPACE_CONFIG=:4096:8 before"),
        ("cuda", "fp32", ":0:0", "CUBLAS_WORKSPACE_CONFIG is :0:0; set"),
        ("mps", "fp32", None, "is not proved for kernels of the device 'mps'; train on CPUs or CUDA GPUs"),
    ],
)
def test_kernels_that_are_not_pinned_are_refused(
    device: str, precision: str, workspace: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    with pytest.raises(ConfigurationError, match=said):
        check_reproducible(toy(), [], 1, torch.device(device), precision)


@distributed(2)
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}, {"reproducible_sequence_blocks": 3}], ids=str)
def test_outputs_are_whole_while_layers_run_in_blocks(layout: dict[str, int]) -> None:
    """In training, in evaluation and in `generate`; 67 tokens and 7 positions are no whole blocks."""
    torch.manual_seed(0)
    model = recipe_of("llama", "fp32", 1).model()
    ids = torch.randint(model.config.vocab_size, (2, 7))
    with torch.no_grad():
        expected = model.eval()(ids, output_hidden_states=True)
        logits = expected.logits
        tokens = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = Booster(plugin=HybridParallelPlugin(reproducible=True, **layout)).boost(model, optimizer)
    with torch.no_grad():
        found = model(input_ids=ids, output_hidden_states="pp_size" not in layout)
    torch.testing.assert_close(found.logits, logits)
    if "pp_size" not in layout:
        torch.testing.assert_close(found.hidden_states, expected.hidden_states)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0), tokens)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).logits.detach(), logits)


@distributed(1)
def test_a_family_whose_sequences_are_not_cut_in_blocks_is_not_refused() -> None:
    """Its plan is trusted with sequence parallelism, and not in blocks; the defaults must not ask for these."""
    twin = twin_of(HeadClass("lfm2", "Lfm2ForCausalLM"))
    model, booster = twin.build(), Booster(plugin=HybridParallelPlugin(reproducible=True))
    batch = twin.batch(model, 0, 2)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.isfinite(booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss)


def _boosted(**options: Any) -> tuple[Booster, nn.Module, torch.optim.Optimizer]:
    model = toy(torch.float32)
    booster = Booster(plugin=HybridParallelPlugin(reproducible=True, **options))
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@distributed(2)
def test_steps_that_do_not_hold_are_refused_on_all_ranks() -> None:
    x = torch.randn(3, 5)
    booster, model, optimizer = _boosted(reproducible_unit=2)
    with pytest.raises(ConfigurationError, match="reproducible_unit=2 does not divide the 3 samples of a replica"):
        model(x=x)
    booster, model, optimizer = _boosted()
    with pytest.raises(ConfigurationError, match="gradients below 8192, and the largest ones of this step add up to"):
        booster.execute_pipeline(
            iter([{"x": x}]), model, criterion=lambda outputs, _: outputs.sum() * 1e5, optimizer=optimizer
        )
    booster, model, optimizer = _boosted(nonfinite="skip")
    booster.execute_pipeline(
        iter([{"x": x}]), model, criterion=lambda outputs, _: outputs.sum() * torch.inf, optimizer=optimizer
    )
    optimizer.step()
    assert optimizer.step_was_skipped
    booster, model, optimizer = _boosted()
    with pytest.raises(ConfigurationError, match="mean rounds in another way than that of all"):
        booster.backward(model(x=x).square().mean(), optimizer)
