"""The golden table: a sample of it is as the code makes it, and what it tells.

What fails here first: a move of code that cuts a class otherwise. `python -m zoo_tests.campaigns.golden --check` then
says for all of them which rows changed; a change that is meant is written with `--write`, and the commit says why.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

from shardformer.policies.families.decoders import BloomPolicy
from shardformer.shard_spec import Part, ShardSpec, shard_parameter
from shardformer.stages.placeholders import Skipped, StageInput
from shardformer.utils.derived_modules import derive
from zoo_tests.campaigns import golden
from zoo_tests.campaigns.census.classes import HeadClass, head_classes
from zoo_tests.harness.sample import seed_of_commit

_SHARES = 96  # of the classes, so that a share takes seconds


@pytest.mark.slow
def test_a_share_of_the_classes_is_as_in_the_table(pytestconfig: pytest.Config) -> None:
    """Another share at each commit."""
    release, table = golden.stored()
    if release != transformers.__version__:
        pytest.skip(f"the table has the classes of transformers {release}")
    seed = pytestconfig.getoption("--sample-seed")
    place = (seed_of_commit() if seed is None else seed) % _SHARES
    heads = [head for head in head_classes() if f"{head.family}/{head.name}" in table][place::_SHARES]
    assert len(heads) >= len(table) // _SHARES
    found = golden.check(heads, [*golden.LAYOUTS])
    assert not found, "\n".join(found)


def test_the_file_is_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (release, table), text = golden.stored(), golden.TABLE.read_bytes()
    assert all(layouts.keys() == golden.LAYOUTS.keys() for layouts in table.values())
    monkeypatch.setattr(golden, "TABLE", tmp_path / "golden.json")
    monkeypatch.setattr(transformers, "__version__", release)
    golden.write_table(table)
    assert golden.TABLE.read_bytes() == text


def test_changes_are_told_once_with_all_that_have_them() -> None:
    old = {"a/A": {"tp2": ["x: cut", "y"], "pp2": ["y"]}, "b/B": {"tp2": ["x: cut"]}, "c/C": {"tp2": ["y", "z"]}}
    new = {"a/A": {"tp2": ["x: whole", "y"], "pp2": ["y"]}, "b/B": {"tp2": ["x: whole"]}, "c/C": {"tp2": ["z", "y"]}}
    told = ["- x: cut", "+ x: whole", "    a/A tp2; b/B tp2", "the order of rows", "    c/C tp2"]
    assert golden.differences(old, new) == told
    assert golden.differences(old, old) == []
    refused = {"a/A": {"tp2": ["refused: no"]}}
    assert golden.differences(old, refused) == ["- all 2 rows", "+ refused: no", "    a/A tp2"]
    assert golden.differences({}, {"d/D": {"tp2": []}}) == ["+ not in the table", "    d/D tp2"]


class _Half(nn.Module):
    """Works on a half; has no state of its own."""


def _layers() -> nn.Module:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Dropout()) for _ in range(3)))
    layers[0][1].bias = layers[0][0].bias
    return layers


def _cut_layers() -> nn.Module:
    layers = _layers()
    spec = ShardSpec((6, 4), 0, (Part(6, 2),), 0, 3)
    for layer in (*layers[:2],):
        layer[0].weight = shard_parameter(layer[0].weight, spec)
        layer[1] = derive(layer[1], _Half)
        layer[1].out_features = 2
        layer[1].weight.requires_grad_(False)
    layers[1][0].heads, layers[1][0].own_rank, layers[1][0].is_off = 2, 1, False
    layers[1][0].bias = None
    layers[1][2].p = 0.25
    layers[1][2].register_forward_hook(print)
    layers[2] = Skipped(StageInput())
    return layers


def test_what_sharding_changed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "_OURS", __name__)
    changes = golden._changes(_layers(), _cut_layers())
    cut = "weight [6, 4] dim 0 tp3 (6/2)"
    half = "+_Half, out_features=2, "
    assert changes == {
        "0.0": cut,
        "0.1": f"{half}weight [4, 6] frozen, bias is 0.0.bias",
        "1.0": f"heads=2, {cut}, bias gone",
        "1.1": f"{half}weight [4, 6] frozen",
        "1.2": "1 forward_hooks, p=0.25",
        "2": ">Skipped",
    }


def test_ranks_and_layers_that_are_equal_are_one_row() -> None:
    cut = {f"h.{layer}.{name}": "cut" for layer in range(4) for name in "qk"}
    other = {"h.9.f.1": "two", "h.9.f.3": "two"}
    found = {0: cut | other | {"head": ">Skipped"}, 1: cut | {"head": "cut"}}
    held = {0: frozenset((*cut, *other)), 1: frozenset((*cut, "head"))}
    rows = [*golden._merged(found, held, {0: "stage 0", 1: "stage 1"})]
    assert rows == ["h.[0-3].(q k): cut", "head: cut", "h.9.f.[1,3]: two", "stage 0 head: >Skipped"]
    held = dict.fromkeys((0, 1), frozenset(("embed",)))
    rows = [*golden._merged({0: {"embed": "rows 0-3"}, 1: {"embed": "rows 4-7"}}, held, {0: "rank 0", 1: "rank 1"})]
    assert rows == ["rank 0 embed: rows 0-3", "rank 1 embed: rows 4-7"]
    assert golden._without_numbers(["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"]) == ["a.[0-1].b.[0-1]"]


def test_a_fault_of_a_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLOOM's attention counts all heads: a row goes and one comes, under both layouts that cut it."""
    head, layouts, table = HeadClass("bloom", "BloomForCausalLM"), ["tp2", "pp2", "tp2pp2"], BloomPolicy.module_policy

    def forgetful(policy: BloomPolicy) -> dict[str, Any]:
        described = dict(table(policy))
        described["BloomAttention"] = replace(described["BloomAttention"], attribute_replacement={})
        return described

    before, _ = golden.make_table([head], layouts)
    monkeypatch.setattr(BloomPolicy, "module_policy", forgetful)
    after, _ = golden.make_table([head], layouts)
    attention = "transformer.h.[0-3].self_attention: 1 forward_pre_hooks"
    assert golden.differences(before, after) == [
        f"- {attention}, num_heads=2",
        f"+ {attention}",
        "    bloom/BloomForCausalLM tp2,tp2pp2",
    ]
