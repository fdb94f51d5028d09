"""`compile_layers`: the losses and weights are those of eager layers, and few graphs serve all layers and shapes.

What breaks here first: a gradient buffer that is written while a graph is traced, a collective that a graph replaces,
a guard on something that differs from layer to layer or from step to step.
"""

from __future__ import annotations

import copy
import mmap
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import view_to_reshape
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.config.groups import KernelOptions
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.features import compilation
from shardformer.attention.registry import RegisteredName, trace_lookups
from shardformer.distributed.random import define_regions, in_parallel_region
from shardformer.utils.derived_modules import derive
from zoo_tests.harness.ranks import run_on_ranks

DIRECTORY = str(Path(tempfile.gettempdir()) / "booster-activations")
RAGGED = {"lengths": (12, 9, 14, 11)}
SEQUENCES = {"tp_size": 2, "enable_sequence_parallelism": True}
ROWS, VOCABULARY = 4, 64
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
# Layout or option -> family, number of ranks, options.
SAMPLE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("llama", 1, RAGGED),
    "recomputed": ("llama", 1, {"gradient_checkpointing": "full", "enable_jit_fused": True}),
    "attention that warns": ("t5", 1, {"enable_flash_attention": True}),
    "tp2": ("bert", 2, {"tp_size": 2}),
    "tp2, recomputed": ("bert", 2, {"tp_size": 2, "gradient_checkpointing": "full"}),
    "pp2": ("llama", 2, {"pp_size": 2, "num_microbatches": 2}),
    "dp2": ("llama", 2, {"zero_stage": 1, "overlap_allgather": True}),
    "stage 3": ("llama", 2, {"zero_stage": 3, **RAGGED}),
    "offloaded activations": ("llama", 1, {"offload_activations": DIRECTORY, **RAGGED}),
}
MORE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dropout": ("bert", 1, {"precision": "bf16", **RAGGED}),
    "fp8": ("llama", 1, {"precision": "fp8", **RAGGED}),
    "fp8, tp2, recomputed": ("gpt2", 2, {"precision": "fp8", "tp_size": 2, "gradient_checkpointing": "full"}),
    "tp2, lengths": ("llama", 2, {"tp_size": 2, **RAGGED}),
    "tp2, sequence parallelism": ("llama", 2, {**SEQUENCES, **RAGGED}),
    "tp2, experts by sequence": ("mixtral", 2, SEQUENCES),
    "tp2, kinds of layers by sequence": ("t5 with dropout", 2, SEQUENCES),
    "tp2, fused projections": ("gpt2", 2, {"tp_size": 2}),
    "tp2, images": ("vit", 2, SEQUENCES),
    "pp2, split backward": ("llama", 2, {"pp_size": 2, "num_microbatches": 4, "pp_style": "zbv", "layers": 4}),
    "cp2": ("llama", 2, {"cp_size": 2, **RAGGED}),
    "kinds of layers": ("t5", 1, RAGGED),
    "stage 3, kinds of layers": ("t5", 2, {"zero_stage": 3}),
    "stage 3, recomputed": ("llama", 2, {"zero_stage": 3, "gradient_checkpointing": "full"}),
    "stage 3, tp2": ("llama", 4, {"zero_stage": 3, "tp_size": 2}),
    "stage 3, pp2": ("llama", 4, {"zero_stage": 3, "pp_size": 2, "num_microbatches": 2}),
    "offloaded activations, tp2": ("llama", 2, {"offload_activations": DIRECTORY, "tp_size": 2}),
}
# Compilations: one for each kind of layer, and one more with symbolic sizes as soon as sizes change.
WHOLE_LAYERS = {"one rank": 2, "recomputed": 1, "pp2": 1, "dp2": 1, "dropout": 2, "kinds of layers": 8}
WHOLE_LAYERS |= {"fp8": 2, "fp8, tp2, recomputed": 1}
WHOLE_LAYERS |= {"stage 3": 2, "stage 3, recomputed": 1, "stage 3, pp2": 1, "offloaded activations": 2}
WHOLE_LAYERS |= {"attention that warns": 4, "tp2": 1, "tp2, recomputed": 1, "tp2, lengths": 2}
WHOLE_LAYERS |= {"tp2, sequence parallelism": 3, "tp2, experts by sequence": 1, "tp2, fused projections": 1}
WHOLE_LAYERS |= {"tp2, images": 1, "tp2, kinds of layers by sequence": 4, "stage 3, tp2": 1}


def build(family: str, layers: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = {**_SIZES, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    if family == "bert":
        return BertForSequenceClassification(BertConfig(**sizes))
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=layers, n_head=4, vocab_size=VOCABULARY))
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4))
    if family == "vit":
        return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4))
    if family.startswith("t5"):
        rate = 0.1 if family == "t5 with dropout" else 0.0
        sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 3, "num_heads": 4, "dropout_rate": rate}
        return T5ForConditionalGeneration(T5Config(**sizes, vocab_size=VOCABULARY, decoder_start_token_id=0))
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))


def batch(family: str, step: int, rows: slice, length: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, length), generator=generator)
    mask = torch.arange(length) < torch.randint(5, length, (ROWS, 1), generator=generator)
    if family == "vit":
        return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator)[rows], "labels": ids[rows, 0] % 2}
    labels = ids[:, 0] % 2 if family == "bert" else ids.masked_fill(~mask, -100)
    return {"input_ids": ids[rows], "attention_mask": mask.long()[rows], "labels": labels[rows]}


class Trained:
    """What training gave: losses, weights, number of graphs, and the reasons why graphs were broken."""

    def __init__(self, family: str, layers: int = 2, lengths: tuple[int, ...] = (12, 12), **options: Any) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(1)
        self.plugin, model = HybridParallelPlugin(seed=1, **options), build(family, layers)
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer = self.booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        own = ROWS // self.plugin.dp_size
        rows = slice(self.plugin.dp_rank * own, (self.plugin.dp_rank + 1) * own)
        self.losses = [self.step(batch(family, step, rows, length)) for step, length in enumerate(lengths)]
        self.weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        owners = (getattr(around, "__self__", None) for around in self.model.around_passes)
        stores = [owner.store for owner in owners if hasattr(owner, "store")]
        self.moved = sum(os.fstat(store.file).st_size for store in stores)
        self.num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self.num_breaks = sum(torch._dynamo.utils.counters["graph_break"].values())

    def step(self, given: dict[str, Tensor]) -> float:
        loss = self.booster.execute_pipeline(iter([given]), self.model, optimizer=self.optimizer).loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def compare(family: str, options: dict[str, Any], backend: Any = None) -> tuple[int, int]:
    """Train with eager and with compiled layers; the number of graphs, and how often they were broken.

    Args:
        backend: of `torch.compile`; None for one that generates no kernels.
    """
    targets: Counter[str] = Counter()

    def without_kernels(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        targets.update(str(node.target) for each in graph.modules() for node in each.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    eager = Trained(family, **options)
    with (
        torch._dynamo.config.patch(disable=False),
        mock.patch.object(compilation, "_BACKEND", backend or without_kernels),
    ):
        compiled = Trained(family, compile_layers=True, **options)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if "precision" not in options else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(compiled.losses, eager.losses, rtol=tolerance["rtol"], atol=0)
    torch.testing.assert_close(compiled.weights, eager.weights, **tolerance)
    assert compiled.num_graphs > 0
    assert any("fp8_linear" in name for name in targets) == (options.get("precision") == "fp8")
    if "offload_activations" in options:  # graphs save fewer tensors than their operators would
        assert min(eager.moved, compiled.moved) > mmap.PAGESIZE
    if options.get("tp_size", 1) == 1:
        assert not {name for name in targets if "all_" in name or "c10d" in name or "autograd_function" in name}
    elif (family, len(options)) == ("bert", 1):  # queries, keys and values share one sum of gradients
        assert targets["_c10d_functional.all_reduce"] == targets["_c10d_functional.wait_tensor"] == 4
    return compiled.num_graphs, compiled.num_breaks


@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.campaign) for name in MORE)])
@pytest.mark.slow
def test_training_is_that_of_eager_layers(name: str) -> None:
    family, world_size, options = {**SAMPLE, **MORE}[name]
    for num_graphs, num_breaks in run_on_ranks(world_size, compare, family, options):
        if name in WHOLE_LAYERS:
            assert (num_graphs, num_breaks) == (WHOLE_LAYERS[name], 0)


def test_layers_look_their_attention_up_by_a_plain_string(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 hashes no class derived from `str` while it traces, and would end the graph."""
    asked: list[str] = []
    find = type(ALL_ATTENTION_FUNCTIONS).get_interface

    def seen(functions: Any, name: str, default: Any) -> Any:
        asked.append(name)
        return find(functions, name, default)

    monkeypatch.setattr(type(ALL_ATTENTION_FUNCTIONS), "get_interface", seen)
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", None, raising=False)  # goes with the test
    trace_lookups()
    assert ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None) is ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("prefix_sdpa", len)
    assert ALL_ATTENTION_FUNCTIONS.get_interface(RegisteredName("prefix_", "sdpa"), None) is len
    assert [type(name) for name in asked] == [str, str] and asked[1] == "prefix_sdpa"


@pytest.mark.campaign
@pytest.mark.parametrize(("family", "options"), [("bert", {}), ("t5", {}), ("llama", {"tp_size": 2})], ids=str)
def test_training_with_kernels_of_the_compiler(family: str, options: dict[str, Any]) -> None:
    run_on_ranks(2 if options else 1, compare, family, options, "inductor", timeout_s=300)


def generate_compiled() -> tuple[list[list[int]], list[list[int]], int, set[str]]:
    with torch._dynamo.config.patch(disable=False), mock.patch.object(compilation, "_BACKEND", "aot_eager"):
        trained = Trained("llama", compile_layers=True)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        asked = {"input_ids": batch("llama", 0, slice(2))["input_ids"], "max_new_tokens": 4, "do_sample": False}
        tokens = trained.model.eval().generate(**asked).tolist()
        new_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    plain = build("llama", 2)
    names = set(plain.state_dict())
    plain.load_state_dict(trained.weights)
    return tokens, plain.eval().generate(**asked).tolist(), new_graphs, names ^ set(trained.weights)


@pytest.mark.slow
def test_generation_runs_eagerly() -> None:
    """A cache differs from layer to layer and from token to token; names of weights are the model's own."""
    ((tokens, plain, new_graphs, other_names),) = run_on_ranks(1, generate_compiled)
    assert tokens == plain and new_graphs == 0 and not other_names


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"debug": True}, r"debug=True looks into every module, which compile_layers=True merges; use one of them"),
        ({"cuda_graphs": True, "compile_layers": False}, r"cuda_graphs=True records .*; use compile_layers=True, or"),
        ({"cuda_graphs": True, "pp_size": 2}, r"at the same addresses in each step, which pp_size=2 does not keep"),
        ({"cuda_graphs": True, "zero_stage": 3}, r"which zero_stage=3 does not keep; use cuda_graphs=False"),
        ({"cuda_graphs": True, "offload_activations": "cpu"}, r"which offload_activations='cpu' does not keep"),
        ({"cp_size": 2, "gradient_checkpointing": 0.5}, r"0.5 with compile_layers=True .* cp_size=2 interrupts"),
        ({"cuda_graphs": True, "precision": "fp8"}, r"which precision='fp8' does not keep; use cuda_graphs=False"),
        ({"pp_size": 2, "pp_style": "zbv", "gradient_checkpointing": "full"}, r"pp_style='zbv' interrupts"),
        ({"gradient_checkpointing": "operators"}, r"'operators' chooses .*, as the compiler does .*; use one of them"),
        ({"compile_layers": "inductor"}, r"compile_layers='inductor' is neither True nor False"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        HybridParallelConfig.from_options(**{"compile_layers": True, **options})


def test_models_and_machines_that_do_not_fit() -> None:
    cpu, gpu, plain = torch.device("cpu"), torch.device("cuda"), KernelOptions()
    with pytest.raises(ConfigurationError, match="finds no layers of transformers in Linear; use compile_layers=False"):
        compilation.check_compilation(nn.Linear(2, 2), cpu, plain)
    model = build("llama", 1)
    for device, needed in ((cpu, "C\\+\\+ compiler"), (gpu, "Triton")):
        with (
            mock.patch.object(compilation, "has_compiler", return_value=False),
            pytest.raises(ConfigurationError, match=f"needs .*{needed}.*; install it or use compile_layers=False"),
        ):
            compilation.check_compilation(model, device, plain)
    for kernels, sentence in (
        (KernelOptions(cuda_graphs=True), "cuda_graphs=True needs a GPU, and not cpu; use cuda_graphs=False"),
        (KernelOptions(enable_sequence_overlap=True), "cannot trace .* not on cpu; use enable_sequence_overlap=False"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            compilation.check_compilation(model, cpu, kernels)


def joined(family: str) -> list[int]:
    """Train sequence-parallel layers; what inductor joins with products and what it leaves, forward and backward."""
    counts: list[int] = []

    def count(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        view_to_reshape(graph)
        changed = copy.deepcopy(graph.graph)
        micro_pipeline_tp_pass(changed)
        targets = [str(node.target) for node in changed.nodes]
        counts.append(sum("symm_mem" in target for target in targets))
        counts.append(sum("c10d" in target and "wait" not in target for target in targets))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count, decompositions=select_decomp_table())
    with (
        torch._dynamo.config.patch(disable=False),
        mock.patch.object(compilation, "_BACKEND", backend),
        mock.patch("torch.distributed.is_nccl_available", return_value=True),
        mock.patch("torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group", return_value=True),
    ):
        Trained(family, compile_layers=True, **SEQUENCES)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("family", "counts"), [("llama", [4, 0, 2, 2]), ("gpt2", [2, 2, 4, 0])])
def test_gathers_and_scatters_have_the_form_that_inductor_joins_with_products(family: str, counts: list[int]) -> None:
    """Left are sums of several products before a scatter and, in GPT-2, products with a bias after a gather."""
    assert run_on_ranks(2, joined, family) == [counts, counts]


class _Derived(nn.Module):
    """Methods of a layer that works differently."""


def test_copies_are_not_compiled() -> None:
    """The compiled call of a layer would run the original with the original's weights."""
    model = build("llama", 2)
    model.model.layers[1] = derive(model.model.layers[1], _Derived)
    with mock.patch.object(compilation, "_BACKEND", "aot_eager"):
        compilation.compile_layers(model)
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(layer._compiled_call_impl is None for layer in made.model.layers)
        assert isinstance(made.model.layers[1], _Derived)


def _in_turn(x: Tensor) -> Tensor:
    x = in_parallel_region(1, F.dropout, F.dropout(x, 0.5).relu(), 0.5)
    return F.dropout(2 * x, 0.5)


def _side_by_side(x: Tensor) -> Tensor:
    return in_parallel_region(1, F.dropout, x, 0.5) + F.dropout(x, 0.5)


def _of_sizes(x: Tensor) -> Tensor:
    x = in_parallel_region(1, F.dropout, x, 0.5)
    return x + torch.rand(x.shape[0], 1)


def _two_regions(x: Tensor) -> Tensor:
    return in_parallel_region(1, F.dropout, x, 0.5) + in_parallel_region(1, F.dropout, 2 * x, 0.5)


@pytest.mark.parametrize(
    ("draws", "is_compiled"), [(_in_turn, True), (_side_by_side, False), (_of_sizes, False), (_two_regions, False)]
)
def test_draws_that_a_compiler_may_move_out_of_a_region_run_as_traced(
    draws: Callable[[Tensor], Tensor], is_compiled: bool
) -> None:
    torch._dynamo.reset()
    define_regions()
    assert torch.Tag.cudagraph_unsafe in torch.ops.booster.enter_region.default.tags
    compiler = mock.Mock(side_effect=lambda graph, inputs: graph.forward)
    x = torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(0)
    eager = draws(x)
    torch.manual_seed(0)
    assert torch.equal(compilation._compiled(draws, compiler)(x), eager)
    assert compiler.called == is_compiled
