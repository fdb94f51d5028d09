"""What calls of a model ask for: options whose tensors no rank has whole, and documents in a row.

Collators for flash-attn name the borders of documents (`cu_seq_lens_q/k`, `max_length_q/k`), number the documents
(`seq_idx`), or number the tokens of each (`position_ids`). Every attention here is told of documents by positions that
restart, and each micro-batch gets the borders of its own documents again where flash-attn runs.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.data.rows import is_empty, main_input_of, num_rows, rows_of
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.media import media_tokens
from plugins.hybrid_parallel.data.microbatch import stand_in, without_rows
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from shardformer.attention import log_once, packed_documents
from shardformer.context_parallel.zigzag import problem_of_mask, restarts
from shardformer.peft import model_inside, prompt_config
from shardformer.utils.module_paths import cache_name, text_config


class ForwardOptions:
    """Checks and adapts what calls of one model ask for.

    Attributes:
        signature: of the model's forward; if that passes any arguments on, of the model inside; None if none is named.
        reads_documents: whether documents in a row are those of transformers' attention, which are told by positions,
            or by borders for flash-attn; a model of one's own may read them in its own way.
        main_input: name of the entry of a batch that has a row for each sample, if the model tells.
        media_tokens: of images and sounds; see the function of that name.
    """

    def __init__(self, module: nn.Module, mesh: HybridMesh) -> None:
        self.module, self.inside, self.mesh = module, model_inside(module), mesh
        self.signature = next((each for each in self._signatures() if _is_named(each)), None)
        parameters = inspect.signature(self.inside.forward).parameters
        takes_more = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        self._takes_mask = "attention_mask" in parameters
        config = getattr(self.inside, "config", None)
        self._cache_config = config if hasattr(config, "use_cache") else text_config(config)
        # transformers' heads that take any arguments pass this one on (GraniteMoe's), but those of encoder-decoders.
        passes_more = takes_more and hasattr(self.inside, "config_class") and not config.is_encoder_decoder
        self._takes_use_cache = "use_cache" in parameters or (passes_more and hasattr(self._cache_config, "use_cache"))
        is_known = hasattr(config, "return_dict")
        self._returns_class = is_known and (takes_more or "return_dict" in parameters)
        self._takes_more = takes_more
        attention = getattr(config, "_attn_implementation", None)
        self.reads_documents = attention is not None and "cu_seq_lens_q" not in parameters
        self.main_input = main_input_of(self.module) or main_input_of(self.inside)
        self.media_tokens = media_tokens(self.inside)
        self.dtype = _dtype_of_values(module)
        exchanges = any(getattr(each, "sequence_exchange", None) is not None for each in self.inside.modules())
        self._cuts_caches = mesh.size("cp") > 1 or exchanges
        self._generate_for_empty_shares()

    def rows_of(self, batch: Mapping[Any, Any]) -> int | None:
        """Return the number of samples of a batch; None if it does not tell."""
        return rows_of(batch, self.main_input)

    def _generate_for_empty_shares(self) -> None:
        """Make `generate` of the user's model return no rows, of the usual width, for a share without samples."""
        native = getattr(getattr(self.inside, "generate", None), "__func__", None)
        if native is None:
            return

        def generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            positions = [f"[{index}]" for index in range(len(args))]
            given = dict(zip(positions, args, strict=True)) | kwargs
            if not is_empty(given, main_input_of(model)):
                return native(model, *args, **kwargs)
            given = stand_in(given, media_tokens(model))  # layers accept no empty batch, and other ranks may wait
            return without_rows(native(model, *map(given.pop, positions), **given))

        self.inside.generate = generate.__get__(self.inside)

    def by_name(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Bind positional arguments to the forward's names, if any; TypeError if they do not fit."""
        if not args:
            return args, dict(kwargs)
        signature = self.signature
        if signature is None:
            return args, dict(kwargs)
        first = next(iter(signature.parameters), None)
        if isinstance(args[0], Mapping | str) and first == main_input_of(self.inside):
            raise ConfigurationError(
                f"the model got a {type(args[0]).__name__} as {first}; write model(**batch), with tensors by the names "
                "of its arguments"
            )
        bound = signature.bind_partial(*args, **kwargs).arguments
        rest = next((name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD), None)
        return (), {**{name: value for name, value in bound.items() if name != rest}, **bound.get(rest, {})}

    def _signatures(self) -> Iterator[inspect.Signature]:
        """Yield the signature of the model as it is called, and of the model inside wrappers that pass arguments on."""
        yield inspect.signature(self.module.forward)
        yield inspect.signature(self.inside.forward)

    def unread(self, batch: Mapping[str, Any]) -> list[str]:
        """Return the entries of a batch that the model's forward does not take: only a criterion reads them."""
        return unread_by(self.module, batch)

    def would_cache(self, given: Mapping[str, Any]) -> bool:
        """Return whether the plain model would return a cache of keys and values."""
        return self._takes_use_cache and bool(self._asked(given, "use_cache"))

    def wants_tuple(self, given: Mapping[str, Any]) -> bool:
        """Return whether a transformers model must return a tuple instead of its output class."""
        return self._returns_class and self._asked(given, "return_dict") is False

    def inputs(self, given: Mapping[str, Any], is_microbatch: bool = False) -> dict[str, Any]:
        """Return the keyword arguments for the model's forward.

        Caches that would not be whole are not filled. Outputs keep their names until all of them are whole, even if the
        caller wants a tuple.

        Args:
            is_microbatch: whether they are a part of a batch.
        """
        for problem in self._problems(given, is_microbatch):
            raise ConfigurationError(problem)
        inputs = dict(given) | self._of_documents(given)
        if self._takes_use_cache and (is_microbatch or self._cuts_caches):
            inputs["use_cache"] = False
        if self.wants_tuple(given):
            inputs["return_dict"] = True
        return inputs

    def with_document_positions(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch whose packed documents, if it has any, are told by `position_ids` that restart.

        Positions that mean none get an attention mask of ones: with it transformers looks for none, as in a plain call
        that fills a cache, which is not filled here.
        """
        if not self.reads_documents:
            return dict(batch)
        if any(batch.get(name) is not None for name in NAMES):
            return with_positions(batch, packed_documents.first_position(self.inside))
        positions = batch.get("position_ids")
        if not packed_documents.may_be_packed(batch) or not isinstance(positions, Tensor) or positions.dim() != 2:
            return dict(batch)
        jumps, tokens = packed_documents.jumps_of(positions), tokens_of(batch)
        if not jumps.found or not self._takes_mask or tokens is None:
            return dict(batch)
        name = type(self.inside).__name__
        if jumps.are_restarts:
            if self._looks_for_documents:
                return dict(batch)
            log_once(
                name,
                "does not look for documents in position_ids, so that each token sees its whole row, as in "
                "transformers; give cu_seq_lens_q and cu_seq_lens_k, or seq_idx, to keep documents apart",
            )
        elif self._looks_for_documents and not self._fills_cache(batch):
            if self.mesh.size("cp") > 1:
                raise ConfigurationError(
                    f"position_ids skip or repeat, and without a cache {name} takes each jump for a document, which "
                    f"cp_size={self.mesh.size('cp')} cannot; give an attention_mask of ones if tokens see the whole row"
                )
            return dict(batch)
        return {**batch, "attention_mask": torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)}

    def check_positions(self, batch: Mapping[str, Any], is_cut: bool) -> None:
        """Refuse positions by which attention in a document, or in a sample of a batch that is cut, sees the others."""
        positions = batch.get("position_ids")
        if not isinstance(positions, Tensor) or positions.dim() != 2 or not self._limits:
            return
        length, counts = positions.shape[-1], (positions.amax(-1) + 1 if positions.numel() else positions.new_zeros(0))
        is_unusual = bool((positions != torch.arange(length, device=positions.device)).any())
        are_documents = self.reads_documents and packed_documents.may_be_packed(batch) and restarts(positions)
        most_and_least = [max(counts.tolist(), default=0), -min(counts.tolist(), default=2**62)]
        facts = torch.tensor([*most_and_least, length, is_unusual, are_documents])  # on the CPU: they are read at once
        if self.mesh.size("dp") > 1 and torch.is_grad_enabled():
            dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=self.mesh.group("dp"))
        tokens, least, length, is_unusual, are_documents = facts.tolist()
        is_unequal = is_cut and is_unusual and tokens != -least  # rows of one last position have one rotary embedding
        for field, most in self._limits.items():
            count = tokens if field == packed_documents.ROTARY else length
            if count > most and (are_documents or (field == packed_documents.ROTARY and is_unequal)):
                whole = "row" if are_documents else "batch"
                raise ConfigurationError(
                    f"position_ids of {count} tokens: above {most}, by {field} of {type(self.inside).__name__}, "
                    f"attention depends on the whole {whole}; use at most {most} tokens, or leave position_ids out of "
                    "rows that are one document"
                )

    @cached_property
    def _limits(self) -> dict[str, int]:
        config = text_config(getattr(self.inside, "config", None))
        return packed_documents.limits_of_positions(config) if hasattr(config, "get_text_config") else {}

    def _fills_cache(self, given: Mapping[str, Any]) -> bool:
        """Return whether the plain model fills a cache in this call, which gradient checkpointing prevents."""
        flags = (getattr(each, "gradient_checkpointing", False) for each in self.inside.modules())
        return self.would_cache(given) and not (self.inside.training and any(flags))

    def _of_documents(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that keep documents which are packed into a row apart; empty if there are none."""
        is_asked = (
            self.reads_documents
            and packed_documents.may_be_packed(given)
            and not packed_documents.asks_for_cache(given)
        )
        if not is_asked or not restarts(given["position_ids"]):
            return {}
        name = type(self.inside).__name__
        if reason := self._reason_not_kept_apart():
            raise ConfigurationError(
                f"position_ids restart within a row, and {name} {reason}, so that the documents of the row would see "
                "each other; give each document a row of its own, or an attention_mask of ones if they may see each "
                "other"
            )
        found: dict[str, Any] = {"use_cache": False} if self._takes_use_cache else {}
        if self._takes_use_cache and self._asked(given, "use_cache"):
            log_once(
                name,
                "keeps documents that are packed into a row apart and fills no cache, where transformers would fill "
                "one and let them see each other; give an attention_mask of ones for that",
            )
        if self._runs_flash and self._takes_more:
            found |= packed_documents.flash_arguments(given["position_ids"], num_rows(given, self.main_input))
        if packed_documents.runs_mixers_on_documents(self.inside):
            log_once(name, "runs its token mixers over each document, where transformers carries it into the next one")
            found[packed_documents.ARGUMENT] = packed_documents.document_lengths(
                given["position_ids"], num_rows(given, self.main_input)
            )
        return found

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether documents that are packed into a row do not see each other."""
        return self.reads_documents and not self._reason_not_kept_apart()

    @property
    def hidden_size(self) -> int | None:
        """Width of the model's layers; None if its configuration does not say."""
        return getattr(text_config(self.inside.config), "hidden_size", None)

    def _reason_not_kept_apart(self) -> str:
        if prompt_config(self.module) is not None:  # of the adapter that is active now
            return "stands behind virtual tokens of peft, which the first document of a row alone would follow"
        return self._reason_of_model

    @cached_property
    def _reason_of_model(self) -> str:
        return packed_documents.reason_not_kept_apart(self.inside)

    @cached_property
    def _looks_for_documents(self) -> bool:
        return packed_documents.looks_for_documents(self.inside)

    @cached_property
    def _runs_flash(self) -> bool:
        return packed_documents.runs_flash(self.inside)

    def _asked(self, given: Mapping[str, Any], name: str) -> Any:
        """Return an option from the call or, if the call does not set it, from the model's configuration."""
        asked = given.get(name)
        config = self._cache_config if name == "use_cache" else getattr(self.inside, "config", None)
        return getattr(config, name, None) if asked is None else asked

    def _problems(self, given: Mapping[str, Any], is_microbatch: bool) -> Iterator[str]:
        pp_size, cp_size = self.mesh.size("pp"), self.mesh.size("cp")
        cut_by = f"cp_size={cp_size}" if cp_size > 1 else "enable_sequence_parallelism=True"
        hidden_states_are_cut = getattr(self.inside, "sequence_is_cut", False)
        for name, is_cut in (("output_hidden_states", hidden_states_are_cut), ("output_attentions", cp_size > 1)):
            if not _is_given(self._asked(given, name)):
                continue
            if pp_size > 1:
                yield f"{name}=True asks for what lies on {pp_size} pipeline stages; use pp_size=1 or {name}=False"
            elif is_cut:
                yield f"{name}=True finds parts of sequences under {cut_by}; leave that out, or use {name}=False"
        tokens = tokens_of(given) if cp_size > 1 else None
        mask = given.get("attention_mask")
        if tokens is not None and (problem := problem_of_mask(mask, tuple(tokens.shape[:2]), cp_size)):
            yield problem
        if cp_size > 1 and _is_given(given.get("logits_to_keep")):
            yield (
                f"logits_to_keep counts tokens of whole sequences, which {cut_by} cuts; leave it out, and take these "
                "positions of outputs.logits"
            )
        for name in ("use_cache", cache_name(given)):
            if is_microbatch and _is_given(given.get(name)):
                way_out = "leave it out" if pp_size > 1 else "leave it out, or call model(**batch)"
                yield f"{name} is in the batch, and a pipeline neither fills nor reads caches; {way_out}"
            elif self._cuts_caches and _is_given(given.get(name)):
                yield f"{name} asks for a cache of whole sequences, which {cut_by} cuts; leave it out"


def unread_by(model: nn.Module, batch: Mapping[str, Any]) -> list[str]:
    """Return the entries of a batch that the forward of a model does not take, inside of peft's wrappers or outside."""
    wrapped, inside = (inspect.signature(each.forward).parameters for each in (model, model_inside(model)))
    takes_more = any(each.kind is each.VAR_KEYWORD for each in inside.values())
    return [name for name in batch if not takes_more and name not in wrapped and name not in inside]


def _is_given(value: Any) -> bool:
    return value is not None and (isinstance(value, Tensor) or (value is not False and value != 0))


def _is_named(signature: inspect.Signature) -> bool:
    kinds = {each.kind for each in signature.parameters.values()}
    return not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}


_BORDERS, _LENGTHS, _NUMBERS = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k"), "seq_idx"
_AGAINST = ("attention_mask", "use_cache")
NAMES = (*_BORDERS, *_LENGTHS, _NUMBERS)  # of entries that name documents
_RULE = "the rows of a batch are whole documents one behind the other"


def tokens_of(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the tokens of a batch, [rows, seq], or their embeddings, [rows, seq, hidden]; None if it has neither."""
    return next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)


def with_positions(batch: Mapping[str, Any], first: int = 0) -> dict[str, Any]:
    """Return a batch whose documents are told by `position_ids` alone, [rows, seq], with `first` instead of 0."""
    named = [name for name in NAMES if batch.get(name) is not None]
    rest = {name: value for name, value in batch.items() if name not in NAMES}
    tokens = tokens_of(batch)
    if not named or tokens is None:
        return dict(batch)
    rows, length = tokens.shape[:2]
    if not rows:  # an empty share of a batch has the entries of the others
        return {"position_ids": tokens.new_zeros((0, length), dtype=torch.long), **rest}
    against = next(
        (name for name in _AGAINST if batch.get(name) is not None and batch[name] is not False), cache_name(batch)
    )
    if against is not None:
        raise ConfigurationError(
            f"the batch has {named[0]}, which keeps documents in a row apart, and {against}, which lets them see each "
            "other; leave one of them out"
        )
    starts = _starts(batch, rows, length)
    if starts is None:
        return {name: value for name, value in batch.items() if name not in _LENGTHS}
    _check_longest(batch, starts, rows * length)
    positions = batch.get("position_ids")
    if positions is None:
        positions = _positions(starts, rows, length).to(tokens.device)
    else:
        _check_positions(positions, starts, rows, length)
    if first:  # a collator knows no family, and begins at 0; positions that begin elsewhere are meant so
        positions = positions + first * (positions.amin(dim=-1, keepdim=True) == 0)
    return {**rest, "position_ids": positions}


def _starts(batch: Mapping[str, Any], rows: int, length: int) -> list[int] | None:
    """Return where documents start, counted in all rows, as the entries that name borders say; None if none does."""
    found: dict[str, list[int]] = {}
    for name in _BORDERS:
        if batch.get(name) is not None:
            found[name] = _checked(name, torch.as_tensor(batch[name]), rows, length)
    if batch.get(_NUMBERS) is not None:
        numbers = torch.as_tensor(batch[_NUMBERS])
        if tuple(numbers.shape) != (rows, length):
            raise ConfigurationError(
                f"{_NUMBERS} has shape {tuple(numbers.shape)}, and the tokens {(rows, length)}; give each token the "
                "number of its document"
            )
        changes = numbers.diff(dim=-1, prepend=numbers[:, :1] - 1) != 0
        found[_NUMBERS] = changes.flatten().nonzero()[:, 0].tolist()
    if not found:
        return None
    (first, starts), *others = found.items()
    for name, each in others:
        if each != starts:
            raise ConfigurationError(_contradiction(name, each, first, starts))
    return starts


def _checked(name: str, borders: Tensor, rows: int, length: int) -> list[int]:
    """Return the starts of documents in borders [documents + 1], after checking that they fit the rows."""
    given, total = borders.flatten().tolist(), rows * length
    if borders.dim() != 1 or len(given) < 2 or given[0] != 0:
        raise ConfigurationError(
            f"{name} has shape {tuple(borders.shape)} and starts with {given[0] if given else 'nothing'}; give the "
            f"borders of all documents as one row of numbers from 0 to {total}"
        )
    fall = next((place for place in range(1, len(given)) if given[place] <= given[place - 1]), None)
    if fall is not None:
        raise ConfigurationError(
            f"{name} has {given[fall]} behind {given[fall - 1]}, and borders of documents increase; leave out empty "
            "documents, and sort the others"
        )
    if given[-1] != total:
        raise ConfigurationError(
            f"{name} ends at {given[-1]}, and the batch has {total} tokens ({rows} x {length}); {_RULE}, so that the "
            f"last border is {total}"
        )
    spanned = sorted(set(range(0, total, length)) - set(given))
    if spanned:
        raise ConfigurationError(
            f"{name} has no border at token {spanned[0]}, where row {spanned[0] // length} starts; {_RULE}"
        )
    return given[:-1]


def _check_longest(batch: Mapping[str, Any], starts: list[int], total: int) -> None:
    longest = max(end - start for start, end in zip(starts, [*starts[1:], total], strict=True))
    for name in _LENGTHS:
        if batch.get(name) is not None and int(batch[name]) < longest:
            raise ConfigurationError(
                f"{name}={int(batch[name])} is less than the {longest} tokens of the longest document; use "
                f"{name}={longest}"
            )


def _check_positions(positions: Tensor, starts: list[int], rows: int, length: int) -> None:
    if positions.dim() != 2 or positions.shape[1] != length or positions.shape[0] not in (1, rows):
        raise ConfigurationError(
            f"position_ids of shape {tuple(positions.shape)} cannot be compared with the borders of documents in "
            f"{rows} x {length} tokens; give one of them"
        )
    found = packed_documents.document_starts(positions).expand(rows, -1).flatten().nonzero()[:, 0].tolist()
    if found != starts:
        raise ConfigurationError(_contradiction("position_ids", found, "the borders", starts))


def _contradiction(name: str, found: list[int], other: str, starts: list[int]) -> str:
    place = min(set(found) ^ set(starts))
    one, two = (name, other) if place in found else (other, name)
    return (
        f"{one} in the batch start a document at token {place}, and {two} do not; positions restart where a "
        "document starts, and nowhere else"
    )


def _positions(starts: list[int], rows: int, length: int) -> Tensor:
    """Return [rows, length], the place of each token in its document."""
    firsts = torch.tensor(starts)
    lengths = firsts.diff(append=torch.tensor([rows * length]))
    return (torch.arange(rows * length) - firsts.repeat_interleave(lengths)).view(rows, length)


def _dtype_of_values(module: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of most values of a module's parameters; fp32 if it has none."""
    sizes: Counter[torch.dtype] = Counter()
    for param in module.parameters():
        if param.is_floating_point():
            sizes[param.dtype] += param.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.float32)
