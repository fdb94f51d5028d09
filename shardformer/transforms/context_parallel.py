"""Requirements of context parallelism on a model, and the changes it makes to the model.

Token mixers under context parallelism: state spaces, linear attention and short convolutions of hybrid models.

A recurrence needs the tokens in front of it, which other ranks have. So each rank runs a mixer over whole sequences and
keeps its own shard of what it returns: attention, experts, embeddings and the loss are shared, a mixer is not.
Every rank computes the gradients that its own tokens cause, and these are added up as those of all parameters are.

The sequences end with the padding to equal shards, which a causal mixer does not let reach the tokens in front of it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardformer.attention import uses_registry
from shardformer.attention.packed_documents import TOKENS, token_mixers
from shardformer.context_parallel.attention import RING, gather_behind_layer, gather_behind_reader
from shardformer.context_parallel.zigzag import Positions, ZigzagSharding, cut_features, cut_inputs
from shardformer.distributed.collectives import pad_dim
from shardformer.policies.base import LAYERS_AT_RANDOM, Policy
from shardformer.policies.registry import head_loss_of
from shardformer.sequence_parallel.split_gather import count_whole_sequences, first_output
from shardformer.shard_config import ShardConfig
from shardformer.stages.stage import StagePlaceholder
from shardformer.utils.source import counts_positions

_MASK = "attention_mask"


def run_on_whole_sequences(mixers: Iterable[nn.Module], axis: ZigzagSharding) -> None:
    """Let mixers read [batch, seq, hidden], and return this rank's shard, [batch, part, hidden]."""
    # transformers cuts the mask of a mixer to as many tokens as this rank has. A layer that is recomputed gets the mask
    # of its own pass again, and so finds the whole one of that pass.
    whole_masks: WeakIdKeyDictionary = WeakIdKeyDictionary()
    for mixer in mixers:
        _run_whole(mixer, axis, whole_masks)


def _run_whole(mixer: nn.Module, axis: ZigzagSharding, whole_masks: WeakIdKeyDictionary) -> None:
    signature = inspect.signature(mixer.forward)

    def whole_mask(mask: Tensor) -> Tensor:
        """Return [batch, seq], not zero for tokens that are not padding."""
        if mask not in whole_masks:
            real, length = axis.latest.real, axis.latest.length
            whole = mask.new_ones(len(mask), length) if real is None else real.to(mask.dtype)
            whole_masks[mask] = pad_dim(whole, 1, 2 * axis.size)
        return whole_masks[mask]

    def gather(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        bound = signature.bind_partial(*args, **kwargs)
        given = bound.arguments
        part = given[TOKENS]
        given[TOKENS] = axis.gather(part, part.shape[1] * axis.size)
        if isinstance(given.get(_MASK), Tensor):
            given[_MASK] = whole_mask(given[_MASK])
        return bound.args, bound.kwargs

    mixer.register_forward_pre_hook(gather, with_kwargs=True)
    mixer.register_forward_hook(lambda _, __, output: first_output(output, axis.take))


# Rotary embeddings that depend on the length of the full sequence, which no rank has.
_ROTARY_OF_LENGTH = ("dynamic", "longrope")


def context_problems(model: nn.Module, policy: Policy, config: ShardConfig) -> list[str]:
    """Return the reasons why the sequences of a model cannot be sharded over ranks; empty if there are none."""
    asked, name = f"cp_size={config.context.size}", type(model).__name__
    is_ring = config.context_parallel_mode == RING
    reason = reason_against_sharing(model, policy)
    if reason is not None and (is_ring or not _attends_by_heads(model, policy)):
        way_out = "sequence_parallelism_mode='all_to_all', or " if _attends_by_heads(model, policy) else ""
        return [f"{asked} cannot share the sequences of {name}, {reason}; use {way_out}cp_size=1"]
    if reason is not None:
        found = [
            problem
            for part in policy.parts
            for problem in (*_layer_problems(part.model, part, config), *_head_problems(part, config, "cp_size=1"))
        ]
        return list(dict.fromkeys(found))
    num_stages = config.stage_manager.num_stages
    if num_stages > 1 and _embeds_outside(model, policy):
        return [
            f"{asked} cannot share the sequences of {name} over pp_size={num_stages} stages, because its tokens are "
            "embedded outside of the module that reads them; use pp_size=1, or cp_size=1"
        ]
    if config.sequence is not None and mixers_of_layers(model, policy):
        return [_shared_twice(model, config)]
    return [] if is_ring else _head_problems(policy, config, "'ring_attn'")


def _attends_by_heads(model: nn.Module, policy: Policy) -> bool:
    """Return whether layers can exchange parts of sequences for heads, see `transforms/layout_checks.py`."""
    attends = policy.own_attention or any(map(uses_registry, model.modules()))
    return policy.stages is not None and bool(attends) and policy.exchanges_heads()


def _layer_problems(model: nn.Module, policy: Policy, config: ShardConfig) -> Iterator[str]:
    """Yield why parts of sequences inside of layers would compute something else, or not at all."""
    asked, name = f"cp_size={config.context.size}", type(model).__name__
    for reason in counting_reasons(model, policy):
        yield f"{asked} cannot share the sequences of {name}, {reason}; use cp_size=1"
    if config.sequence is not None:
        yield _shared_twice(model, config)
    if (head := head_loss_of(model)) is not None and head.routers is not None:
        yield f"{asked} cannot share the sequences of {name}, whose routers see whole ones; use cp_size=1"
    for option in LAYERS_AT_RANDOM:
        if value := getattr(model.config, option, 0.0):
            yield f"{option}={value} skips layers at random, other ones on each rank of {asked}; use {option}=0.0"


def _shared_twice(model: nn.Module, config: ShardConfig) -> str:
    return (
        f"cp_size={config.context.size} and enable_sequence_parallelism=True both share the layers of "
        f"{type(model).__name__}; use enable_sequence_parallelism=False, or cp_size=1"
    )


def layers_of(model: nn.Module, policy: Policy) -> nn.ModuleList:
    """Return the list of layers whose sequences ranks share."""
    return model.get_submodule(policy.layer_lists[0])


def runner_of(model: nn.Module, policy: Policy) -> nn.Module:
    """Return the module around the list of layers, which calls them."""
    return model.get_submodule(policy.layer_lists[0].rpartition(".")[0])


def _head_problems(policy: Policy, config: ShardConfig, way_out: str) -> list[str]:
    size, tp_size, problems = config.context.size, config.tensor_parallel_size, []
    kv_heads = getattr(policy.model.config, "num_key_value_heads", None)
    for count in dict.fromkeys(policy.head_counts().values()):
        heads = count // tp_size
        of_keys = max((kv_heads or heads * tp_size) // tp_size, 1)
        if heads % size or (of_keys % size and size % of_keys):
            problems.append(
                f"sequence_parallelism_mode='all_to_all' shares {heads} heads ({of_keys} of keys) out over "
                f"cp_size={size} ranks, which does not divide them; use {way_out}, or a cp_size that does"
            )
    return problems


def reason_against_sharing(model: nn.Module, policy: Policy) -> str | None:
    """Return why ranks cannot share the sequences of a model, as "whose tokens meet outside of attention"; or None."""
    return next(_reasons(model, policy), None)


def _reasons(model: nn.Module, policy: Policy) -> Iterator[str]:
    layout, text = policy.stages, getattr(model, "config", None)
    if layout is None or layout.next_layers is not None or getattr(text, "is_encoder_decoder", False):
        yield "which has other layers than one list of them"
        return
    if not policy.supports_ulysses or not any(map(uses_registry, model.modules())):
        yield "whose attention does not go through transformers' registry alone"
    if not policy.shares_sequences():
        yield "whose tokens meet outside of attention"
    base = _reader_of_tokens(model, policy)
    if base is None:
        yield "which takes no position_ids"
    elif not _makes_masks(base):
        yield "which does not make its masks by transformers' functions"
    elif _is_called_with_masks(model, base):
        yield "which makes its masks before the module that reads the tokens"
    elif layout.inputs_between and base is not runner_of(model, policy):
        yield "which reads more than hidden states between its layers"
    yield from counting_reasons(model, policy)
    text = text.get_text_config() if hasattr(text, "get_text_config") else text
    if getattr(text, "attn_logit_softcapping", None) is not None:
        yield "whose attention scores are soft-capped"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    if kinds & set(_ROTARY_OF_LENGTH):
        yield "whose rotary embedding depends on the length of a sequence"


def counting_reasons(model: nn.Module, policy: Policy) -> Iterator[str]:
    """Yield why modules of the layers would count other positions than those of whole sequences."""
    lists = [model.get_submodule(path) for path in policy.layer_lists]
    if any(counts_positions(type(module)) is None for layers in lists for module in layers.modules()):
        yield "whose layers count positions by the length of their input"


def mixers_of_layers(model: nn.Module, policy: Policy) -> list[nn.Module]:
    """Return the modules that mix tokens outside of attention, in layers whose sequences ranks share."""
    return token_mixers(layers_of(model, policy))


def _reader_of_tokens(model: nn.Module, policy: Policy) -> nn.Module | None:
    """Return the innermost module around the layers that takes token ids and position ids.

    The innermost one, because heads may call it directly.
    """
    path = policy.layer_lists[0].split(".")[:-1]
    around = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
    asked = {"input_ids", "position_ids"}
    return next((each for each in around if asked <= inspect.signature(each.forward).parameters.keys()), None)


def _embeds_outside(model: nn.Module, policy: Policy) -> bool:
    """Return whether a module around the reader of tokens embeds them, to insert images: stages send it parts."""
    reader = _reader_of_tokens(model, policy)
    path = next(name for name, module in model.named_modules() if module is reader)
    return not policy.tokens_mix_only_in_attention() and "." in path


def _makes_masks(base: nn.Module) -> bool:
    names = vars(sys.modules[type(base).__module__])
    return any(name.startswith("create_") and name.endswith("_mask") for name in names)


def _is_called_with_masks(model: nn.Module, base: nn.Module) -> bool:
    """Whether a module between the model and the reader of its tokens makes the masks, as where images join them."""
    path = next(name for name, module in model.named_modules() if module is base).split(".")
    between = [model.get_submodule(".".join(path[:depth])) for depth in range(1, len(path))]
    called = {name for each in between for name in inspect.unwrap(type(each).forward).__code__.co_names}
    return any(name.startswith("create_") and "mask" in name for name in called)


def share_sequences(model: nn.Module, policy: Policy, config: ShardConfig, positions: Positions) -> None:
    """Shard the inputs of the base model along the sequence.

    If the head needs full sequences, they are gathered after the last layer; or, if the module whose inputs are sharded
    runs the layers itself, after that one, which may give its output the shape of its inputs (GPT-2).
    """
    axis, reader = config.context, _reader_of_tokens(model, policy)
    cut_features(reader, axis, policy.stages.inputs_between)
    cut_inputs(reader, axis, positions)
    head = head_loss_of(model)
    model.context_axis, model.sequence_is_cut = axis, True
    model.returns_parts = head is not None and head.per_token
    layers = layers_of(model, policy)
    count_whole_sequences(model, layers, axis.positions_of_part)
    run_on_whole_sequences(mixers_of_layers(model, policy), axis)
    if not model.returns_parts and not isinstance(layers[-1], StagePlaceholder):
        if any(child is layers for child in reader.children()):
            gather_behind_reader(reader, axis)
        else:
            gather_behind_layer(layers[-1], axis)
