"""Check which layers of peft support a sharding of the model; others are refused before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from shardformer.layers.linear import is_linear
from shardformer.peft.kinds import IA3_LINEAR, LORA_LINEAR, inner_module, is_a, is_exactly, name_of
from shardformer.policies.base import Policy
from shardformer.shard_config import ShardConfig

Layers = Mapping[str, nn.Module]


def check_layers(layers: Layers, config: ShardConfig, policy: Policy) -> None:
    """Check that the layers of peft, given by path, support the sharding of their model.

    Raises:
        ValueError: they do not; the message has all reasons.
    """
    problems = []
    if layers and config.sequence is not None and config.enable_sequence_overlap:
        problems.append(
            "enable_sequence_overlap=True does not support adapters, which read tokens before they have arrived; "
            "use enable_sequence_overlap=False"
        )
    if layers and policy.repeats_layers and config.stage_manager.num_stages > 1:
        problems.append("adapters of layers that several pipeline stages run are not summed over them; use pp_size=1")
    if config.stage_manager.num_stages > 1:
        problems += _problems_of_stages(layers, policy)
    if config.tensor_parallel_size > 1:
        problems += _problems_of_cuts(layers, f"tp_size={config.tensor_parallel_size}")
    if config.tensor_parallel_size > 1 or config.shards_experts:
        of_parameters = [path for path, layer in layers.items() if is_a(layer, "lora parameter")]
        problems += _about(
            layers,
            of_parameters,
            "target_parameters reaches parameters of {path}, which tp_size and ep_size shard; "
            "use tp_size=1 and ep_size=1",
        )
    if problems:
        raise ValueError("; ".join(problems))


def _problems_of_stages(layers: Layers, policy: Policy) -> list[str]:
    chain = policy.stages.chain if policy.stages is not None else []
    lists = [".".join(filter(None, (policy.base_path, each.layers))) for each in chain]
    around = [path for path in layers if any(f"{each}.".startswith(f"{path}.") for each in lists)]
    tokens = [path for path, layer in layers.items() if is_a(layer, "trainable tokens")]
    tied = [path for path in tokens if layers[path].token_adapter.tied_adapter is not None]
    return [
        *_tied_adapters(layers, "pp_size"),
        *_about(
            layers,
            around,
            "modules_to_save reaches {path}, whose layers pp_size distributes over stages; name modules inside "
            "of the layers",
        ),
        *_about(
            layers,
            tied,
            "trainable_token_indices changes {path}, which is tied to the embedding of another stage; use pp_size=1, "
            "or a model with tie_word_embeddings=False",
        ),
    ]


_CUT = (*LORA_LINEAR, *IA3_LINEAR, "lora embedding", "copied module")
_SAID_ELSEWHERE = ("trainable tokens", "lora parameter")


def _problems_of_cuts(layers: Layers, cut_by: str) -> list[str]:
    rest = "use tp_size=1 (dp, pp work), or"
    unknown = [path for path, layer in layers.items() if not is_exactly(layer, *_CUT, *_SAID_ELSEWHERE)]
    tokens = [path for path, layer in layers.items() if is_a(layer, "trainable tokens") and not _looks_up_rows(layer)]
    variants = [path for path, layer in layers.items() if _has_unknown_variant(layer)]
    dropped = [path for path, layer in layers.items() if _drops_out_with_dora(layer)]
    no_linear = [path for path, layer in layers.items() if not _fits(layer)]
    return [
        *_tied_adapters(layers, cut_by),
        *_about(layers, unknown, f"peft's {{name}} on {{path}} cannot be cut over {cut_by}; {rest} LoRA or IA3"),
        *_about(
            layers,
            tokens,
            f"trainable_token_indices changes rows of {{path}}, a {{base}} of which {cut_by} leaves each rank a part; "
            f"{rest} modules_to_save with the name of the embedding",
        ),
        *_about(layers, variants, f"peft's {{variant}} on {{path}} cannot be cut over {cut_by}; {rest} plain LoRA"),
        *_about(
            layers,
            dropped,
            "use_dora=True with lora_dropout above 0 multiplies by the whole weight of {path}, of which "
            f"{cut_by} leaves each rank a part; {rest} lora_dropout=0",
        ),
        *_about(
            layers,
            no_linear,
            "the adapter of {path} adds to {base}, which is not a linear layer; leave it out of target_modules",
        ),
    ]


def _about(layers: Layers, paths: Sequence[str], text: str) -> list[str]:
    """Return a sentence about the first of these layers and the number of others; an empty list if there are none."""
    if not paths:
        return []
    layer = layers[paths[0]]
    more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    variants = sorted({type(each).__name__ for each in getattr(layer, "lora_variant", {}).values()})
    base = type(inner_module(layer)).__name__
    return [text.format(path=f"{paths[0]}{more}", name=name_of(layer), base=base, variant=" and ".join(variants))]


def _tied_adapters(layers: Layers, cut_by: str) -> list[str]:
    """Report an adapter shared by tied layers, because ranks hold different shards of the two layers."""
    owners: dict[int, str] = {}
    for path, layer in layers.items():
        if is_a(layer, "trainable tokens"):  # peft ties these unasked; they have sentences of their own
            continue
        of_model = {id(each) for each in inner_module(layer).parameters()}
        for parameter in layer.parameters():
            owner = owners.setdefault(id(parameter), path)
            if id(parameter) not in of_model and owner != path and not path.startswith(f"{owner}."):
                return [
                    f"ensure_weight_tying=True gives {owner} and {path} one adapter, of which {cut_by} leaves ranks "
                    "other parts; use ensure_weight_tying=False"
                ]
    return []


def _has_unknown_variant(layer: nn.Module) -> bool:
    variants = getattr(layer, "lora_variant", {}).values()
    return not all(is_exactly(each, "dora") and is_exactly(layer, *LORA_LINEAR) for each in variants)


def _looks_up_rows(layer: nn.Module) -> bool:
    """Return whether trained rows belong to a plain embedding; heads that are tied to one multiply by them."""
    inner = inner_module(layer)
    is_tied = layer.token_adapter.tied_adapter is not None
    return isinstance(inner, nn.Embedding) and type(inner).forward is nn.Embedding.forward and not is_tied


def _drops_out_with_dora(layer: nn.Module) -> bool:
    return any(isinstance(layer.lora_dropout[name], nn.Dropout) for name in getattr(layer, "lora_variant", {}))


def _fits(layer: nn.Module) -> bool:
    """Return whether the module wrapped by a layer of a known kind can be sharded."""
    if is_exactly(layer, "lora embedding"):
        return isinstance(layer.base_layer, nn.Embedding)
    return is_linear(inner_module(layer)) or not is_exactly(layer, *LORA_LINEAR, *IA3_LINEAR)
