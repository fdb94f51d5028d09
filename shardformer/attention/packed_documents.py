"""Packed documents: several documents in one row, marked by `position_ids` that restart.

transformers keeps them apart only if it gets no mask and fills no cache, and most configurations fill one. A batch of
such rows says what its documents are, so the sharded model keeps them apart in every loop, in training and in
evaluation. An attention mask asks for what plain transformers does. So do positions that skip or repeat, and positions
in a family whose masks transformers makes without them.

A token mixer runs over documents that lie in rows of their own: its recurrence and its convolution would carry a
document into the next one of the row. Documents of similar length become the rows of one call, which end with padding:
a causal mixer does not let it reach the tokens in front of it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from inspect import getclosurevars, isfunction, signature
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from shardformer.distributed.sequence_parallel import first_output
from shardformer.utils.derived_modules import derive, replace_modules
from shardformer.utils.module_paths import cache_name
from shardformer.utils.source import names_read_by, syntax_of

# Kinds of layers, as configurations name them, that mix tokens in attention alone.
# Indexed attention (DeepSeek-V3.2) selects tokens behind the mask.
_ATTENTIONS = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
_ATTENTIONS |= {"deepseek_sparse_attention"}  # as transformers 5.17 calls indexed attention
_MASK_MAKER = re.compile(r"create_\w*mask")
_MASK_FUNCTION = re.compile(rf"{_MASK_MAKER.pattern}\w*|mask_\w+")  # by its own name, or one of a variable
POSITIONS, ROTARY = "position_ids", "rope_parameters"
# Kinds of rotary embeddings that depend on the largest position of a batch -> the field that says from which length.
_OF_LENGTH = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}


class MaskCall(NamedTuple):
    """A call by which a class makes a mask."""

    is_causal: bool  # whether it is not one of an encoder
    passes_positions: bool  # whether it passes position ids on


def may_be_packed(inputs: Mapping[str, Any]) -> bool:
    """Return whether transformers would look for packed documents in the inputs of a model."""
    return inputs.get(POSITIONS) is not None and inputs.get("attention_mask") is None


def asks_for_cache(inputs: Mapping[str, Any]) -> bool:
    """Return whether the inputs themselves ask for a cache; a default of the configuration does not count."""
    return bool(inputs.get("use_cache")) or cache_name(inputs) is not None


def restart_flag(positions: Tensor) -> Tensor:
    """Return whether positions, [batch or 1, seq], restart within a row, as a bool tensor (0-d)."""
    if positions.dim() != 2:
        return torch.zeros((), dtype=torch.bool)
    return document_starts(positions)[:, 1:].any()


def document_starts(positions: Tensor) -> Tensor:
    """Return where documents start in positions, [rows, seq]: bool, [rows, seq], True at the start of each row.

    They start where positions fall to the least of their row. A row with any other step than one to the next position,
    which skips or repeats, is one document.
    """
    steps, least = positions.diff(dim=-1), positions.amin(dim=-1, keepdim=True)
    falls = (steps != 1) & (positions[:, 1:] == least)
    falls &= ((steps == 1) | falls).all(dim=-1, keepdim=True)
    return torch.cat([torch.ones_like(positions[:, :1], dtype=torch.bool), falls], dim=-1)


class Jumps(NamedTuple):
    """Steps of positions other than to the next one."""

    found: bool  # whether there are any
    are_restarts: bool  # whether all of them are restarts of documents


def jumps_of(positions: Tensor) -> Jumps:
    """Return the jumps of positions, [rows, seq]; the host waits for a device that has them."""
    jumps = positions.diff(dim=-1) != 1
    found, wrong, all_jump = torch.stack(
        [jumps.any(), (jumps & ~document_starts(positions)[:, 1:]).any(), jumps.all()]
    ).tolist()
    return Jumps(found, found and not wrong and not all_jump)


def flash_arguments(positions: Tensor, rows: int) -> dict[str, Any]:
    """Return what flash-attn is told of documents in positions, [rows or 1, seq], without waiting."""
    starts = document_starts(positions.expand(rows, -1)).flatten()
    borders = torch.cat([starts.nonzero()[:, 0], torch.tensor([starts.numel()], device=starts.device)])
    longest = int(borders.diff().max())
    borders = borders.to(torch.int32)
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}


def runs_flash(model: nn.Module) -> bool:
    """Return whether an attention of the model runs flash-attn, which is told of documents by its arguments."""
    names = (getattr(getattr(each, "config", None), "_attn_implementation", None) for each in model.modules())
    return any("flash" in name for name in names if isinstance(name, str))


def runs_mixers_on_documents(model: nn.Module) -> bool:
    """Return whether what mixes tokens outside of attention runs over one document at a time."""
    return getattr(model, "mixers_run_by_document", False)


def looks_for_documents(model: nn.Module) -> bool:
    """Return whether a transformers model, as it is, tells documents by positions, in its masks or by flash-attn."""
    calls = [call for kind in {type(each) for each in model.modules()} for call in mask_calls(kind)]
    is_causal = getattr(getattr(model, "config", None), "is_causal", True)
    return runs_flash(model) or (is_causal and any(call.is_causal and call.passes_positions for call in calls))


def reason_not_kept_apart(model: nn.Module) -> str:
    """Return why a transformers model lets packed documents see each other, as it is; empty if it keeps them apart."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return "has a decoder that reads whole rows of its encoder"
    if POSITIONS not in signature(model.forward).parameters and not _hands_arguments_on(model):
        return "takes no position_ids"
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTIONS
    mixes = kinds or any(isinstance(each, nn.Conv1d | nn.RNNBase) for each in model.modules())
    if mixes and not runs_mixers_on_documents(model):
        return "mixes tokens outside of attention"
    if runs_flash(model) or getattr(model, "masks_hide_documents", False):
        return ""
    calls = [call for kind in {type(each) for each in model.modules()} for call in mask_calls(kind)]
    of_decoder = [call.passes_positions for call in calls if call.is_causal]
    if getattr(config, "is_causal", True) and of_decoder and all(of_decoder):
        return ""
    return "makes its masks without position_ids"


def limits_of_positions(config: Any) -> dict[str, int]:
    """Return fields of a configuration -> tokens, above which attention depends on a whole row or batch by them.

    Llama 4 counts its chunks, and the places that set a temperature, from the start of a row, not of a document.
    """
    found = {} if (longest := rotary_limit(config)) is None else {ROTARY: longest}
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        found["attention_chunk_size"] = config.attention_chunk_size
    if getattr(config, "attn_temperature_tuning", False) and not all(config.no_rope_layers):
        found["floor_scale"] = config.floor_scale - 1
    return found


def rotary_limit(config: Any) -> int | None:
    """Return the length above which rotary embeddings depend on the largest position of a batch; None if none do."""
    rope = getattr(config, ROTARY, None) or getattr(config, "rope_scaling", None) or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, dict) and each.get("rope_type") in _OF_LENGTH]
    named = [(each, _OF_LENGTH[each["rope_type"]]) for each in kinds]
    return min((each.get(name) or getattr(config, name) for each, name in named), default=None)


def first_position(model: nn.Module) -> int:
    """Return the position of the first token of a text: behind that of padding in RoBERTa and its relatives, or 0."""
    counts = (each for each in model.modules() if hasattr(each, "create_position_ids_from_inputs_embeds"))
    return next((each.padding_idx + 1 for each in counts if isinstance(each.padding_idx, int)), 0)


def mask_calls(kind: type) -> tuple[MaskCall, ...]:
    """Return the calls by which a class makes masks."""
    methods = (
        each
        for base in kind.__mro__
        if base.__module__.split(".")[0] not in ("torch", "builtins")
        for each in vars(base).values()
    )
    found = (method for method in methods if inspect.isfunction(method))
    return tuple(call for method in found for call in _calls_in(method))


@cache  # of a method, not of its class: sharding derives new classes for each model
def _calls_in(method: Any) -> tuple[MaskCall, ...]:
    if not any(map(_MASK_MAKER.search, names_read_by(method))):  # most methods, whose source need not be read
        return ()
    try:
        tree = syntax_of(method)
    except OSError:
        return ()
    keys = {key.value for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys if _is_text(key)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    made = [call for call in calls if _MASK_FUNCTION.fullmatch(call.func.id)]
    # Rotary embeddings of three axes: masks read a fourth row of positions, which [rows, seq] becomes in some families.
    source = ast.unparse(tree)
    has_none = "text_position_ids = None" in source and ".expand(4," not in source
    return tuple(
        MaskCall("bidirectional" not in call.func.id, not has_none and _passes_positions(call, keys)) for call in made
    )


def _passes_positions(call: ast.Call, keys: set[str]) -> bool:
    """Return whether a call has position ids among its arguments, or in a dictionary of them with these `keys`."""
    given = (keyword for keyword in call.keywords if ast.unparse(keyword.value) != "None")
    names = {keyword.arg for keyword in given} | {getattr(each, "id", None) for each in call.args}
    return POSITIONS in names or (None in names and POSITIONS in keys)


def _hands_arguments_on(model: nn.Module) -> bool:
    """Return whether a forward calls something with the arguments that it does not know."""
    try:
        calls = [node for node in ast.walk(syntax_of(type(model).forward)) if isinstance(node, ast.Call)]
    except OSError:
        return True
    return any(keyword.arg is None for call in calls for keyword in call.keywords)


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


TOKENS = "hidden_states"  # what a mixer calls [batch, seq, hidden]


def token_mixers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules of these layers that mix tokens by a convolution of their own, and read `hidden_states`."""
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    convolve = [each for each in modules if any(isinstance(child, nn.Conv1d) for child in each.children())]
    return [each for each in convolve if TOKENS in inspect.signature(each.forward).parameters]


Lengths = tuple[tuple[int, ...], ...]  # of the documents in each row

ARGUMENT = "document_lengths"  # of the model's forward, which hands it on to its layers
_MASK = "attention_mask"
# Borders that a mixer's kernel would look for in the row that it does not get.
_BORDERS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def document_lengths(positions: Tensor, rows: int) -> Lengths:
    """Return the lengths of the documents in `rows` rows of positions, [rows or 1, seq]."""
    found = tuple(map(_lengths_between, document_starts(positions)))
    return found if len(found) == rows else found * rows


def _lengths_between(starts: Tensor) -> tuple[int, ...]:
    places = [*starts.nonzero()[:, 0].tolist(), len(starts)]
    return tuple(end - start for start, end in pairwise(places))


class Documents:
    """The documents in the rows that the layer which runs now reads. Copies of a model share it."""

    lengths: Lengths | None = None  # of these; None if nothing is packed

    def __deepcopy__(self, memo: dict[int, Any]) -> Documents:
        return self


class LayerOfDocuments(nn.Module):
    """Methods of a layer that is told of `document_lengths`, also when it is recomputed: hooks would stay outside."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward."""
        self.documents.lengths = kwargs.pop(ARGUMENT, None)
        return super().forward(*args, **kwargs)


class MixerOfDocuments(nn.Module):
    """Methods of a token mixer that runs over documents; what its hooks gather, such as whole sequences, is theirs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward over rows that are documents."""
        native = super().forward
        if self.documents.lengths is None:
            return native(*args, **kwargs)
        given = signature(native).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        rest = {name: value for name, value in given.items() if name not in (TOKENS, *_BORDERS)}
        if _MASK in rest:
            rest[_MASK] = None  # of rows without padding: a tensor, though it hides nothing, where the model is traced
        return _run_by_document(
            lambda hidden: native(**{TOKENS: hidden}, **rest), given[TOKENS], self.documents.lengths
        )


def keep_documents_apart(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Let the mixers in layers of `model` run over one document a row, where it is told of `document_lengths`."""
    layers, documents = list(layers), Documents()
    changes: dict[nn.Module, nn.Module] = {}
    for modules, methods in ((layers, LayerOfDocuments), (token_mixers(layers), MixerOfDocuments)):
        for module in modules:
            module.documents = documents
            changes[module] = derive(module, methods)
    replace_modules(model, changes)
    model.mixers_run_by_document = True


def _run_by_document(run: Callable[[Tensor], Any], hidden: Tensor, lengths: Lengths) -> Any:
    """Run over documents as rows; return hidden states in their places, [rows, seq, hidden], and padding."""
    sizes = [(*own, hidden.shape[1] - sum(own)) for own in lengths]
    parts = [part for row, own in zip(hidden, sizes, strict=True) for part in row.split(own)]
    groups: dict[int, list[int]] = {}
    for number in sorted({*range(len(parts))} - {end - 1 for end in accumulate(map(len, sizes))}):
        groups.setdefault(len(parts[number]).bit_length(), []).append(number)  # at most half of a call is padding
    output: Any = None
    for numbers in groups.values():
        output = run(pad_sequence([parts[number] for number in numbers], batch_first=True))
        states = output[0] if isinstance(output, tuple | list) else output
        for number, state in zip(numbers, states, strict=True):
            parts[number] = state[: len(parts[number])]
    return first_output(output, lambda _: torch.cat(parts).view_as(hidden))


def window_of(function: Callable[..., Tensor]) -> int | None:
    """Return the window of transformers' mask function of causal windows; None for any other function."""
    from transformers.masking_utils import causal_mask_function

    parts = getclosurevars(function).nonlocals.get("mask_functions", ()) if isfunction(function) else ()
    if len(parts) != 2 or function.__qualname__ != "and_masks.<locals>.and_mask" or causal_mask_function not in parts:
        return None
    (other,) = (part for part in parts if part is not causal_mask_function)
    known = getattr(other, "__qualname__", "") == "sliding_window_overlay.<locals>.inner_mask"
    return getclosurevars(other).nonlocals["sliding_window"] if known else None


class FlashWithSinks(torch.autograd.Function):
    """Attention with sinks, [heads], by torch's flash kernel; query, key, value: [tokens, heads, head_dim].

    The keys' share of the softmax scales its output. Its backward pass takes the output and the log-sum-exps of the
    whole softmax (FlashAttention-2, arXiv 2307.08691, section 3.1.2), to which sinks add no value.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, borders: tuple, scale: Any, window: tuple
    ) -> Tensor:
        """Compute [tokens, heads, head_dim]; `borders`: starts and longest of queries' and keys' documents."""
        ctx.options = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
        ctx.place = (*borders, 0.0, window == (-1, 0))
        found, logs, *random, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *ctx.place, False, **ctx.options
        )
        whole = torch.logaddexp(logs, sinks.to(logs.dtype)[:, None])  # [heads, tokens]
        found = (found * (logs - whole).exp().t()[..., None]).to(found.dtype)
        ctx.save_for_backward(query, key, value, sinks, found, whole, *random)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of queries, keys, values and sinks."""
        *factors, sinks, found, whole, state, unused = ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), *factors, found, whole, *ctx.place, state, unused, **ctx.options
        )
        weights = (sinks.to(whole.dtype)[:, None] - whole).exp()
        of_sinks = -(weights * (grad.to(whole.dtype) * found).sum(-1).t()).sum(1)
        return *grads, of_sinks.to(sinks.dtype), None, None, None
