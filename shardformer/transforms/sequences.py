"""Sequences that ranks share: what this asks of a model and changes in it, and the kernels of its attentions.

Token mixers - state spaces, linear attention and short convolutions - need the tokens in front, which other ranks have.
So each rank runs a mixer over whole sequences and keeps its own shard of what it returns: attention, experts,
embeddings and the loss are shared, a mixer is not. Every rank computes the gradients that its own tokens cause, and
these are added up as those of all parameters are. The sequences end with the padding to equal shards, which a causal
mixer does not let reach the tokens in front of it.

Models such as GPT-OSS, OPT and BERT make their masks without positions, so that transformers does not see the documents
of a row. While such a model runs with positions that restart, its functions that build masks for SDPA and eager
attention hide other documents, too.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardformer.attention import (
    packed_documents,
    route_own_attention,
    use_backend,
    use_sharded_attention,
    uses_registry,
)
from shardformer.attention.packed_documents import POSITIONS, TOKENS
from shardformer.attention.registry import return_whole_scores
from shardformer.context_parallel.attention import gather_behind_layer, gather_behind_reader, use_context_attention
from shardformer.context_parallel.zigzag import Positions, ZigzagSharding, cut_features, cut_inputs, restarts
from shardformer.distributed import sequence_parallel
from shardformer.distributed.blocks import rank_of_draws
from shardformer.distributed.collectives import pad_dim
from shardformer.distributed.sequence_parallel import BlockedSequence, SequenceParallel, UlyssesAllToAll
from shardformer.policies.base import Policy
from shardformer.policies.registry import head_loss_of, policy_for
from shardformer.shard_config import ShardConfig
from shardformer.stages.placeholders import LayerInputs
from shardformer.stages.stage import StagePlaceholder
from shardformer.utils.module_paths import by_layer, text_config
from shardformer.utils.source import counts_positions, syntax_of
from shardformer.utils.untraced import call_through

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
    mixer.register_forward_hook(lambda _, __, output: sequence_parallel.first_output(output, axis.take))


def layers_of(model: nn.Module, policy: Policy) -> nn.ModuleList:
    """Return the list of layers whose sequences ranks share."""
    return model.get_submodule(policy.layer_lists[0])


def runner_of(model: nn.Module, policy: Policy) -> nn.Module:
    """Return the module around the list of layers, which calls them."""
    return model.get_submodule(policy.layer_lists[0].rpartition(".")[0])


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
    base = reader_of_tokens(model, policy)
    if base is None:
        yield "which takes no position_ids"
    elif not _makes_masks(base):
        yield "which does not make its masks by transformers' functions"
    elif _is_called_with_masks(model, base):
        yield "which makes its masks before the module that reads the tokens"
    elif layout.inputs_between and base is not runner_of(model, policy):
        yield "which reads more than hidden states between its layers"
    yield from counting_reasons(model, policy)
    text = text_config(text)
    if getattr(text, "attn_logit_softcapping", None) is not None:
        yield "whose attention scores are soft-capped"
    if packed_documents.rotary_limit(text) is not None:
        yield "whose rotary embedding depends on the length of a sequence"


def counting_reasons(model: nn.Module, policy: Policy) -> Iterator[str]:
    """Yield why modules of the layers would count other positions than those of whole sequences."""
    lists = [model.get_submodule(path) for path in policy.layer_lists]
    if any(counts_positions(type(module)) is None for layers in lists for module in layers.modules()):
        yield "whose layers count positions by the length of their input"


def mixers_of_layers(model: nn.Module, policy: Policy) -> list[nn.Module]:
    """Return the modules that mix tokens outside of attention, in layers whose sequences ranks share."""
    return packed_documents.token_mixers(layers_of(model, policy))


def reader_of_tokens(model: nn.Module, policy: Policy) -> nn.Module | None:
    """Return the innermost module, which heads may call, that takes token ids and position ids."""
    path = policy.layer_lists[0].split(".")[:-1]
    around = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
    asked = {"input_ids", "position_ids"}
    return next((each for each in around if asked <= inspect.signature(each.forward).parameters.keys()), None)


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
    axis, reader = config.context, reader_of_tokens(model, policy)
    cut_features(reader, axis, policy.stages.inputs_between)
    cut_inputs(reader, axis, positions)
    head = head_loss_of(model)
    model.context_axis, model.sequence_is_cut = axis, True
    model.returns_parts = head is not None and head.per_token
    layers = layers_of(model, policy)
    sequence_parallel.count_whole_sequences(model, layers, axis.positions_of_part)
    run_on_whole_sequences(mixers_of_layers(model, policy), axis)
    if not model.returns_parts and not isinstance(layers[-1], StagePlaceholder):
        if any(child is layers for child in reader.children()):
            gather_behind_reader(reader, axis)
        else:
            gather_behind_layer(layers[-1], axis)


class _Documents:
    """The documents in the rows of a forward pass, by the number of each token's, [batch or 1, seq]."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.are_hidden = numbers, False  # are_hidden: whether a mask that hides others has been made

    def hide(self, batch_size: int, mask_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a mask function of transformers' kind that hides other documents too."""
        self.are_hidden, numbers = True, self.numbers.expand(batch_size, -1)
        return lambda row, head, query, key: (
            mask_function(row, head, query, key) & (numbers[row, query] == numbers[row, key])
        )


_running: ContextVar[_Documents | None] = ContextVar("running_documents", default=None)


def can_hide_documents(model: nn.Module, policy: Policy) -> bool:
    """Return whether a model makes masks without positions in which other documents can be hidden.

    Its tokens were seen to meet in attention alone, and it has no head that answers one question a row, which looks at
    all of its tokens for that.
    """
    if "start_positions" in inspect.signature(model.forward).parameters or not policy.shares_sequences():
        return False
    makers = _makers(model)
    return bool(makers) and all(map(_sees_documents, makers))


def hide_other_documents(model: nn.Module) -> None:
    """Let a model that can hide other documents do so; where it gets an attention mask, it makes masks as ever."""
    _register_mask_functions()
    for maker in _makers(model):
        maker.register_forward_pre_hook(_begin, with_kwargs=True)
        maker.register_forward_hook(_end, always_call=True)
    model.masks_hide_documents = True


def _makers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that make masks without positions: causal ones, or those of an encoder, where all are."""
    calls = {kind: packed_documents.mask_calls(kind) for kind in {type(each) for each in model.modules()}}
    is_causal = any(call.is_causal for found in calls.values() for call in found)
    ignores = not getattr(getattr(model, "config", None), "is_causal", True)  # makes those of an encoder instead
    lacking = {
        kind
        for kind, found in calls.items()
        if any(call.is_causal == is_causal and (ignores or not call.passes_positions) for call in found)
    }
    return [module for module in model.modules() if type(module) in lacking]


def _sees_documents(maker: nn.Module) -> bool:
    """Return whether the forward gets positions, and all masks made inside are those of its tokens, not of a tower."""
    configs = {id(each.config) for each in maker.modules() if hasattr(each, "config")}
    takes = POSITIONS in inspect.signature(maker.forward).parameters
    return takes and configs == {id(getattr(maker, "config", None))}


def _begin(maker: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    given = {**inspect.signature(maker.forward).bind_partial(*args).arguments, **kwargs} if args else kwargs
    is_asked = (
        packed_documents.may_be_packed(given)
        and not packed_documents.asks_for_cache(given)
        and restarts(given[POSITIONS])
        and not packed_documents.runs_flash(maker)  # which is told of borders
    )
    _running.set(_Documents(packed_documents.document_starts(given[POSITIONS]).cumsum(-1)) if is_asked else None)


def _end(maker: nn.Module, _: tuple, output: Any) -> None:
    documents = _running.get()
    _running.set(None)
    if documents is not None and not documents.are_hidden and output is not None:
        raise ValueError(
            f"position_ids restart within a row, and {type(maker).__name__} makes its masks without transformers' "
            "functions, so that the documents of the row would see each other; give each document a row of its own"
        )


def _register_mask_functions() -> None:
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for name in ("sdpa", "eager"):
        masks = ALL_MASK_ATTENTION_FUNCTIONS[name]
        if not hasattr(masks, "hides_documents"):
            AttentionMaskInterface.register(name, _hiding_documents(masks))


def _hiding_documents(masks: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' function that makes the masks for a kernel, with the documents that run now hidden."""

    @wraps(masks)
    def hiding(*args: Any, **given: Any) -> Any:
        documents = _running.get() if not args else None  # transformers' models name all arguments
        if documents is not None and documents.numbers.shape[-1] == given["q_length"] == given["kv_length"]:
            given["mask_function"] = documents.hide(given["batch_size"], given["mask_function"])
            given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masks(*args, **given)

    hiding.hides_documents = True
    return hiding


def can_run_by_document(model: nn.Module, policy: Policy) -> bool:
    """Return whether the layers have token mixers that were seen to be causal, and can be told of documents."""
    is_seen = policy.shares_sequences() and not policy.tokens_mix_only_in_attention()
    return is_seen and bool(mixers_of_layers(model, policy)) and _hands_arguments_on(model, layers_of(model, policy))


def separate_documents(model: nn.Module) -> None:
    """Let a whole model keep packed documents apart in its masks and in its token mixers, if it can."""
    try:
        policy = policy_for(model)
    except ValueError:  # a model without policy has no layers that we know
        return
    policy.set_model(model)
    if can_hide_documents(model, policy):
        hide_other_documents(model)
    if can_run_by_document(model, policy):
        packed_documents.keep_documents_apart(model, layers_of(model, policy))


def _hands_arguments_on(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Return whether arguments that the model does not know reach its layers."""
    around = [module for module in model.modules() if any(each is layers for each in module.modules())]
    takers = [module for module in around if module is not layers]
    kinds = [{each.kind for each in inspect.signature(module.forward).parameters.values()} for module in takers]
    return all(inspect.Parameter.VAR_KEYWORD in each for each in kinds) and _calls_with_more(takers[-1])


def _calls_with_more(module: nn.Module) -> bool:
    """Return whether what a module runs in a loop, as its layers, gets the arguments that it does not know."""
    try:
        tree = syntax_of(type(module).forward)
    except OSError:
        return False
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    calls = [call for loop in loops for call in ast.walk(loop) if isinstance(call, ast.Call)]
    targets = {node.id for loop in loops for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    of_layers = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in targets]
    return bool(of_layers) and all(any(word.arg is None for word in call.keywords) for call in of_layers)


def route_attention(
    model: nn.Module,
    policy: Policy,
    config: ShardConfig,
    held_layers: Callable[[], list[list[nn.Module]]],
    exchanged: SequenceParallel | None,
    device: torch.device,
) -> None:
    """Route the attentions of `model` through the kernel that the options ask for.

    Args:
        held_layers: returns the layers of this rank, by lists of consecutive ones.
        exchanged: the parts of sequences that attention in these layers exchanges for heads; None if it does not.
    """
    shares_inputs = config.context is not None and exchanged is None
    if exchanged is not None or (config.enable_flash_attention and config.context is None):
        route_own_attention(model, policy.own_attention)
    if config.enable_flash_attention:
        dtype = config.compute_dtype or next(model.parameters(), torch.empty(0)).dtype
        use_backend(model, config.enable_flash_attention, device, dtype, not config.inference_only)
    layers = [layer for held in held_layers() for layer in held] if shares_inputs or exchanged is not None else []
    if shares_inputs:
        use_context_attention(model, layers, config.context_parallel_mode, config.context)
    exchange = None if exchanged is None else UlyssesAllToAll(exchanged)
    if config.tensor_parallel_size > 1 and policy.cuts_attention:
        use_sharded_attention(model, rank_of_draws(config.group), exchange, layers)
        return_whole_scores(model, policy.head_counts().values(), config.group)
    elif config.enable_flash_attention or exchange is not None:
        use_sharded_attention(model, None, exchange, layers)


def divide_layers(
    model: nn.Module, lists: Iterable[list[nn.Module]], region: SequenceParallel, by_exchange: bool
) -> None:
    """Let layers see parts of sequences, which are whole before and after each list of layers.

    Args:
        by_exchange: whether attention exchanges parts for heads, so that layers read the positions of their parts.
    """
    for layers in filter(None, lists):
        if getattr(layers[0], "sees_whole_sequences", False):
            continue
        sequence_parallel.wrap_layers(layers, region)
        for layer in layers:
            sequence_parallel.slice_other_tokens(layer, region)
        for layer in layers if by_exchange else ():
            sequence_parallel.slice_positions(layer, region)
        sequence_parallel.count_whole_sequences(model, layers if by_exchange else (), region.positions_of_part)
        if isinstance(region, BlockedSequence):
            sequence_parallel.use_parameters_by_block(layers, region)
    if isinstance(region, BlockedSequence) and not region.is_cut:
        sequence_parallel.return_whole_states(model, region)


def leave_between_layers(
    runner: nn.Module,
    names: Collection[str],
    layers: Iterable[nn.Module],
    held: Iterable[list[nn.Module]],
    region: SequenceParallel,
) -> None:
    """Let sequences be whole where `runner`, the module around the layers, adds features of a layer to their states.

    Args:
        names: inputs of `runner` with features for some layers; it adds them in front of a layer or behind it.
        region: the parts of sequences that layers have.
    """
    inputs, gaps = LayerInputs(runner), _Gaps(region)
    numbers = {layer: number for number, layer in enumerate(layers)}

    def begin(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        gaps.begin({number for name in names for number in by_layer(inputs.get(name, args, kwargs))})

    runner.register_forward_pre_hook(begin, with_kwargs=True)
    for chain in held:
        for layer in chain:
            # Outside of hooks, which run again where layers are recomputed, then perhaps after another pass has begun.
            call_through(
                layer, gaps.around(numbers[layer], enters=layer is not chain[0], leaves=layer is not chain[-1])
            )


class _Gaps:
    """Places between the layers of a region where sequences are whole in the pass that runs."""

    def __init__(self, region: SequenceParallel) -> None:
        self.region, self.is_whole = region, False
        self.numbers: Collection[int] = ()

    def begin(self, numbers: Collection[int]) -> None:
        """Begin a pass with features for the layers of these numbers."""
        self.numbers, self.is_whole = numbers, False

    def around(self, number: int, enters: bool, leaves: bool) -> Callable[..., Any]:
        """Return the outer call of a layer; the region itself is entered at its first and left at its last layer."""

        def outer(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            if enters and self.is_whole:
                args, kwargs = sequence_parallel.first_input(args, kwargs, self.region.enter)
                self.is_whole = False
            output = call(*args, **kwargs)
            if leaves and not {number, number + 1}.isdisjoint(self.numbers):
                output = sequence_parallel.first_output(output, self.region.leave)
                self.is_whole = True
            return output

        return outer
