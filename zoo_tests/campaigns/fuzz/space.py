"""Draws a case. Most of what is drawn keeps the documented rules, so that few cases are refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from zoo_tests.campaigns.fuzz.case import Case
from zoo_tests.campaigns.fuzz.events import draw_script
from zoo_tests.campaigns.fuzz.families import (
    EXCHANGE_HEADS,
    FAMILIES,
    FIXED_HEADS,
    MIXTURES,
    NOT_IN_16_BIT,
    SHARE_SEQUENCES,
    UNEVEN_HEADS,
)
from zoo_tests.zoo import Family, Head

WORLD_SIZES = {1: 1, 2: 8, 3: 1, 4: 10, 8: 2}
_MOST_OF_AN_AXIS = 4  # ranks; the models have as many heads and layers
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_SCHEDULES = {"1f1b": 4, "gpipe": 1, "interleaved": 2, "zero_bubble": 2, "zbv": 1, "dualpipev": 1}
_STAGES_OF_A_RANK = {"interleaved": 2, "zero_bubble": 2, "zbv": 2, "dualpipev": 2}
_ADAPTED = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "mistral": ["q_proj", "o_proj", "up_proj"],
    "qwen2": ["k_proj", "down_proj"],
    "bert": ["query", "value"],
    "gpt2": ["c_attn", "c_proj"],
}
_OPTIMIZERS: dict[str, tuple[int, dict[str, Any]]] = {
    "SGD": (6, {"lr": 0.2}),
    "momentum": (5, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "AdamW": (5, {"lr": 2e-3, "eps": 1e-4, "weight_decay": 0.05}),
    "Adam": (1, {"lr": 2e-3, "eps": 1e-4, "amsgrad": True}),
    "Adagrad": (1, {"lr": 0.02, "initial_accumulator_value": 0.1}),
    "RMSprop": (1, {"lr": 1e-3, "eps": 1e-3, "momentum": 0.5}),
    "NAdam": (1, {"lr": 2e-3, "eps": 1e-4}),
    "Adafactor": (1, {"lr": 5e-3}),
}
_SCHEDULERS: list[dict[str, Any]] = [
    {},
    {"name": "LambdaLR"},
    {"name": "StepLR", "step_size": 1, "gamma": 0.7},
    {"name": "CosineAnnealingLR", "T_max": 5},
    {"name": "OneCycleLR", "max_lr": 0.01, "total_steps": 20},
]


def draw(seed: int, index: int) -> Case:
    """The case of a number under a seed, always the same."""
    numbers = Draw(f"{seed}/{index}")
    name = numbers.choice(sorted(FAMILIES))
    family = FAMILIES[name]
    head = family.main_head if numbers.chance(0.6) else numbers.choice(sorted(family.heads))
    world_size = numbers.weighted(WORLD_SIZES)
    sizes = numbers.sizes(name, head, world_size)
    config = _config(numbers, name, head, sizes)
    precision = _precision(numbers, name, head, config)
    lora = _lora(numbers, name, sizes, precision)
    plugin = _options(numbers, name, sizes, config)
    if precision == "fp64" and plugin.get("enable_fused_normalization"):
        precision = "fp32"  # to which many a native norm rounds, and no fused one
    rows = _rows(numbers, name, head, plugin, world_size)
    optimizer = _optimizer(numbers, precision, bool(lora), sizes)
    case = Case(
        family=name,
        head=head,
        config=config,
        precision=precision,
        world_size=world_size,
        plugin=plugin,
        optimizer=optimizer,
        scheduler=_scheduler(numbers, optimizer),
        padding=numbers.choice(["mixed", "mixed", "right", "left", "none", *_without_mask(family.heads[head])]),
        rows=rows,
        lora=lora,
        frozen=("embed",) if not lora and numbers.chance(0.08) else (),
    )

    def other_options() -> dict[str, Any]:
        """Of a layout that the same model goes on under."""
        others = numbers.sizes(name, head, world_size)
        if not _fits(name, config, others):
            others = sizes
        options = _options(numbers, name, others, config) | _kept(plugin)
        if precision == "fp64":
            options.pop("enable_fused_normalization", None)
        if "num_microbatches" in options:
            options["num_microbatches"] = min(options["num_microbatches"], max(rows // others["dp_size"], 1))
        if family.heads[head].samples_are_coupled:
            _in_one_piece(options)
        return options

    return case.but(script=tuple(draw_script(numbers, case, family.heads[head], other_options)))


class Draw(random.Random):
    """Random numbers, and what is drawn in more than one place."""

    def chance(self, share: float) -> bool:
        return self.random() < share

    def weighted(self, weights: Mapping[Any, float]) -> Any:
        return self.choices(list(weights), list(weights.values()))[0]

    def sizes(self, family: str, head: str, world_size: int) -> dict[str, int]:
        """Ranks on each axis."""
        weights = {"tp_size": 4.0, "pp_size": 3.0, "dp_size": 3.0}
        if family in SHARE_SEQUENCES:
            weights["cp_size"] = 1.5
        if FAMILIES[family].heads[head].samples_are_coupled:
            del weights["dp_size"]
        sizes = dict.fromkeys(("tp_size", "pp_size", "cp_size", "dp_size"), 1)
        for factor in {1: [], 2: [2], 3: [3], 4: [2, 2], 8: [2, 2, 2]}[world_size]:
            free = {axis: weight for axis, weight in weights.items() if sizes[axis] * factor <= _MOST_OF_AN_AXIS}
            sizes[self.weighted(free)] *= factor
        return sizes


def _field(family: Family, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(family.config.get(name), int)), None)


def _value(name: str, config: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    """Of the field of several names that the family has."""
    field = _field(FAMILIES[name], names)
    return config.get(field, FAMILIES[name].config.get(field, default))


def _is_stack(family: Family) -> bool:
    """Whether its layers are one list, whose length a single number says."""
    layers = ("num_decoder_layers", "encoder_layers", "depths", "attention_types", "num_hidden_groups", "layer_types")
    return _field(family, _DEPTHS) is not None and not any(name in family.config for name in layers)


def _config(numbers: Draw, name: str, head: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    family, config = FAMILIES[name], {}
    fixed = family.heads[head].config
    if _is_stack(family):
        depth = max(numbers.choice([2, 3, 4, 5]), 2 * sizes["pp_size"] if numbers.chance(0.5) else sizes["pp_size"])
        config[_field(family, _DEPTHS)] = depth
    if "vocab_size" in family.config and numbers.chance(0.3):
        config["vocab_size"] = numbers.choice([97, 128, 250, 333])
    if "tie_word_embeddings" in family.config and numbers.chance(0.4):
        config["tie_word_embeddings"] = numbers.chance(0.6)
    config |= _attention(numbers, name, sizes)
    for key in ("attention_bias", "mlp_bias"):
        if name in ("llama", "olmo2", "granite", "arcee") and numbers.chance(0.2):
            config[key] = True
    if numbers.chance(0.1) and not family.attention_by_hand:
        config["attn_implementation"] = "eager"
    return {key: value for key, value in config.items() if key not in fixed}


def _attention(numbers: Draw, name: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Numbers of heads that the tensor-parallel ranks share out."""
    family, tp_size = FAMILIES[name], sizes["tp_size"]
    field = _field(family, _HEADS)
    if field is None or "encoder_layers" in family.config or name in FIXED_HEADS:
        return {}
    heads = family.config[field]
    if numbers.chance(0.4) or tp_size == 3:
        heads = numbers.choice([3, 6, 12] if tp_size == 3 else [4, 8, 12])
        if name in UNEVEN_HEADS and numbers.chance(0.3):
            heads = numbers.choice([count for count in (3, 6, 8) if count >= tp_size])
    rotated = family.config.get("hidden_size", 0) / heads * family.config.get("partial_rotary_factor", 2)
    if heads == family.config[field] or rotated % 2:  # features are rotated in pairs
        return {}
    found = {field: heads}
    if "num_key_value_heads" in family.config:
        kv_heads = heads if heads % tp_size else numbers.choice([heads, heads // 2 if heads % 2 == 0 else heads, 1])
        found["num_key_value_heads"] = kv_heads
    return found


def _fits(name: str, config: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
    """Whether the other layout takes the model that was drawn for the first."""
    count, layers = _value(name, config, _HEADS, 4), _value(name, config, _DEPTHS, 4)
    uneven = name in UNEVEN_HEADS and count >= sizes["tp_size"]
    return (count % sizes["tp_size"] == 0 or uneven) and layers >= sizes["pp_size"]


def _lora(numbers: Draw, name: str, sizes: Mapping[str, int], precision: str) -> dict[str, Any]:
    if name not in _ADAPTED or not numbers.chance(0.3) or precision in ("bf16", "fp16"):
        return {}
    return {"target_modules": _ADAPTED[name], "r": numbers.choice([2, 3]), "lora_alpha": 4}


def _options(numbers: Draw, name: str, sizes: Mapping[str, int], config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the plugin, for ranks on these axes."""
    options: dict[str, Any] = {key: size for key, size in sizes.items() if size > 1 and key != "dp_size"}
    options |= {"zero_stage": numbers.choice([0, 1, 2, 3])}
    seeing_other_tokens = sizes["dp_size"] * sizes["cp_size"]
    if name in MIXTURES and seeing_other_tokens % 2 == 0 and numbers.chance(0.6):
        options["ep_size"] = numbers.choice([2, seeing_other_tokens])
    options |= _microbatches(numbers) | _schedule(numbers, name, sizes, config)
    options |= _sequence(numbers, name, sizes, config)
    if numbers.chance(0.35):
        options["gradient_checkpointing"] = numbers.choice(["full", "operators", "selective", 0.5])
        if options["gradient_checkpointing"] == "selective" and not _uses_registry(name):
            options["gradient_checkpointing"] = "full"
        if name in _NEVER_RECOMPUTED:
            del options["gradient_checkpointing"]
    for key, share in _SWITCHES.items():
        if numbers.chance(share):
            options[key] = True
    if config.get("attn_implementation") == "eager":  # whose rows without keys no other kernel computes
        options.pop("enable_flash_attention", None)
    if numbers.chance(0.3):
        options["max_norm"] = numbers.choice([0.05, 1.0])
    if numbers.chance(0.4):
        options["make_vocab_size_divisible_by"] = numbers.choice([1, 8, 128])
    if numbers.chance(0.6):
        options["zero_bucket_size_in_mb"] = numbers.choice([0.02, 0.1, 0.5])
    if numbers.chance(0.1):
        options["overlap_communication"] = False
    return options


_SWITCHES = {
    "enable_fused_normalization": 0.12,
    "enable_jit_fused": 0.12,
    "enable_flash_attention": 0.12,
    "overlap_allgather": 0.15,
    "debug": 0.03,
}
_WRITTEN_OUT = ("bloom", "falcon", "falcon_multi_query", "falcon_alibi", "gptj", "gpt_neo", "swinv2", "mpnet", "mvp",
                "deberta_v2", "deberta_v2_convolved", "swin", "albert")  # fmt: skip


_NEVER_RECOMPUTED = ("albert", "mpnet", "swinv2")


def _uses_registry(name: str) -> bool:
    return name not in _WRITTEN_OUT and not FAMILIES[name].attention_by_hand


def _kept(plugin: Mapping[str, Any]) -> dict[str, Any]:
    """Options that a user keeps when he changes the layout, because training depends on them."""
    return {"max_norm": plugin.get("max_norm")}


def _microbatches(numbers: Draw) -> dict[str, Any]:
    if numbers.chance(0.25):
        return {"microbatch_size": numbers.choice([1, 2, 3])}
    return {"num_microbatches": numbers.choice([1, 2, 3, 4])}


def _schedule(numbers: Draw, name: str, sizes: Mapping[str, int], config: Mapping[str, Any]) -> dict[str, Any]:
    if sizes["pp_size"] == 1:
        return {}
    layers = _value(name, config, _DEPTHS, 4) if _is_stack(FAMILIES[name]) else None
    style = numbers.weighted(_SCHEDULES)
    stages = sizes["pp_size"] * _STAGES_OF_A_RANK.get(style, 1)
    if stages > (layers or 5):
        style, stages = "1f1b", sizes["pp_size"]
    found: dict[str, Any] = {"pp_style": style}
    if style == "zero_bubble" and numbers.chance(0.5):
        found["num_model_chunks"], stages = 1, sizes["pp_size"]
    if layers is not None and layers > stages and numbers.chance(0.35):
        cuts = sorted(numbers.sample(range(1, layers), stages - 1))
        found["layers_per_stage"] = [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    return found


def _sequence(numbers: Draw, name: str, sizes: Mapping[str, int], config: Mapping[str, Any]) -> dict[str, Any]:
    """Sequence and context parallelism."""
    found: dict[str, Any] = {}
    if sizes["cp_size"] > 1:
        divides = _value(name, config, _HEADS, 4) % (sizes["cp_size"] * sizes["tp_size"]) == 0
        exchanges = name in EXCHANGE_HEADS and divides and numbers.chance(0.4)
        found["sequence_parallelism_mode"] = "all_to_all" if exchanges else "ring_attn"
        if not exchanges and sizes["tp_size"] > 1 and numbers.chance(0.5):
            found |= {"sequence_parallelism_mode": "split_gather", "enable_sequence_parallelism": True}
        return found
    if sizes["tp_size"] == 1 or not FAMILIES[name].sequence_parallel or not numbers.chance(0.4):
        return {}
    divides = _value(name, config, _HEADS, 4) % sizes["tp_size"] == 0
    if name in EXCHANGE_HEADS and numbers.chance(0.35) and divides:
        return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
    found = {"enable_sequence_parallelism": True}
    if numbers.chance(0.3):
        found["enable_sequence_overlap"] = True
    return found


def _rows(numbers: Draw, name: str, head: str, plugin: dict[str, Any], world_size: int) -> int:
    """Of a full global batch: every replica can fill its micro-batches."""
    if FAMILIES[name].heads[head].samples_are_coupled:
        _in_one_piece(plugin)
    parts = plugin.get("num_microbatches", 1)
    replicas = world_size
    for axis in ("tp_size", "pp_size", "cp_size"):
        replicas //= plugin.get(axis, 1)
    least = max(2, parts * replicas)
    return numbers.randint(least, max(least, 8))


def _in_one_piece(plugin: dict[str, Any]) -> None:
    plugin.pop("microbatch_size", None)
    plugin["num_microbatches"] = 1


def _precision(numbers: Draw, name: str, head: str, config: Mapping[str, Any]) -> str:
    """16 bit where the loss of plain transformers is a reference in it; fp64 where transformers does not round."""
    chosen = FAMILIES[name].heads[head]
    sixteen_bit = chosen.reference_loss is not None and name not in (*MIXTURES, *NOT_IN_16_BIT)
    if sixteen_bit and numbers.chance(0.12):
        return numbers.choice(["bf16", "fp16"])
    return "fp32" if "attn_implementation" in config else FAMILIES[name].precision  # eager attention, too


def _without_mask(head: Head) -> list[str]:
    return [] if head.criterion is not None else ["no mask"]  # which may read it


def _scheduler(numbers: Draw, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    if optimizer["name"] == "Adafactor":
        return {}
    chosen = dict(numbers.choice(_SCHEDULERS))
    if chosen.get("name") == "OneCycleLR" and not optimizer.get("momentum") and "Adam" not in optimizer["name"]:
        chosen["cycle_momentum"] = False  # there is none
    return chosen


def _optimizer(numbers: Draw, precision: str, adapted: bool, sizes: Mapping[str, int]) -> dict[str, Any]:
    weights = {name: weight for name, (weight, _) in _OPTIMIZERS.items()}
    if precision != "fp64":
        weights = {"SGD": 1, "momentum": 1, **({"AdamW": 0.5} if precision == "fp32" else {})}
    chosen = numbers.weighted(weights)
    options = {"name": "SGD" if chosen == "momentum" else chosen, **_OPTIMIZERS[chosen][1]}
    options["groups"] = numbers.choice(["one", "one", "by shape", "by layer"])
    if adapted and numbers.chance(0.7):
        options["groups"] = "trainable"
    if precision == "fp32" and chosen == "AdamW":
        options["eps"] = 1e-2
    if numbers.chance(0.2) and chosen in ("SGD", "momentum", "AdamW"):
        options["foreach"] = numbers.chance(0.5)
    return options
