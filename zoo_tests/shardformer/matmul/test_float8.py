"""Matrix products in 8 bit: close to exact ones where sizes allow them, exact where not, and in the right layers.

What breaks here first: a scale that overflows, a gradient of a transposed weight.
Look in `shardformer/matmul/float8.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.features.low_bits import multiply_in_fp8
from shardformer.distributed import collectives
from shardformer.matmul import float8
from shardformer.matmul.float8 import FP8_RECIPES, Float8, RowsOfExperts, swizzled
from shardformer.matmul.native import NATIVE
from shardformer.utils.untraced import define_operators
from zoo_tests.harness.ranks import run_on_ranks

_SHAPES = ((37, 32), (64, 32), (37, 64))  # of input, weight and gradient


def _factors(tokens: int, wide: int, narrow: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Input [tokens, narrow], weight [wide, narrow], gradient of the output [tokens, wide]."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((tokens, narrow), (wide, narrow), (tokens, wide))
    return tuple(torch.randn(shape, generator=generator) * scale for shape in shapes)


class _Kernels(TorchDispatchMode):
    """Names of operators that read or write memory, and the bytes of tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in ("detach", "empty", "_unsafe_view", "_reshape_alias"):
            self.names.append(name)
            tensors = [each for each in tree_leaves((args, kwargs, found)) if isinstance(each, Tensor)]
            self.bytes += sum(each.numel() * each.element_size() for each in tensors)
        return found


def _error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


# Three bits behind the point of e4m3, in products of the forward and the backward pass; two of e5m2.
_ERRORS = {"tensorwise": (0.04, 0.08, 0.08), "rowwise": (0.04, 0.04, 0.0), "mxfp8": (0.04, 0.04, 0.04)}


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_products_are_close_whatever_the_magnitude(scale: float, recipe: str) -> None:
    x, weight, grad = _factors(37, 64, 32, scale)  # tokens that 16 does not divide
    backend, (forward, grad_input, grad_weight) = FP8_RECIPES[recipe](), _ERRORS[recipe]
    ways = {
        "forward": (forward, lambda by: by.forward(x, weight)),
        "grad_input": (grad_input, lambda by: by.grad_input(grad, weight)),
        "grad_weight": (grad_weight, lambda by: by.grad_weight(grad, x)),
        "transposed": (grad_weight, lambda by: by.grad_weight(grad, x, transposed=True)),
    }
    for name, (most, way) in ways.items():
        error = _error(way(backend), way(NATIVE))
        assert most / 4 < error < most if most else error == 0, f"{name}: {error}"


def test_scales_of_their_own_keep_small_rows_and_blocks() -> None:
    """Next to values a million times as large, a matrix has lost the small ones; rows, and blocks, have not."""
    x, weight, _ = _factors(32, 32, 64)
    x[1] *= 1e-7  # a row
    weight[:, 32:] *= 1e-7  # blocks of all rows

    def error(recipe: str, rows: slice, columns: slice) -> float:
        mine = torch.zeros_like(x)
        mine[rows, columns] = x[rows, columns]
        return _error(FP8_RECIPES[recipe]().forward(mine + 0.0, weight)[rows], NATIVE.forward(mine, weight)[rows])

    def of_row(recipe: str) -> float:
        return _error(FP8_RECIPES[recipe]().forward(x, weight)[1], NATIVE.forward(x, weight)[1])

    assert of_row("tensorwise") > 0.5 and of_row("rowwise") < 0.04 and of_row("mxfp8") < 0.04
    small = slice(32, 64)
    assert error("rowwise", slice(0, 1), small) > 0.5 and error("mxfp8", slice(0, 1), small) < 0.04


def test_scales_of_blocks_are_powers_of_two_that_no_value_exceeds() -> None:
    """Also of peaks that are the end of the range, one rounding beyond, tiny, or zero."""
    x = _factors(8, 32, 96)[0]
    x[0], x[1], x[2], x[3] = 448.0, 448.0, 1e-42, 0.0
    x[1, 5] = torch.nextafter(torch.tensor(448.0), torch.tensor(500.0))
    rounded = float8._RoundedBlocks(x)
    unit = rounded.scale.float()
    peak = x.unflatten(1, (3, 32)).abs().amax(2)
    assert unit.log2().frac().eq(0).all() and unit[0].eq(1).all()
    normal = peak > 1e-30
    assert (peak / unit)[normal].le(448.0 * (1 + 1e-6)).all() and (peak / unit)[normal].gt(224.0).all()
    assert rounded.values.float().isfinite().all() and rounded.values[3].float().eq(0).all()
    assert _error(rounded._whole(), x) < 0.04


def test_scales_of_blocks_are_in_the_order_of_the_kernel() -> None:
    """The definition, one scale after the other; 130 rows and 5 blocks, which are padded to 256 and 8."""
    scale = torch.arange(130 * 5).view(130, 5).to(torch.uint8)
    found = swizzled(scale.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert len(found) == 256 * 8
    for row in range(130):
        for block in range(5):
            tile = row // 128 * 2 + block // 4
            place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            assert found[place] == scale[row, block]


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_kernels_of_gpus_take_what_is_rounded(recipe: str) -> None:
    """On the meta device torch checks dtypes, shapes and orders as for a GPU; outputs have the dtype of the input."""
    x, weight, grad = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in _SHAPES)
    backend = FP8_RECIPES[recipe]()
    with _Kernels() as kernels:
        found = backend.forward(x, weight), backend.grad_input(grad, weight), backend.grad_weight(grad, x)
    assert [tuple(each.shape) for each in found] == [(37, 64), (37, 32), (64, 32)]
    assert {each.dtype for each in found} == {x.dtype}
    assert kernels.names.count("_scaled_mm") == (2 if recipe == "rowwise" else 3)


@pytest.mark.parametrize("tokens", [0, 16])
def test_sizes_that_do_not_fit_are_multiplied_as_ever(tokens: int) -> None:
    x, weight, grad = _factors(tokens, 24, 40)
    for backend in (kind() for kind in FP8_RECIPES.values()):
        assert torch.equal(backend.forward(x, weight), NATIVE.forward(x, weight))
        assert torch.equal(backend.grad_input(grad, weight), NATIVE.grad_input(grad, weight))
        assert torch.equal(backend.grad_weight(grad, x), NATIVE.grad_weight(grad, x))


def test_operators_of_graphs_find_what_eager_products_find_and_know_no_input() -> None:
    """A graph writes new values to the memory of an input without a new version of it."""
    define_operators()
    kernel, (x, weight, grad) = Float8(), _factors(64, 32, 64)
    x, weight, bias = x.requires_grad_(), nn.Parameter(weight), nn.Parameter(weight[:, 0].detach().clone())
    with kernel.reusing_weights():
        for factor in (1.0, 3.0):
            x.data.mul_(factor)
            found = kernel.traced(x, weight, bias)
            assert torch.equal(found, Float8().forward(x, weight, bias))
            of_x, of_weight, of_bias = torch.autograd.grad(found, (x, weight, bias), grad)
            assert torch.equal(of_x, Float8().grad_input(grad, weight)) and torch.equal(of_bias, grad.sum(0))
            assert torch.equal(of_weight, Float8().grad_weight(grad, x))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_grouped_products_of_experts_are_close_and_gradients_of_weights_exact(is_transposed: bool) -> None:
    """Three experts, one without rows, and rows of no expert; a weight and its transpose are rounded once."""
    generator, ends = torch.Generator().manual_seed(1), torch.tensor([16, 16, 48], dtype=torch.int32)
    x, grad = (torch.randn(size, generator=generator).bfloat16() for size in ((56, 32), (56, 64)))
    weight = torch.randn(3, 64, 32, generator=generator).bfloat16()
    parameter = nn.Parameter(weight if is_transposed else weight.transpose(1, 2).contiguous())

    def gradients() -> list[Tensor]:
        own = x.clone().requires_grad_()
        out = F.grouped_mm(own, parameter.transpose(1, 2) if is_transposed else parameter, offs=ends)
        found = torch.autograd.grad(out[:48], (own, parameter), grad[:48])
        return [out.detach()[:48], found[0][:48], found[1]]

    expected, kernel = gradients(), FP8_RECIPES["rowwise"]()
    with RowsOfExperts(kernel):
        found = gradients()
        with kernel.reusing_weights():
            assert all(map(torch.equal, (*gradients(), *gradients()), (*found, *found)))
            assert len(kernel._experts) == 2
            with torch.no_grad():
                parameter.mul_(2.0)
            assert not torch.equal(gradients()[0], found[0])
    assert not kernel._experts, "a rounded weight outlives its step"
    assert all(0.01 < _error(a.float(), b.float()) < 0.04 for a, b in zip(found[:2], expected[:2], strict=True))
    assert torch.equal(found[2], expected[2])


def test_grouped_products_are_one_kernel_each_on_a_gpu() -> None:
    """On the meta device: torch checks dtypes, shapes and orders; what rounds rows and weights is the rest."""
    with torch.device("meta"):
        x, weight = torch.empty(56, 32, dtype=torch.bfloat16), torch.empty(3, 32, 64, dtype=torch.bfloat16)
        ends = torch.empty(3, dtype=torch.int32)
    leaves = [each.requires_grad_() for each in (x, weight)]
    with _Kernels() as kernels, RowsOfExperts(FP8_RECIPES["rowwise"]()):
        torch.autograd.grad(F.grouped_mm(x, weight, offs=ends).sum(), leaves)
    assert kernels.names.count("_scaled_grouped_mm") == 2 and kernels.names.count("_grouped_mm") == 1


def test_zeros_stay_zeros() -> None:
    x, weight, _ = _factors(16, 32, 32)
    for backend in (kind() for kind in FP8_RECIPES.values()):
        assert backend.forward(torch.zeros_like(x), weight).eq(0).all()


def _roundings(monkeypatch: pytest.MonkeyPatch, recipe: str = "tensorwise") -> list[int]:
    """The addresses of all tensors that are rounded from here on."""
    rounded: list[int] = []
    kind = FP8_RECIPES[recipe].kind
    original = kind.__init__

    def count(self: Any, x: Tensor, is_gradient: bool = False) -> None:
        rounded.append(x.data_ptr())
        original(self, x, is_gradient)

    monkeypatch.setattr(kind, "__init__", count)
    return rounded


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_weight_is_rounded_once_in_a_step(is_transposed: bool, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches: same bits as without reuse; a weight that was written to is rounded again.

    Rows and blocks of a weight and of its transpose are rounded apart.
    """
    x, weight, grad = _factors(16, 32, 64)
    parameter = nn.Parameter(weight.t().contiguous() if is_transposed else weight.clone())
    backend, rounded = FP8_RECIPES[recipe](), _roundings(monkeypatch, recipe)
    ways = 1 if recipe == "tensorwise" else 2

    def both() -> tuple[Tensor, Tensor]:
        used = parameter.t() if is_transposed else parameter
        return backend.forward(x, used), backend.grad_input(grad, used)

    with torch.no_grad():
        apart = both()
        assert rounded.count(parameter.data_ptr()) == (2 if ways == 1 else 3)
        rounded.clear()
        with backend.reusing_weights():
            for found in (both(), both()):
                assert all(map(torch.equal, found, apart))
            assert rounded.count(parameter.data_ptr()) == ways
            parameter.mul_(2.0)
            assert not torch.equal(both()[0], apart[0])
        parameter.data.mul_(0.5)  # as the optimizer writes: the parameter's version does not change
        assert all(map(torch.equal, both(), apart)), "a rounded weight outlives its step"


def test_an_input_of_two_layers_and_a_gradient_of_two_products_are_rounded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """17 tokens, which products over tokens pad: same bits as without reuse; new values are rounded again."""
    x, weight, grad = _factors(17, 32, 48)
    backend, rounded = Float8(), _roundings(monkeypatch)

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
        found = float8.Rounded(x, is_gradient)
        assert torch.equal(found.scale, unit)
        assert torch.equal(found.values.view(torch.uint8), expected.view(torch.uint8))


def test_a_matrix_is_rounded_in_three_passes() -> None:
    """16 bits are read twice; the quotient in fp32 is written and read once. Two further operators make the scale."""
    with _Kernels() as kernels:
        float8.Rounded(torch.empty(512, 512, dtype=torch.bfloat16, device="meta"))
    assert len(kernels.names) == 5, kernels.names
    assert 13 < kernels.bytes / 512**2 < 13.1


def _model(options: dict[str, Any], family: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "llama":
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
        sizes["num_hidden_layers"] = 2 * options.get("pp_size", 1)
        return LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes))
    if family == "mixtral":
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
        experts = {"num_hidden_layers": 2, "num_local_experts": 4, "experts_implementation": "grouped_mm"}
        return MixtralForCausalLM(MixtralConfig(vocab_size=96, **sizes, **experts))
    dropouts = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=32, **dropouts))


def _losses(options: dict[str, Any], family: str) -> list[float]:
    model = _model(options, family)
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
        (1, "llama", {"fp8_recipe": "rowwise"}),
        (2, "mixtral", {"ep_size": 2, "fp8_recipe": "rowwise"}),
        (2, "gpt2", {"tp_size": 2, "fp8_recipe": "mxfp8", "gradient_checkpointing": "operators"}),
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
    plain = {name: value for name, value in options.items() if name != "fp8_recipe"}
    expected = run_on_ranks(ranks, _losses, {**plain, "precision": "bf16"}, family)[0]
    assert expected[-1] < 0.9 * expected[0], "nothing is learnt"
    assert found != expected, "nothing was multiplied in 8 bit"
    worst = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    assert worst < 0.01, f"losses are {worst:.3f} apart"


def _of_stage(stage: int, family: str, options: dict[str, Any]) -> tuple[list[Any], dict[torch.dtype, int]]:
    """Losses and weights of two steps of an ordinary loop; values that the second one gathers, by their dtype."""
    model = _model(options, family)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp8", zero_stage=stage, **options))
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    ids = torch.randint(0, 96, (8, 21), generator=torch.Generator().manual_seed(model.mesh.rank("dp")))
    found, gathered = [], Counter[torch.dtype]()

    def counted(start: Callable[[Tensor, Tensor], Any], shard: Tensor, flat: Tensor) -> Any:
        gathered[flat.dtype] += flat.numel()
        return start(shard, flat)

    for exchange in {member.exchange for member in model.gathers.members}:
        exchange.gather_shard = partial(counted, exchange.gather_shard)
    for _ in range(2):
        gathered.clear()
        loss = model(input_ids=ids, labels=ids).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    values = dict(gathered)
    with model.summon_full_params():
        return [*found, *(param.detach().clone() for param in model.parameters())], values


_MATRICES = 2 * (4 * 64 * 64 + 3 * 64 * 128)  # of Llama's layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "family", "options", "in_bytes"),
    [
        (2, "llama", {"gradient_checkpointing": "full"}, 2 * _MATRICES),
        (4, "llama", {"tp_size": 2}, _MATRICES),
        (2, "mixtral", {"fp8_recipe": "rowwise"}, 0),
        (2, "gpt2", {}, 0),
    ],
)
def test_weights_are_rounded_before_they_are_gathered(
    ranks: int, family: str, options: dict[str, Any], in_bytes: int
) -> None:
    """Under ZeRO stage 3: bits are those of stage 1, whose ranks round whole weights; `in_bytes`: values in 8 bit."""
    expected, nothing = run_on_ranks(ranks, _of_stage, 1, family, options)[0]
    found, gathered = run_on_ranks(ranks, _of_stage, 3, family, options)[0]
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, expected, strict=True))
    assert not nothing and gathered.get(torch.uint8, 0) == in_bytes
    if in_bytes:
        assert gathered[torch.bfloat16] < _MATRICES, "a layer is gathered in 16 bit"


def _of_sequences(rounds: bool, family: str, options: dict[str, Any]) -> tuple[list[Any], dict[torch.dtype, int]]:
    """Losses and weights of two steps under sequence parallelism; values that the second one gathers, by their dtype.

    Rows of 21 tokens, which ranks pad. `rounds`: whether ranks round tokens and gradients before they gather them.
    """
    gathered = Counter[torch.dtype]()

    def counted(out: Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered[out.dtype] += out.numel()
        return native(out, *args, **kwargs)

    native = collectives.all_gather_flat
    with (
        mock.patch.object(Float8, "gathers_rounded", rounds),
        mock.patch.object(collectives, "all_gather_flat", counted),
    ):
        model, ids = _model(options, family), torch.randint(0, 96, (4, 21), generator=torch.Generator().manual_seed(1))
        booster = Booster(plugin=HybridParallelPlugin(precision="fp8", enable_sequence_parallelism=True, **options))
        model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        found = []
        for _ in range(2):
            gathered.clear()
            batch = iter([{"input_ids": ids, "labels": ids}])
            loss = booster.execute_pipeline(batch, model, optimizer=optimizer).loss
            optimizer.step()
            optimizer.zero_grad()
            found.append(torch.zeros(()) if loss is None else loss)
    counts = dict(gathered)
    with model.summon_full_params():
        return [*found, *(param.detach().clone() for param in model.parameters())], counts


@pytest.mark.parametrize(
    ("ranks", "family", "options", "passes"),
    [
        (2, "llama", {"tp_size": 2}, 2),
        pytest.param(2, "llama", {"tp_size": 2, "gradient_checkpointing": "full"}, 3, marks=pytest.mark.slow),
        pytest.param(2, "llama", {"tp_size": 2, "gradient_checkpointing": "operators"}, 3, marks=pytest.mark.slow),
        pytest.param(2, "gpt2", {"tp_size": 2}, 2, marks=pytest.mark.slow),
        pytest.param(4, "llama", {"tp_size": 4}, 2, marks=pytest.mark.slow),
        pytest.param(4, "llama", {"tp_size": 2, "zero_stage": 3}, 2, marks=pytest.mark.slow),
        pytest.param(
            4,
            "llama",
            {"tp_size": 2, "pp_size": 2, "pp_style": "zero_bubble", "num_microbatches": 4},
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            "llama",
            {"tp_size": 2, "fp8_recipe": "rowwise", "gradient_checkpointing": "operators"},
            0,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tokens_are_rounded_before_they_are_gathered(
    ranks: int, family: str, options: dict[str, Any], passes: int
) -> None:
    """Bits are those of tokens that are rounded after it; `passes`: through both regions of two layers, in 8 bit."""
    expected, wide = run_on_ranks(ranks, _of_sequences, False, family, options)[0]
    found, narrow = run_on_ranks(ranks, _of_sequences, True, family, options)[0]
    assert all(map(torch.equal, found, expected))
    tokens = 4 * (21 + -21 % options["tp_size"]) * 64
    assert narrow.get(torch.uint8, 0) - wide.get(torch.uint8, 0) == passes * 2 * 2 * tokens
    assert wide[torch.bfloat16] - narrow[torch.bfloat16] == passes * 2 * 2 * tokens


def test_heads_and_embeddings_keep_their_precision() -> None:
    assert run_on_ranks(1, _multiplied) == [
        ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    ]


def test_layers_too_small_to_gain_keep_their_precision_on_a_gpu() -> None:
    """Keys and values of Llama 3.2 1B; not if all layers are small, as then nothing would be in 8 bit."""
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1, "vocab_size": 8}
    for hidden, intermediate, count in ((2048, 8192, 5), (64, 256, 7)):
        with torch.device("meta"):
            config = LlamaConfig(hidden_size=hidden, intermediate_size=intermediate, **sizes)
            model = LlamaForCausalLM(config)
        multiply_in_fp8(model)
        assert len(_names(model)) == count and "q_proj" in _names(model)


def _multiplied() -> list[str]:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes))
    return _names(Booster(plugin=HybridParallelPlugin(precision="fp8")).boost(model).unwrap())


def _names(model: nn.Module) -> list[str]:
    """The last names of the layers that multiply in 8 bit."""
    named = model.named_modules()
    changed = [name for name, module in named if isinstance(getattr(module, "kernel", 0), Float8)]
    return sorted({name.rpartition(".")[2] for name in changed})
