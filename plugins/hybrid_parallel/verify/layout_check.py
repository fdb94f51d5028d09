"""The layout check: a small copy of the user's model is trained for a step, whole and under the layout, and compared.

`boost` runs it before it changes anything, on rank 0 and without other ranks: the ranks of the copy are threads
(`distributed/local_ranks.py`). The copy has the class and the configuration of the model, every switch, list and ratio
of it, with sizes, thresholds and indexes brought inside a few layers, and noise on norms and biases; its loss and the
gradient of every parameter are compared in fp64. If they differ, the first module and the first line of its code that
differ are looked for. Packed documents are tried where the first batch has some, and so is the user's criterion.

Why values, and not types of a trace on fake tensors: spmd_types 0.3.1 wants types of inputs, weights and collectives,
which those here, fused with products or run backwards, do not have; its local types pass a softmax over a rank's
features. DTensor inserts what is missing, where this has to find that it is missing. A trace whose shapes tie tells
nothing of other heads, another order, a sum counted twice, or a gradient that is not added up; and each operator needs
a rule, which is a false alarm where it is wrong. Values need no rule: with random weights, two functions that agree in
fp64 in each gradient are equal up to switches that do not fire.

Why small sizes: values at true sizes take 64 GB for the weights of Llama 3.1 8B in fp64, and a step of it takes 4e14
FLOPs for each 8,000 tokens. On fake tensors the plain step alone takes 1.2 to 1.6 s of a processor, a rank's about as
long, and both are without values; the small copy takes 0.5 s in all. What true sizes decide before the step (whether
they divide) `boost` checks on the model itself; index arithmetic of large tensors is tested on fake ones.
"""

from __future__ import annotations

import copy
import gc
import inspect
import re
import sys
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy
import torch
from accelerate.state import PartialState
from torch import Tensor, nn

from booster.data.rows import IGNORE_INDEX, num_rows
from booster.errors import ConfigurationError
from booster.logging import quiet
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.data.microbatch import split_batch
from plugins.hybrid_parallel.distributed.local_ranks import run_on_threads
from plugins.hybrid_parallel.setup.input_checks import has_batch_norms
from plugins.hybrid_parallel.verify.before_boost import LayoutReport, NotCheckedError, checked_layouts, has_own_forwards
from plugins.hybrid_parallel.verify.compare import Difference, Tolerance, compare
from plugins.hybrid_parallel.verify.image_twin import NoMediaError, image_twin_of
from plugins.hybrid_parallel.verify.module_outputs import OperatorLog, Output, OutputLog
from plugins.hybrid_parallel.verify.random_batch import batch_for, cast, distance_from_wave, takes_labels, takes_pairs
from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, build_small, twin_config, without_dropout
from plugins.hybrid_parallel.verify.train import (
    Criterion,
    RandomLossError,
    Trace,
    VerifyCase,
    inputs_of,
    train_on_rank,
    train_reference,
)
from shardformer.attention.packed_documents import looks_for_documents, reason_not_kept_apart
from shardformer.cross_entropy import fused_linear
from shardformer.distributed.random import random_numbers_apart
from shardformer.peft import model_inside

_MOST_PARAMETERS = 6_000_000  # of a copy, of which each rank gets a part
_LEAST_ROWS = 7  # samples, which differ in length and padding
_LONGEST_S = 6  # of the processor, for the steps of all ranks together
_LONGEST_CHECK_S = 10  # after which no further layout is tried
_LENGTH = 300
_CHUNK = 16  # tokens
# Wider than those of `booster verify`: sums of activations that are computed in fp32 or bf16 (Apertus) end in rounding.
_TOLERANCES = {"fp64": Tolerance(1e-5, 1e-4, 1e-4), "fp32": Tolerance(3e-4, 3e-3, 1e-3)}
_SAME = 1e-6  # of two losses
_NO_IMAGES = "it takes no images"
_NO_CONFIG = "its class does not make it of a configuration"


@dataclass(frozen=True)
class CheckedModel:
    """What is checked."""

    model: nn.Module  # the user's model, which may be without values; it is not changed
    criterion: Criterion | None = None  # the user's loss; None for the model's own
    # returns the first samples of the user's batch; None if there is none
    batch: Callable[[], Mapping[str, Any]] | None = None
    packed_rows: int = 0  # rows of the user's first batch, if these are packed documents


@dataclass(frozen=True)
class _Copies:
    """Subject whose copies all come from one model, which is built once."""

    built: nn.Module  # the model
    batches: Callable[[nn.Module, int, int], dict[str, Any]]  # makes a batch of a model, a step and a number of samples
    is_rounded: bool = False  # whether weights differ from the model's in their last digits

    @property
    def name(self) -> str:
        return type(self.built).__name__

    def build(self) -> nn.Module:
        # A deep copy of an ordered dictionary, even of an empty one, takes longer than all the rest of a module.
        hooks = (held for module in self.built.modules() for held in vars(module).values())
        memo = {id(held): OrderedDict() for held in hooks if isinstance(held, OrderedDict) and not held}
        model = copy.deepcopy(self.built, memo)
        with torch.no_grad():
            for param in model.parameters() if self.is_rounded else ():
                if param.is_floating_point():
                    param.mul_(1 + 4 * torch.finfo(param.dtype).eps * torch.randn_like(param))
        return model

    def batch(self, model: nn.Module, step: int, rows: int) -> dict[str, Any]:
        return copy.deepcopy(self.batches(model, step, rows))

    def packed(self, rows: int | None) -> _Copies:
        """Return copies that train packed documents, in as many rows; None for one row of two documents a sample."""
        reason = reason_not_kept_apart(self.built)
        if reason or not looks_for_documents(self.built):
            raise NotCheckedError(f"in plain transformers it {reason or 'looks for no documents'}, so that these meet")
        return replace(self, batches=partial(_packed_batch, self.batches, rows))


_of_thread = threading.local()  # is_first_step


class _LimitedLog(OutputLog):
    """Recorder that ends steps which take too much time, and knows the first one."""

    def __init__(self, model: nn.Module, seconds: float) -> None:
        super().__init__(model)
        self._end, _of_thread.is_first_step = time.thread_time() + seconds, True

    def take(self) -> list[Output]:
        _of_thread.is_first_step = False
        return super().take()

    def _after(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        if time.thread_time() > self._end:
            raise NotCheckedError(f"a step of its small copy takes longer than {_LONGEST_S} s")
        super()._after(name, module, args, output)


def check_layout(subject: CheckedModel, options: Mapping[str, Any], world_size: int) -> LayoutReport:
    """Check the layout of `options` for a model, without ranks; never raises.

    It runs in a thread of its own, where no mode of the caller holds: autocast, no_grad, hooks of saved tensors.
    """
    usual, collects = torch.get_default_dtype(), gc.isenabled()
    torch.set_default_dtype(torch.float32)
    gc.disable()  # a full collection goes through all that is imported, and takes as long as a check
    try:
        with (
            _eager(options),
            _first_loss_in_chunks(),
            _out_of_the_job(),
            random_numbers_apart(),
            quiet(),
            warnings.catch_warnings(),
            ThreadPoolExecutor(1) as thread,
        ):
            warnings.simplefilter("ignore")
            return thread.submit(_check, subject, options, world_size).result()
    finally:
        torch.set_default_dtype(usual)
        if collects:
            gc.enable()


def _eager(options: Mapping[str, Any]) -> AbstractContextManager:
    """Run fused operators without their compiler, which takes longer than the check may."""
    is_compiled = options.get("enable_jit_fused") or options.get("enable_all_optimization")
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


@contextmanager
def _first_loss_in_chunks() -> Iterator[None]:
    """Compute the first step's loss of tokens in chunks, as with true vocabularies, and the second's of all logits."""
    with (
        mock.patch.object(fused_linear, "saves_memory", lambda call: getattr(_of_thread, "is_first_step", False)),
        mock.patch.object(fused_linear, "rows_of_chunk", lambda columns, device: _CHUNK),
    ):
        yield


@contextmanager
def _out_of_the_job() -> Iterator[None]:
    """Hide accelerate's state, by which losses of detectors reduce over the ranks of the job: one of them checks."""
    shared, PartialState._shared_state = PartialState._shared_state, {}
    try:
        yield
    finally:
        PartialState._shared_state = shared


def _check(subject: CheckedModel, options: Mapping[str, Any], world_size: int) -> LayoutReport:
    report, start, kind = LayoutReport(), time.process_time(), type(model_inside(subject.model)).__name__
    without_images: set[str] = set()
    for (small, count), (what, part) in product(checked_layouts(options, world_size), _parts_of(subject)):
        config = HybridParallelConfig.from_options(**small)
        name = f"{kind}, {config.layout(small['dp_size'])}{what}"
        try:
            if time.process_time() - start > _LONGEST_CHECK_S:
                raise NotCheckedError(f"the check takes longer than {_LONGEST_CHECK_S} s")
            found = _difference(part, small, count, without_images)
        except Exception as error:  # models fail with arbitrary exception types
            report.not_checked.append(f"{name}, not checked: {_sentence(error)}")
            continue
        if found is None:
            report.proved.append(name)
        else:
            report.findings.append(f"{name}: {found}; {_way_out(small)}")
    report.not_checked += [f"{kind}, images not checked: {reason}" for reason in without_images]
    return report


def _parts_of(subject: CheckedModel) -> Iterator[tuple[str, CheckedModel]]:
    """Yield what is tried of a model, each with its name: its own loss, packed documents, and the user's criterion.

    A model that no class and configuration make again is tried with the user's own batch and criterion alone.
    """
    try:
        _config_of(model_inside(subject.model))
    except NotCheckedError:
        yield "", subject
        return
    own = replace(subject, criterion=None, packed_rows=0)
    yield "", own
    if subject.packed_rows:
        yield ", packed rows", replace(own, packed_rows=subject.packed_rows)
    if subject.criterion is not None:
        yield ", with the criterion", replace(own, criterion=subject.criterion)


def _difference(
    subject: CheckedModel, options: dict[str, Any], world_size: int, without_images: set[str]
) -> str | None:
    """Return where the step differs from a plain one; None if nowhere; raises if the model cannot be checked.

    Why no image is tried of a model that takes some is added to `without_images`.
    """
    record = partial(_LimitedLog, seconds=_LONGEST_S / world_size)
    trial, plain, precision = _plain(subject, options, record, without_images)
    if _loses_by_parts(trial, subject.criterion):
        if options["ep_size"] > 1:
            raise NotCheckedError("what it computes of a part of a batch may differ, and replicas divide the batch")
        world_size //= options["dp_size"]
        whole = {"num_microbatches": 1, "dp_size": 1, "pp_style": "1f1b", "num_model_chunks": None}
        trial = replace(trial, options=options | whole)
    trial, plain, ranks = _on_ranks(trial, plain, world_size)
    usual = _TOLERANCES[precision]
    first = compare(plain, ranks, usual).first
    if first is None:
        return None
    # Plain steps from weights that are rounded otherwise say how far apart rounding alone can be.
    wide = replace(usual, loss=10 * usual.loss, tensor=10 * usual.tensor)
    may_be_rounding = first.step > 1 or compare(plain, ranks, wide).first is None
    again = replace(trial, tiny_model=replace(trial.tiny_model, is_rounded=may_be_rounding))
    narrow = replace(usual, loss=usual.loss / 10, tensor=usual.tensor / 10, moved_floor=1.0)
    apart = compare(plain, [train_reference(again)], narrow if may_be_rounding else usual).first
    if apart is not None and apart.step <= first.step:
        if may_be_rounding and apart.step > 1:  # it amplifies the rounding of its first step, which agrees (D-FINE)
            return None
        raise NotCheckedError("no two plain steps of its small copy agree")
    with suppress(OSError, TypeError):  # there is no source
        return f"{first.text}{_place(trial, first, world_size, precision)}"
    return first.text


def _on_ranks(trial: VerifyCase, plain: Trace, world_size: int) -> tuple[VerifyCase, Trace, list[Trace]]:
    """Train under a layout; where that fails, again with as many samples in each part, which may train otherwise.

    Returns:
        The case, the plain training of it and that of each rank.
    """
    parts = (trial.options.get("num_microbatches") or trial.options["pp_size"]) * trial.options["dp_size"]
    for rows in (trial.rows, 4 * parts):
        if rows != trial.rows:
            trial = replace(trial, rows=rows)
            plain = train_reference(trial)
        try:
            return trial, plain, run_on_threads(_train, world_size, trial)
        except (ConfigurationError, NotCheckedError):
            raise  # boost() decides on the layout of the model itself
        except Exception as error:  # no finding: it is not silent, and may be of the small sizes alone
            failed = error
    raise NotCheckedError(f"its small copy does not train under the layout: {_sentence(failed)}") from failed


def _loses_by_parts(trial: VerifyCase, criterion: Criterion | None) -> bool:
    """Return whether parts of a batch may add up to another loss, which is known, and no fault of a layout.

    So do the statistics of batch norms, and means over unequal counts in losses that are not transformers' own. A mean
    over samples, by which `boost` weighs parts, adds up to that of the batch.
    """
    model = model_inside(trial.tiny_model.built)
    if not type(model).__module__.startswith("transformers.") or has_batch_norms(model):
        return True
    if criterion is None:
        return False
    batch = trial.tiny_model.batch(model, 0, trial.rows)

    def loss_of(part: Mapping[str, Any]) -> Any:
        return criterion(model(**inputs_of(criterion, model, part)), part)

    whole = loss_of(batch)
    if isinstance(whole, tuple):
        return False
    with suppress(Exception):  # parts of arbitrary models may fail, or not be told apart
        parts = [loss_of(part) * num_rows(part) / num_rows(batch) for part in split_batch(batch, 2)]
        return not torch.isclose(sum(parts), whole, rtol=_SAME)
    return True


def _train(trial: VerifyCase) -> Trace:
    # A user's policy keeps the model that it is applied to.
    return train_on_rank(replace(trial, options=copy.deepcopy(trial.options)))


def _plain(
    subject: CheckedModel, options: dict[str, Any], record: Callable[[nn.Module], OutputLog], without_images: set[str]
) -> tuple[VerifyCase, Trace, str]:
    """Return the first copy of a model that trains unsharded, its trace and its precision."""
    parallel = HybridParallelConfig.from_options(**options)
    stages, reasons = parallel.parallel.pp_size * parallel.chunks_per_rank, {}
    parts = (options.get("num_microbatches") or options["pp_size"]) * options["dp_size"]
    packs = subject.packed_rows > 0
    if packs:
        reasons[_with_images] = _NO_IMAGES
    for make in (_whole_size, _small_size) if packs else (_with_images, _whole_size, _small_size, _own_object):
        for precision, dtype in (("fp64", torch.float64), ("fp32", torch.float32)):
            try:
                copies, criterion = make(subject, options["tp_size"], stages, dtype)
                if packs:
                    copies = copies.packed(options["dp_size"] if subject.packed_rows == 1 else None)
                # The second step is without padding, which not each model takes.
                trial = VerifyCase(copies, max(2 * parts + 1, _LEAST_ROWS), 2, options, criterion, record=record)
                try:
                    plain = train_reference(trial)
                except Exception:
                    plain = train_reference(trial := replace(trial, rows=trial.rows + 1, steps=1))
                if not all(numpy.isfinite(value).all() for value in plain.steps[0].gradients.values()):
                    raise NotCheckedError("the gradients of its small copy are not finite, also plainly")
                if make is not _with_images and reasons[_with_images] not in (_NO_IMAGES, _NO_CONFIG):
                    without_images.add(reasons[_with_images])
                return trial, plain, precision
            except NoMediaError as error:
                reasons[make] = str(error)
            except (NotCheckedError, RandomLossError) as error:
                reasons[make] = str(error)
                break
            except Exception as error:  # models fail with arbitrary exception types
                reasons[make] = f"its small copy does not train plainly either: {_sentence(error).partition(';')[0]}"
    raise NotCheckedError(reasons[_own_object if reasons[_small_size] == _NO_CONFIG else _small_size])


def _with_images(subject: CheckedModel, tp_size: int, stages: int, dtype: torch.dtype) -> tuple[_Copies, Any]:
    """Copy a model of texts and images, by its class and its configuration with small sizes."""
    model = model_inside(subject.model)
    config, kind = _config_of(model), type(model)
    takes_images = hasattr(config, "vision_config") and not takes_pairs(kind)
    if not takes_images or getattr(sys.modules[kind.__module__], kind.__name__, None) is not kind:
        raise NotCheckedError(_NO_IMAGES)
    small = twin_config(kind, config, TwinSizes.of(config, tp_size, stages))
    twin = image_twin_of(TinyModel(kind.__module__, kind.__name__, small, dtype))
    built = twin.build()
    _refuse_other_parts(built, model)
    return _Copies(built, twin.batch), subject.criterion


def _whole_size(subject: CheckedModel, tp_size: int, stages: int, dtype: torch.dtype) -> tuple[_Copies, Any]:
    """Copy a small model by its class and its configuration as it is."""
    model = model_inside(subject.model)
    if sum(param.numel() for param in model.parameters()) > _MOST_PARAMETERS:
        raise NotCheckedError("it has no small copy")
    return _twin(subject, _for_training(copy.deepcopy(_config_of(model))), dtype)


def _small_size(subject: CheckedModel, tp_size: int, stages: int, dtype: torch.dtype) -> tuple[_Copies, Any]:
    """Copy a model by its class, and its configuration with small sizes."""
    model = model_inside(subject.model)
    config = _config_of(model)
    return _twin(subject, twin_config(type(model), config, TwinSizes.of(config, tp_size, stages)), dtype)


def _own_object(subject: CheckedModel, tp_size: int, stages: int, dtype: torch.dtype) -> tuple[_Copies, Any]:
    """Copy the model itself, which no class and configuration can make again, with a batch of the user's."""
    params = list(subject.model.parameters())
    if subject.batch is None or any(param.is_meta for param in params):
        raise NotCheckedError("no small copy of it can be made, and boost() got no model with values and data loader")
    if sum(param.numel() for param in params) > _MOST_PARAMETERS:
        raise NotCheckedError("no small copy of it can be made")
    model = without_dropout(copy.deepcopy(subject.model).to(device="cpu", dtype=dtype).train())
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            hooks.clear()  # they may count or log what is trained
    given = cast(subject.batch(), dtype)

    def batches(model: nn.Module, step: int, rows: int) -> dict[str, Any]:
        return {key: _rows(value, rows) for key, value in given.items()}

    return _Copies(model, batches), subject.criterion


def _twin(subject: CheckedModel, config: Any, dtype: torch.dtype) -> tuple[_Copies, Any]:
    model = model_inside(subject.model)
    with torch.device("meta"):
        count = sum(param.numel() for param in type(model)(copy.deepcopy(config)).parameters())
    if count > _MOST_PARAMETERS:
        raise NotCheckedError(f"its small copy would have {count:,} parameters")
    built = build_small(type(model), config, dtype)
    _refuse_other_parts(built, model)
    has_labels = takes_labels(type(model))
    criterion = subject.criterion or (None if has_labels else distance_from_wave)

    def batches(model: nn.Module, step: int, rows: int) -> dict[str, Any]:
        batch = batch_for(model, step, rows, has_labels=has_labels)
        if step:  # without padding, for which other attention may run
            batch.pop("attention_mask", None)
        elif has_labels:
            _read_last_token(batch, model.config)
        return cast(batch, dtype)

    return _Copies(built, batches), criterion


def _packed_batch(
    batches: Callable[[nn.Module, int, int], dict[str, Any]],
    packed_rows: int | None,
    model: nn.Module,
    step: int,
    rows: int,
) -> dict[str, Any]:
    """Make a batch of packed documents of another batch: its samples, without padding, one behind the other.

    Args:
        packed_rows: of the batch, whose `position_ids` restart where a document starts; None for `rows`.
    """
    batch = batches(model, step, 2 * rows)
    ids, packed_rows = batch["input_ids"], packed_rows or rows
    mask = batch.pop("attention_mask", torch.ones_like(ids)).bool()
    others = [name for name, value in batch.items() if not isinstance(value, Tensor) or value.shape != ids.shape]
    if others:
        raise NotCheckedError(f"it has {others[0]}, which belongs to no token")
    width = int(mask.sum()) // packed_rows
    batch["starts"] = (mask.cumsum(1) == 1) & mask
    batch = {name: value[mask][: packed_rows * width].view(packed_rows, width) for name, value in batch.items()}
    starts, places = batch.pop("starts"), torch.arange(width)
    starts[:, 0] = True
    if "labels" in batch:  # the loss of heads that predict the next token crosses no border
        batch["labels"].masked_fill_(starts, IGNORE_INDEX)
    return batch | {"position_ids": places - (places * starts).cummax(1).values}


def _read_last_token(batch: dict[str, Any], config: Any) -> None:
    """Put the last token of the vocabulary, whose row the last rank holds, into the first row, in place."""
    ids, labels, last = batch.get("input_ids"), batch.get("labels"), getattr(config, "vocab_size", 0) - 1
    is_special = any(
        name.endswith(("token_id", "token_index")) and value == last for name, value in vars(config).items()
    )
    if ids is None or ids.dim() != 2 or getattr(labels, "shape", None) != ids.shape or last < 0 or is_special:
        return
    if int(ids[0, 2]) == int(labels[0, 2]):  # of a language model
        ids[0, 2] = labels[0, 2] = last


def _config_of(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    takes_it = list(inspect.signature(type(model).__init__).parameters)[1:2] == ["config"]
    if not (hasattr(config, "to_dict") and takes_it) or has_own_forwards(model):
        raise NotCheckedError(_NO_CONFIG)
    return config


def _refuse_other_parts(built: nn.Module, model: nn.Module) -> None:
    """Check that a small copy has all parts of the model; switches of its family may add further ones."""
    of_copy, own = ({re.sub(r"\d+", "*", name) for name, _ in each.named_parameters()} for each in (built, model))
    # Which frames of sounds are masked is drawn, as dropout is; copies have neither.
    if not {name for name in own if not name.endswith("masked_spec_embed")} <= of_copy:
        raise NotCheckedError("its parameters are not those that its class makes of its configuration")


def _for_training(config: Any) -> Any:
    """Switch off dropout and caches, in place; with a cache, transformers looks for no packed documents."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _for_training(value)
        elif name == "use_cache":
            config.use_cache = False
        elif isinstance(value, float) and any(word in name for word in ("drop", "jitter")):
            setattr(config, name, 0.0)
    return config


def _rows(value: Any, rows: int) -> Any:
    """Return `rows` samples of an entry of a batch, again from its start where it has fewer."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    return value[torch.arange(rows) % len(value)]


def _place(trial: VerifyCase, first: Difference, world_size: int, precision: str) -> str:
    """Return the file and the line of the modeling code where the first module differs."""
    modules, path = dict(trial.tiny_model.built.named_modules()), first.name
    while path and (path not in modules or type(modules[path]).__module__.startswith("torch.")):
        path = path.rpartition(".")[0]
    kind = type(modules[path])
    file = inspect.getsourcefile(kind)
    place = f" ({kind.__name__} of {file}, line {inspect.getsourcelines(kind)[1]})"
    if first.what != "output":
        return place
    trial = replace(trial, record=partial(OperatorLog, path=path, file=file))
    try:
        found = compare(train_reference(trial), run_on_threads(_train, world_size, trial), _TOLERANCES[precision]).first
    except Exception:  # the module's place is known
        return place
    is_found = found is not None and found.what == "output"
    return f" ({kind.__name__} of {file}, first {found.name})" if is_found else place


def _way_out(options: Mapping[str, Any]) -> str:
    """Return what would do instead of a layout."""
    axes = [axis for axis in ("tp", "pp", "cp", "ep") if options[f"{axis}_size"] > 1]
    sizes = ", ".join(f"{axis}_size={options[f'{axis}_size']}" for axis in axes)
    if options.get("enable_sequence_parallelism"):
        sizes += ", enable_sequence_parallelism=True"
    others = ", ".join(f"{axis}_size=1" for axis in axes)
    return (
        f"under {sizes} it would train otherwise than plain PyTorch; use {others}, or check_layout='warn' to train all "
        "the same"
    )


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())[:_LENGTH]
    if isinstance(error, ConfigurationError | NotCheckedError):
        return text
    at: Sequence[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {text} ({at[-1].filename}, line {at[-1].lineno})"
