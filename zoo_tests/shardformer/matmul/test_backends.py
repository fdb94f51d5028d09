"""Matrix products in 8 bit: close to exact ones where sizes allow them, exact where not, and in the right layers.

What breaks here first: a scale that overflows, a gradient of a transposed weight.
Look in `shardformer/matmul/backends.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.matmul import backends
from shardformer.matmul.backends import FP8, NATIVE, Float8Matmul
from zoo_tests.harness.ranks import run_on_ranks


def _factors(tokens: int, wide: int, narrow: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Input [tokens, narrow], weight [wide, narrow], gradient of the output [tokens, wide]."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((tokens, narrow), (wide, narrow), (tokens, wide))
    return tuple(torch.randn(shape, generator=generator) * scale for shape in shapes)


def _error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_products_are_close_whatever_the_magnitude(scale: float) -> None:
    x, weight, grad = _factors(37, 48, 32, scale)  # tokens that 16 does not divide
    ways = {
        "forward": lambda by: by.forward(x, weight),
        "grad_input": lambda by: by.grad_input(grad, weight),
        "grad_weight": lambda by: by.grad_weight(grad, x),
        "transposed": lambda by: by.grad_weight(grad, x, transposed=True),
    }
    for name, way in ways.items():
        # Three bits behind the point of e4m3 and two of e5m2 leave a few per cent.
        assert 1e-3 < _error(way(FP8), way(NATIVE)) < 0.08, name


def test_sizes_that_do_not_fit_are_multiplied_as_ever() -> None:
    x, weight, grad = _factors(16, 24, 40)
    assert torch.equal(FP8.forward(x, weight), NATIVE.forward(x, weight))
    assert torch.equal(FP8.grad_input(grad, weight), NATIVE.grad_input(grad, weight))
    assert torch.equal(FP8.grad_weight(grad, x), NATIVE.grad_weight(grad, x))


def test_zeros_stay_zeros() -> None:
    x, weight, _ = _factors(16, 32, 32)
    assert FP8.forward(torch.zeros_like(x), weight).eq(0).all()


def _roundings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of all tensors that are rounded from here on."""
    rounded: list[int] = []
    original = backends._Rounded.__init__

    def count(self: Any, x: Tensor, is_gradient: bool = False) -> None:
        rounded.append(x.data_ptr())
        original(self, x, is_gradient)

    monkeypatch.setattr(backends._Rounded, "__init__", count)
    return rounded


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_weight_is_rounded_once_in_a_step(is_transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches: same bits as without reuse; a weight that was written to is rounded again."""
    x, weight, grad = _factors(16, 32, 48)
    parameter = nn.Parameter(weight.t().contiguous() if is_transposed else weight.clone())
    backend, rounded = Float8Matmul(), _roundings(monkeypatch)

    def both() -> tuple[Tensor, Tensor]:
        used = parameter.t() if is_transposed else parameter
        return backend.forward(x, used), backend.grad_input(grad, used)

    with torch.no_grad():
        apart = both()
        assert rounded.count(parameter.data_ptr()) == 2
        rounded.clear()
        with backend.reusing_weights():
            for found in (both(), both()):
                assert all(map(torch.equal, found, apart))
            assert rounded.count(parameter.data_ptr()) == 1
            parameter.mul_(2.0)
            assert not torch.equal(both()[0], apart[0])
        parameter.data.mul_(0.5)  # as the optimizer writes: the parameter's version does not change
        assert all(map(torch.equal, both(), apart)), "a rounded weight outlives its step"


def test_an_input_of_two_layers_and_a_gradient_of_two_products_are_rounded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """17 tokens, which products over tokens pad: same bits as without reuse; new values are rounded again."""
    x, weight, grad = _factors(17, 32, 48)
    backend, rounded = Float8Matmul(), _roundings(monkeypatch)

    def all_products() -> tuple[Tensor, ...]:
        out = backend.forward(x, weight), backend.forward(x, weight)
        return (*out, backend.grad_input(grad, weight), backend.grad_weight(grad, x))

    with torch.no_grad():
        apart = all_products()
        rounded.clear()
        with backend.reusing_weights():
            assert all(map(torch.equal, all_products(), apart))
            assert rounded.count(x.data_ptr()) == rounded.count(grad.data_ptr()) == 1
            x.mul_(2.0)
            assert not torch.equal(all_products()[0], apart[0])
        assert not backend._latest, "an activation outlives its step"


@pytest.mark.parametrize("is_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fewer_passes_round_to_the_same_bits(dtype: torch.dtype, is_gradient: bool) -> None:
    """The plain definition: largest value, division and clamp, each a pass over fp32."""
    kind = torch.float8_e5m2 if is_gradient else torch.float8_e4m3fn
    largest = torch.finfo(kind).max
    for seed, scale in enumerate((1e-30, 1e-6, 1.0, 3e4)):
        x = (torch.randn(64, 80, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
        unit = (x.abs().amax().float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
        expected = (x.float() / unit).clamp(-largest, largest).to(kind)
        found = backends._Rounded(x, is_gradient)
        assert torch.equal(found.scale, unit)
        assert torch.equal(found.values.view(torch.uint8), expected.view(torch.uint8))


def _losses(options: dict[str, Any], family: str) -> list[float]:
    torch.manual_seed(0)
    if family == "llama":
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
        sizes["num_hidden_layers"] = 2 * options.get("pp_size", 1)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes))
    else:
        dropouts = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=32, **dropouts))
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    ids = torch.randint(0, 96, (8, 21), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(8):
        batch = {"input_ids": ids, "labels": ids}
        losses.append(booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "family", "options"),
    [
        (1, "llama", {}),
        (2, "gpt2", {"tp_size": 2}),
        pytest.param(
            2,
            "llama",
            {"tp_size": 2, "enable_sequence_parallelism": True, "enable_sequence_overlap": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(2, "llama", {"pp_size": 2, "pp_style": "zero_bubble"}, marks=pytest.mark.slow),
        pytest.param(2, "llama", {"cp_size": 2, "gradient_checkpointing": "full"}, marks=pytest.mark.slow),
    ],
)
def test_eight_bits_train_like_sixteen(ranks: int, family: str, options: dict[str, Any]) -> None:
    found = run_on_ranks(ranks, _losses, {**options, "precision": "fp8"}, family)[0]
    expected = run_on_ranks(ranks, _losses, {**options, "precision": "bf16"}, family)[0]
    assert expected[-1] < 0.9 * expected[0], "nothing is learnt"
    assert found != expected, "nothing was multiplied in 8 bit"
    worst = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    assert worst < 0.01, f"losses are {worst:.3f} apart"


def test_heads_and_embeddings_keep_their_precision() -> None:
    assert run_on_ranks(1, _multiplied) == [
        ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    ]


def _multiplied() -> list[str]:
    """The last names of the layers that multiply in 8 bit."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes))
    model = Booster(plugin=HybridParallelPlugin(precision="fp8")).boost(model)
    changed = [name for name, module in model.unwrap().named_modules() if "matmul_backend" in vars(module)]
    return sorted({name.rpartition(".")[2] for name in changed})
