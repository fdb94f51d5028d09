"""A model without values is sharded like one with them, and reads or draws its own pieces afterwards.

What breaks here first: a layer that looks at values while it is cut, or a parameter that two modules hold. Where whole
weights differ between layouts, look in `shardformer/lazy`: a draw that belongs to no name, or to another one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.checkpoint.global_tensor import local_tensors
from plugins.hybrid_parallel.zero.whole_parameters import assemble
from shardformer import ShardConfig, ShardFormer, record_module_init
from shardformer.lazy import materialize, set_weight_reader, waits_for_values, weight_files
from shardformer.lazy.weight_files import read_piece
from shardformer.shard_spec import ShardSpec
from zoo_tests.harness.case import LAYOUTS, Case, Recipe, share_of
from zoo_tests.harness.families import sixth_of_families, third_of_families
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.zoo import FAMILIES

_FAST = ("bert", "llama", "t5")


def _without_values(recipe: Recipe) -> nn.Module:
    with init_empty_weights():
        model = recipe.model()
    model.tie_weights()
    return model


class _Reader:
    """Pieces of the values of a whole model; remembers what was asked for."""

    def __init__(self, whole: nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in whole.named_parameters(remove_duplicate=False)}
        self.asked: list[str] = []

    def __call__(self, name: str, spec: ShardSpec) -> Tensor:
        self.asked.append(name)
        return spec.shard(self.values[name])


@pytest.mark.parametrize("family", [*_FAST, *third_of_families(0, but=_FAST)])
@pytest.mark.usefixtures("two_fake_ranks")
def test_every_family_is_sharded_without_values(family: str) -> None:
    recipe = Recipe(family=family, head=FAMILIES[family].main_head)
    whole, lazy = recipe.model(), _without_values(recipe)
    reader = _Reader(whole)
    sharded, _ = ShardFormer(ShardConfig()).optimize(whole)
    lazy, _ = ShardFormer(ShardConfig()).optimize(lazy)
    assert len(waits_for_values(lazy)) == len(list(lazy.parameters()))
    materialize(lazy, reader)
    expected, found = dict(sharded.named_parameters()), dict(lazy.named_parameters())
    assert found.keys() == expected.keys() and sorted(reader.asked) == sorted(expected)
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name
        assert found[name].shard_spec == parameter.shard_spec


def _losses(recipe: Recipe, is_lazy: bool) -> list[float]:
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=3))
    model = recipe.model()
    if is_lazy:
        reader, model = _Reader(model), _without_values(recipe)
        set_weight_reader(model, reader)
    optimizer, _ = recipe.training(model)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for step in range(2):
        batch = recipe.batch(step)
        losses.append(booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])  # tied over the stages, and not
@distributed(4)
def test_trains_on_from_what_it_read(family: str) -> None:
    recipe = Recipe(family=family, head=FAMILIES[family].main_head, optimizer="adamw")
    assert _losses(recipe, is_lazy=True) == _losses(recipe, is_lazy=False)


@distributed(1)
def test_a_model_without_values_is_refused_where_none_are_known() -> None:
    recipe = Recipe(family="bert", head="sequence")
    with pytest.raises(
        ConfigurationError, match=r"bert.embeddings.word_embeddings.weight of the Bert.* is on the meta"
    ):
        Booster(plugin=HybridParallelPlugin()).boost(_without_values(recipe))
    model = _without_values(recipe)
    set_weight_reader(model, lambda name, spec: torch.zeros(2))
    with pytest.raises(ConfigurationError, match=r"was read has shape \(2,\); this rank holds \(1021, 48\)"):
        Booster(plugin=HybridParallelPlugin()).boost(model)
    with torch.device("meta"):
        model = recipe.model()
    set_weight_reader(model, lambda name, spec: torch.zeros(spec.full_shape))
    with pytest.raises(ConfigurationError, match="buffer .* is on the meta device, where it lost its values"):
        Booster(plugin=HybridParallelPlugin()).boost(model)


# ----- models built in record_module_init -----


def _hashes(case: Case) -> dict[str, str]:
    """Name -> sha256 of the whole parameters and buffers that this rank's stage holds."""
    with record_module_init():
        model = case.recipe.model()
    plugin = HybridParallelPlugin(**case.plugin_options)
    optimizer, scheduler = case.recipe.training(model)
    model, *_ = Booster(plugin=plugin).boost(model, optimizer, scheduler)
    whole = {}
    with model.summon_full_params(writeback=False):
        for names, tensor in local_tensors(model, unique=False):
            full = assemble(tensor, tensor.detach(), plugin.grid.group("tp"))
            whole |= dict.fromkeys(names, _sha256(full))
    return whole


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()


def _hashes_in_one_process(case: Case) -> dict[str, str]:
    with record_module_init():
        model = case.recipe.model()
    materialize(model, seed=case.plugin_options["seed"])
    return {name: _sha256(tensor) for name, tensor in model.state_dict().items()}


def _case(family: str, layout: str, **recipe: Any) -> Case:
    head = FAMILIES[family].main_head
    return Case(recipe=Recipe(family=family, head=head, **{"precision": "fp32", **recipe}), layout=layout)


def _check_layout(case: Case) -> None:
    expected = _hashes_in_one_process(case)
    found: dict[str, str] = {}
    for hashes in run_on_ranks(case.sizes.world_size, _hashes, case):
        assert all(found.setdefault(name, digest) == digest for name, digest in hashes.items())
    assert found == expected


# The engine's three shapes share out the layouts.
_EACH_LAYOUT = [
    pytest.param(("bert", "llama", "gpt2")[number % 3], layout, marks=() if layout == "tp2pp2" else pytest.mark.slow)
    for number, layout in enumerate(LAYOUTS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), _EACH_LAYOUT)
def test_every_layout_builds_the_same_model(family: str, layout: str) -> None:
    _check_layout(_case(family, layout))


@pytest.mark.parametrize(
    ("family", "layout", "adapters"),
    [
        ("llama", "tp2dp2", ()),
        pytest.param("llama", "dp2", ("q_proj", "down_proj"), marks=pytest.mark.slow),
        pytest.param("gpt2", "pp2dp2", (), marks=pytest.mark.slow),
        pytest.param("mixtral", "tp2dp2", (), marks=pytest.mark.slow),
    ],
)
def test_zero_stage_3_builds_the_same_model(family: str, layout: str, adapters: tuple[str, ...]) -> None:
    _check_layout(_case(family, layout, adapters=adapters).but(zero_stage=3))


@pytest.mark.slow
@pytest.mark.parametrize("family", sixth_of_families(1))
def test_every_family_is_built_the_same(family: str) -> None:
    _check_layout(_case(family, "tp2pp2"))


@pytest.mark.slow
def test_adapters_are_built_the_same() -> None:
    _check_layout(_case("llama", "tp2pp2", adapters=("q_proj", "down_proj")))


# ----- from_pretrained in record_module_init -----


def _plain_losses(case: Case, directory: Path) -> list[float]:
    model = type(case.recipe.model()).from_pretrained(directory, dtype=case.recipe.dtype).train()
    optimizer, scheduler = case.recipe.training(model)
    losses = []
    for step in range(case.recipe.steps):
        loss = model(**case.recipe.batch(step)).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _lazy_losses(case: Case, directory: Path) -> list[float]:
    """Of a model that reads its weights when it is boosted, and of one that loads them afterwards."""
    with record_module_init():
        model = type(case.recipe.model()).from_pretrained(directory, dtype=case.recipe.dtype).train()
    plugin = HybridParallelPlugin(**case.plugin_options)
    booster = Booster(plugin=plugin)
    optimizer, scheduler = case.recipe.training(model)
    model, optimizer, scheduler = booster.boost(model, optimizer, scheduler)
    losses = []
    for step in range(case.recipe.steps):
        batch = share_of(case.recipe.batch(step), plugin.dp_rank, plugin.dp_size)
        losses.append(booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    booster.load_model(model, directory)
    batch = share_of(case.recipe.batch(0), plugin.dp_rank, plugin.dp_size)
    return [*losses, booster.execute_pipeline(iter([batch]), model).loss.item()]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [("gpt2", "tp2pp2"), ("mixtral", "tp2"), ("bert", "pp2dp2")])
@pytest.mark.parametrize("size", ["5GB", "60KB"])
def test_trains_on_from_a_directory(family: str, layout: str, size: str, tmp_path: Path) -> None:
    case = _case(family, layout, precision=FAMILIES[family].precision)
    case.recipe.model().save_pretrained(tmp_path, max_shard_size=size)
    expected = _plain_losses(case, tmp_path)
    for losses in run_on_ranks(case.sizes.world_size, _lazy_losses, case, tmp_path):
        # transformers computes some losses in fp32 whatever the dtype of the model.
        assert losses == pytest.approx([*expected, expected[0]], rel=2e-6)


def _pieces_read(case: Case, directory: Path) -> tuple[int, int]:
    """Bytes read, and bytes of this rank's parameters."""
    with record_module_init():
        model = type(case.recipe.model()).from_pretrained(directory)
    read = []

    def counted(*args: Any) -> Tensor:
        read.append(read_piece(*args))
        return read[-1]

    with mock.patch.object(weight_files, "read_piece", counted):
        model = Booster(plugin=HybridParallelPlugin(**case.plugin_options)).boost(model)
    return sum(piece.nbytes for piece in read), sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp4", "pp4", "tp2pp2"])
def test_a_rank_reads_its_pieces_alone(layout: str, tmp_path: Path) -> None:
    case = _case("llama", layout)
    case.recipe.model().save_pretrained(tmp_path)
    for read, held in run_on_ranks(4, _pieces_read, case, tmp_path):
        assert read == held


@pytest.mark.parametrize(("precision", "layout", "stage"), [("bf16", "tp2", 1), ("fp16", "tp2", 1), ("bf16", "dp2", 3)])
@distributed(2)
def test_16_bit_models_keep_the_full_values_for_the_optimizer(precision: str, layout: str, stage: int) -> None:
    case = _case("llama", layout, precision=precision).but(zero_stage=stage)
    with record_module_init():
        model = case.recipe.model()
        whole = case.recipe.model()
    materialize(whole, seed=7)
    optimizer, _ = case.recipe.training(model)
    booster = Booster(plugin=HybridParallelPlugin(**case.plugin_options))
    model, optimizer = booster.boost(model, optimizer)
    name = "model.layers.0.mlp.up_proj.weight"
    local = model.unwrap().get_parameter(name)
    piece = local.shard_spec.shard(whole.get_parameter(name).data)
    with model.summon_full_params(writeback=False):
        assert local.dtype != torch.float32 and torch.equal(local, piece.to(local.dtype))
    masters = [
        bucket_piece
        for bucket in optimizer.buckets
        for bucket_piece in bucket.pieces
        if bucket.params[bucket_piece.index] is local
    ]
    same = [torch.equal(part.parameter.flatten(), piece.flatten()[part.start : part.stop]) for part in masters]
    held = torch.tensor([sum(part.stop - part.start for part in masters), same.count(False)])
    dist.all_reduce(held)
    assert held.tolist() == [whole.get_parameter(name).numel(), 0]


@distributed(2)
def test_ranks_that_were_seeded_differently_build_one_model() -> None:
    torch.manual_seed(dist.get_rank())
    with record_module_init():
        model = Recipe(family="bert", head="sequence", precision="fp32").model()
    model = Booster(plugin=HybridParallelPlugin()).boost(model)
    digests = [None, None]
    dist.all_gather_object(digests, _sha256(next(model.parameters())))
    assert digests[0] == digests[1]
