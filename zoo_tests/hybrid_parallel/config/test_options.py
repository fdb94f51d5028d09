"""The options of HybridParallelPlugin: every rule, all problems at once, and a value that would do in each.

What breaks here first: a rule that is dropped with a refactoring. Look in `plugins/hybrid_parallel/config`.
"""

from __future__ import annotations

import json
import re
from collections import ChainMap
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelConfig, HybridParallelPlugin
from plugins.hybrid_parallel.config import option_group
from plugins.hybrid_parallel.config.groups import ZeroOptions
from plugins.hybrid_parallel.config.options import OPTIONS, options_of_text
from shardformer import TPInfo

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 0}, r"tp_size=0 is not a positive integer; use 1 or more"),
    ({"pp_size": -1}, r"pp_size=-1 is not a positive integer"),
    ({"pp_size": 2.0}, r"pp_size=2\.0 is not a positive integer"),
    ({"dp_size": 0}, r"dp_size=0 is not a positive integer"),
    ({"tp_size": "two"}, r"tp_size='two' is not a positive integer"),
    ({"tp_size": 2, "sp_size": 4}, r"sp_size=4 differs from tp_size=2; use sp_size=2"),
    ({"cp_size": 0}, r"cp_size=0 is not a positive integer; use 1 or more"),
    ({"cp_size": 2, "sharding_dim": 0}, r"sharding_dim=0 does not split activations, and cp_size=2 cuts them; use one"),
    (
        {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"},
        r"sequence_parallelism_mode='ring_attn' needs cp_size > 1; use cp_size=2",
    ),
    ({"ep_size": 0}, r"ep_size=0 is not a positive integer"),
    ({"expert_capacity_factor": 0.0}, r"expert_capacity_factor=0\.0 is not positive"),
    (
        {"expert_capacity_factor": 1.0, "cp_size": 2},
        r"expert_capacity_factor=1\.0 needs whole sequences, which cp_size=2 cuts; use cp_size=1 or .*=None",
    ),
    (
        {"expert_rank_capacity_factor": 2.0, "ep_size": 2, "precision": "fp16"},
        r"factor=2\.0 makes steps with too few slots nan, which precision='fp16' takes for .*; use 'bf16', or .*=None",
    ),
    ({"contrastive": "local"}, r"contrastive='local' is not available; use 'global' or 'replica'"),
    (
        {"num_model_chunks": 2},
        r"num_model_chunks=2 does not fit pp_style='1f1b', which has 1 a rank; leave it out, or use pp_style='interl",
    ),
    ({"pp_style": "zbv", "num_model_chunks": 3}, r"num_model_chunks=3 does not fit pp_style='zbv', which has 2 a rank"),
    (
        {"pp_style": "interleaved", "num_model_chunks": 1},
        r"pp_style='interleaved' needs 2 model chunks or more; use num_model_chunks=2",
    ),
    ({"pp_style": "interleaved", "num_model_chunks": 0}, r"num_model_chunks=0 is not a positive integer"),
    ({"zero_stage": 4}, r"zero_stage=4 is not available; use 0 or 1 or 2"),
    (
        {"zero_stage": 0, "zero_size": 2},
        r"zero_size=2 does not fit zero_stage=0, which shards nothing; use zero_stage=1",
    ),
    ({"precision": "fp9"}, r"precision='fp9' is not available; use 'fp32' or 'bf16' or 'fp16'"),
    (
        {"pp_style": "zerobubble"},
        r"pp_style='zerobubble' is not available; use '1f1b' or 'gpipe' or 'interleaved' or 'zero_bubble' or 'zbv' or",
    ),
    (
        {"sequence_parallelism_mode": "ring"},
        r"sequence_parallelism_mode='ring' is not available; use 'split_gather' or",
    ),
    ({"gradient_checkpointing": "some"}, r"gradient_checkpointing='some' is not available; use None, 'full', 'operat"),
    (
        {"gradient_checkpointing": "operators", "offload_activations": "cpu"},
        r"offload_activations='cpu' does not see what gradient_checkpointing='operators' saves; use 'full', or",
    ),
    (
        {"gradient_checkpointing": "operators", "tiled_mlp": True},
        r"gradient_checkpointing='operators' saves the products that tiled_mlp=True computes again; use 'full', or",
    ),
    ({"tiled_mlp": True, "compile_layers": True}, r"tiled_mlp=True cuts layers, which compile_layers=True needs"),
    ({"fp8_recipe": "rowwise"}, r"fp8_recipe='rowwise' needs precision='fp8'; use it, or fp8_recipe='tensorwise'"),
    ({"gradient_checkpointing": 1.5}, r"gradient_checkpointing=1.5 is not available; use .* a share .* such as 0.5"),
    ({"num_microbatches": 2, "microbatch_size": 1}, r"num_microbatches and microbatch_size are both given"),
    ({"num_microbatches": 0}, r"num_microbatches=0 is not positive"),
    ({"microbatch_size": -2}, r"microbatch_size=-2 is not positive"),
    ({"initial_scale": 0}, r"initial_scale=0 is not positive"),
    ({"growth_interval": 0}, r"growth_interval=0 is not positive"),
    ({"max_norm": 0.0}, r"max_norm=0\.0 is not positive"),
    ({"max_norm": float("nan")}, r"max_norm=nan is not positive"),
    ({"zero_bucket_size_in_mb": 0}, r"zero_bucket_size_in_mb=0 is not positive"),
    ({"make_vocab_size_divisible_by": 0}, r"make_vocab_size_divisible_by=0 is not positive"),
    ({"enable_sequence_overlap": True}, r"enable_sequence_overlap=True needs enable_sequence_parallelism=True"),
    ({"tp_info": object()}, r"tp_info is a object; use shardformer.TPInfo\(\)"),
    (
        {"tp_info": TPInfo(), "sharding_dim": 0},
        r"sharding_dim and tp_info each say how weights are cut; use one of them",
    ),
    ({"enable_sequence_parallelism": True}, r"enable_sequence_parallelism=True needs tp_size > 1; use tp_size=2"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_each_rule(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HybridParallelPlugin(**options)


@pytest.mark.parametrize(
    ("given", "device_type", "mib"), [(None, "cpu", 12), (None, "cuda", 128), (5, "cpu", 5), (5.5, "cuda", 5.5)]
)
def test_the_device_decides_on_the_size_of_buckets_unless_it_is_given(
    given: float | None, device_type: str, mib: float
) -> None:
    assert ZeroOptions(zero_bucket_size_in_mb=given).bucket_bytes(device_type) == mib * 2**20


COUNT = ("2", True, 2.5, float("nan"), -1, 0, [2])
NUMBER = ("1.0", True, float("nan"), -1, 0, [1.0])
SWITCH = ("true", 1, 0.0, float("nan"), None, [])
NAME = ("nonsense", 1.5, True, float("nan"), -2, ["fp32"], None)
# Option -> values of wrong types and out of range.
WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tp_size", "pp_size", "cp_size", "ep_size"), (*COUNT, None)),
    **dict.fromkeys(
        ("sp_size", "dp_size", "zero_size", "num_microbatches", "microbatch_size", "num_model_chunks"), COUNT
    ),
    **dict.fromkeys(
        ("growth_interval", "make_vocab_size_divisible_by", "synchrony_interval", "reproducible_unit"), (*COUNT, None)
    ),
    **dict.fromkeys(("max_norm", "expert_capacity_factor", "expert_rank_capacity_factor"), NUMBER),
    "moe_router_bias_update_rate": (-1.0, "0.1", True, float("nan"), float("inf"), None),
    "reproducible_blocks": (*COUNT, 3, 6),
    "reproducible_sequence_blocks": COUNT,
    "initial_scale": (*NUMBER, float("inf"), None),
    "zero_bucket_size_in_mb": (*NUMBER, float("inf")),
    **dict.fromkeys((name for name, each in OPTIONS.items() if isinstance(each.default, bool)), SWITCH),
    **dict.fromkeys(("precision", "nonfinite", "pp_style", "sequence_parallelism_mode", "contrastive"), NAME),
    **dict.fromkeys(("check_layout", "fp8_recipe"), NAME),
    "zero_stage": (4, -1, "1", True, 0.0, float("nan"), None),
    "sharding_dim": (1, "0", False, 0.0, float("nan")),
    "enable_flash_attention": ("flash", 1, 0.5, float("nan"), None),
    "gradient_checkpointing": ("half", True, 0, -0.5, 1.5, float("nan"), [0.5]),
    "layers_per_stage": ("35", 4, True, (1, 0), (2, 1.5), (-1, 3), [True], {"stage_0": 1}),
    "device_mapping": ("cuda:0", 1, [0], True, float("nan")),
    "elastic_layouts": ("tp2", 1, True, [2], ["tp2"], {"tp_size": 2}, float("nan")),
    "custom_policy": ("llama", 1, True, object, float("nan")),
    "tp_info": ("llama", 1, True, {}, float("nan")),
    "seed": ("42", True, 1.5, float("nan"), 2**63, [42]),
    "record_schedule": (1, True, float("nan"), ["."]),
    **dict.fromkeys(
        ("offload_optimizer", "offload_parameters", "offload_activations"), (1, True, float("nan"), "", ["cpu"])
    ),
}


def test_wrong_values_of_all_options_are_known() -> None:
    assert WRONG_VALUES.keys() == OPTIONS.keys() and len(OPTIONS) == 57


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_value_is_one_sentence_in_keywords_and_json(name: str) -> None:
    """The sentence names the value (or the type of an object), the rule, and a value that would do."""
    for value in WRONG_VALUES[name]:
        with pytest.raises(ConfigurationError) as keyword:
            HybridParallelPlugin(**{name: value})
        with pytest.raises(ConfigurationError) as in_json:
            HybridParallelPlugin.from_config({name: value})
        said = str(keyword.value)
        assert said == str(in_json.value)
        shown = f"{name} is a {type(value).__name__}; " if name == "tp_info" else f"{name}={value!r} is "
        assert said.startswith(shown) and said.count("; ") == 1 and "; use " in said


@pytest.mark.parametrize("name", OPTIONS)
def test_the_value_that_would_do_does(name: str) -> None:
    rule = OPTIONS[name].metadata["rule"]
    assert rule.problem(name, rule.example) is None
    assert OPTIONS[name].default is None or rule.problem(name, OPTIONS[name].default) is None


def test_a_mistyped_value_does_not_hide_others() -> None:
    with pytest.raises(ConfigurationError) as caught:
        HybridParallelPlugin(tp_size="2", cp_size=0, max_norm="1", debug=1)
    assert str(caught.value) == (
        "tp_size='2' is not a positive integer; use 1 or more; cp_size=0 is not a positive integer; use 1 or more; "
        "max_norm='1' is not a number; use one such as 1.0; debug=1 is neither True nor False; use one of them"
    )


def test_options_come_back_as_they_were_given() -> None:
    given = {"tp_size": 2, "pp_style": "zbv", "max_norm": 1.0, "precision": "bf16", "debug": True, "seed": 3}
    config = HybridParallelConfig.from_options(**given)
    assert config.options() == {name: each.default for name, each in OPTIONS.items()} | given
    assert HybridParallelConfig.from_options(**config.options()) == config
    with pytest.raises(FrozenInstanceError):
        config.parallel.tp_size = 4


def test_several_problems_are_told_together() -> None:
    with pytest.raises(ConfigurationError) as caught:
        HybridParallelPlugin(tp_size=0, precision="int8", max_norm=-1, enable_sequence_overlap=True)
    for name in ("tp_size=0", "precision='int8'", "max_norm=-1", "enable_sequence_overlap=True"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("tp_siz", "use tp_size"),
        ("zerostage", "use zero_stage"),
        ("maxnorm", "use max_norm"),
        ("tensor_model_parallel_size", "use tp_size=2"),
        ("bf16", "use precision='bf16'"),
        ("gradient_accumulation_steps", "call booster.backward for each batch, inside of booster.no_sync()"),
        ("self", "it has tp_size, pp_size, "),
    ],
)
def test_unknown_option_names_what_to_write(name: str, instead: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"has no option '{name}'; {instead}")):
        HybridParallelPlugin(**{name: 2})


def test_names_of_other_libraries_lead_to_valid_options() -> None:
    assert not set(option_group._ELSEWHERE).intersection(OPTIONS)
    names = [name for names in option_group._OF_OTHERS.values() for name in names.split()]
    assert len(set(names)) == len(names)
    needed = {
        "offload_parameters": {"zero_stage": 3},
        "num_model_chunks": {"pp_style": "interleaved"},
        "cuda_graphs": {"compile_layers": True, "pp_size": 1},
    }
    for use in option_group._OF_OTHERS:
        options = options_of_text(use.replace(" and ", ","))
        further = [needed[name] for name in options if name in needed]
        HybridParallelConfig.from_options(**dict(ChainMap(options, *further, {"tp_size": 2, "pp_size": 2})))


@pytest.mark.parametrize(
    ("options", "world_size", "dp_size"), [({}, 4, 4), ({"tp_size": 2}, 8, 4), ({"tp_size": 2, "pp_size": 2}, 4, 1)]
)
def test_data_parallel_size_is_what_is_left(options: dict[str, Any], world_size: int, dp_size: int) -> None:
    assert HybridParallelConfig.from_options(**options).parallel.data_parallel_size(world_size) == dp_size
    assert (
        HybridParallelConfig.from_options(**options, dp_size=dp_size).parallel.data_parallel_size(world_size) == dp_size
    )


def test_sizes_that_do_not_fit_the_world() -> None:
    with pytest.raises(ConfigurationError, match=r"world size 6 is not a multiple of .*2\*2=4; start 8 ranks"):
        HybridParallelConfig.from_options(tp_size=2, pp_size=2).parallel.data_parallel_size(6)
    with pytest.raises(ConfigurationError, match=r"dp_size=3 does not fit world size 4 .*; use dp_size=2"):
        HybridParallelConfig.from_options(tp_size=2, dp_size=3).parallel.data_parallel_size(4)


@pytest.mark.parametrize(
    ("options", "rows", "expected"),
    [
        ({}, 5, 1),
        ({"pp_size": 3}, 5, 3),
        ({"pp_size": 3}, 2, 2),
        ({"num_microbatches": 4}, 9, 4),
        ({"num_microbatches": 4}, 3, 3),
        ({"microbatch_size": 2}, 5, 3),
    ],
)
def test_how_a_batch_is_cut(options: dict[str, Any], rows: int, expected: int) -> None:
    config = HybridParallelConfig.from_options(**options)
    assert config.pipeline.microbatches_of(rows, config.parallel.pp_size) == expected


def test_from_config_reads_files_and_dicts(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"tp_size": 2, "precision": "bf16"}))
    plugin = HybridParallelPlugin.from_config(path, precision="fp16")
    assert (plugin.tp_size, plugin.config.mixed_precision.precision) == (2, "fp16")
    assert HybridParallelPlugin.from_config({"pp_size": 2}).pp_size == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is no file; give one of HybridParallelPlugin options"),
        ("{tp_size: 2}", "is not valid JSON"),
        ("[1, 2]", "holds a list; give a JSON object"),
    ],
)
def test_from_config_refuses_other_files(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        HybridParallelPlugin.from_config(path)


def test_a_plugin_without_a_process_group_says_what_to_call() -> None:
    with pytest.raises(ConfigurationError, match=r"call launch_from_torch\(\) first"):
        _ = HybridParallelPlugin().mesh
