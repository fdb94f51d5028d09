"""One head class, trained plainly and sharded, by the code of `booster verify`."""

from __future__ import annotations

import copy
import importlib
import math
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce, wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.microbatch import split_batch
from plugins.hybrid_parallel.distributed.local_ranks import run_on_threads
from plugins.hybrid_parallel.setup.input_checks import has_batch_norms, mixed_samples
from plugins.hybrid_parallel.setup.optimizer import build_trained
from plugins.hybrid_parallel.verify.compare import TOLERANCES, Tolerance, compare
from plugins.hybrid_parallel.verify.propose import share_cut
from plugins.hybrid_parallel.verify.random_batch import distance_from_wave, rows_of
from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, small_config
from plugins.hybrid_parallel.verify.train import (
    RandomLossError,
    Trace,
    VerifyCase,
    train_on_rank,
    train_reference,
)
from zoo_tests.campaigns.census.classes import HeadClass, training_refused
from zoo_tests.campaigns.census.verdict import EXACT, NO_ANSWER, NO_PLAN, Share, Verdict
from zoo_tests.harness.case import Layout
from zoo_tests.harness.ranks import RankError, run_on_ranks, under_load

_ROWS, _STEPS = 6, 2
_TIMEOUT_S = 90.0  # on a machine that does something else, too
_LENGTH = 220  # of a reason
TOLERANCE = Tolerance(loss=1e-3, tensor=1e-3, floor=1e-4)
# A difference up to this many times the tolerance may be rounding: it is judged again in fp64.
_MAY_BE_ROUNDING = 10
# The loss of speech (CTC) stays in fp32, with digits of 1.2e-7: two of them. The gradient of a bias in front of a batch
# norm is 0 but for rounding, 1e-15 of the largest.
_EXACT_IN_FP64 = Tolerance(loss=2.4e-7, tensor=1e-7, floor=1e-7)
# Windows also where a family's own configuration has none.
_SIZES = TwinSizes(kv_heads=4, is_faithful=False)


@dataclass(frozen=True)
class PlainRun:
    """A plain training.

    Attributes:
        case: what was trained, without options of a layout.
        trace: what was recorded.
        criterion: why the loss is a criterion of the script's; empty if it is the model's own.
    """

    case: VerifyCase
    trace: Trace
    criterion: str = ""


def refusal(head: HeadClass) -> str | None:
    """Why the class cannot be sharded at all, or None; also where the model cannot be built, which comes later."""
    from shardformer.policies.registry import policy_for

    try:
        model = twin_of(head).build()
    except Exception:  # told by plain_run
        return None
    try:
        policy_for(model)
    except ValueError:
        return NO_PLAN
    return None


def plain_run(head: HeadClass) -> PlainRun | str:
    """Plain training, or why there is none.

    A class whose own loss does not train, most often because transformers has none, is trained without labels and with
    a criterion.
    """
    refused = training_refused(head)
    own = f"transformers: {refused}" if refused is not None else _trained(head, None)
    if isinstance(own, PlainRun):
        return own
    other = _trained(head, distance_from_wave)
    if isinstance(other, PlainRun) and not _largest_gradient(other.trace):
        other = "its outputs have no gradient"
    if isinstance(other, PlainRun):
        return replace(other, criterion=_short(own))
    return _short(own if other == own else f"{own}; with a criterion: {other}")


def _trained(head: HeadClass, criterion: Any) -> PlainRun | str:
    try:
        case = VerifyCase(twin_of(head, has_labels=criterion is None), _ROWS, _STEPS, {}, criterion)
        try:
            return PlainRun(case, train_reference(case))
        except RandomLossError:
            case = replace(case, draws_alike=True)
            return PlainRun(case, train_reference(case))
    except Exception as error:  # any of a thousand classes may fail in its own way
        return _text(error)


def sharded_verdict(head: HeadClass, layout: str, plain: PlainRun, on_threads: bool = False, **options: Any) -> str:
    """ "exact" if all losses and the first gradients agree, or the reason.

    Args:
        on_threads: ranks are threads of this process, which costs less than processes that send their traces.
        options: further ones of the plugin.
    """
    return sharded_run(head, layout, plain, on_threads, **options)[0]


class AllInDouble(TorchFunctionMode):
    """Let a model of fp64 compute in fp64 also what its class casts to fp32: norms, softmaxes, recurrences."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, Tensor) and each.dtype is torch.float64 for each in args):
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in kwargs.items()}
        return func(*args, **kwargs)


def sharded_run(
    head: HeadClass, layout: str, plain: PlainRun, on_threads: bool = False, **options: Any
) -> tuple[str, list[Trace]]:
    """The verdict under a layout, and what the ranks recorded; see `sharded_verdict`."""
    is_double = plain.case.tiny_model.dtype is torch.float64
    reason, ranks, worst = _run(layout, plain, TOLERANCES["fp64"] if is_double else TOLERANCE, options, on_threads)
    # Gradients of a criterion may be small against activations, and so against what single precision rounds.
    limit = math.inf if plain.criterion else _MAY_BE_ROUNDING
    for precision in (AllInDouble,) if is_double else (nullcontext, AllInDouble):
        if not ranks or not 1 <= worst < limit:
            break
        try:
            case = _in_double(plain.case)
            with precision():
                plain = PlainRun(case, train_reference(case), plain.criterion)
        except Exception:  # it does not train in fp64
            break
        reason, ranks, worst = _run(layout, plain, _EXACT_IN_FP64, options, on_threads, precision)
        limit = math.inf  # what the class casts to fp32 is rounded, too
    return reason, ranks


def _in_double(case: VerifyCase) -> VerifyCase:
    """A case in fp64, with experts one by one: products of groups take no fp64."""
    config = copy.deepcopy(case.tiny_model.config)
    config._experts_implementation = "eager"
    return replace(case, tiny_model=replace(case.tiny_model, dtype=torch.float64, config=config))


def _run(
    layout: str,
    plain: PlainRun,
    tolerance: Tolerance,
    options: dict[str, Any],
    on_threads: bool = False,
    precision: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[str, list[Trace], float]:
    """The verdict, what the ranks recorded, and the largest difference in units of the tolerance."""
    sizes, sharding = _sizes_of(layout)
    # Statistics of a batch, and numbers that the loss draws, are those of the plain run where the batch is not split.
    if plain.case.draws_alike or _mixes_samples(plain.case.tiny_model):
        sharding["num_microbatches"] = 1
    if sizes.dp_size > 1 and not plain.criterion and has_batch_norms(plain.case.tiny_model.build()):
        twin = _InShares(plain.case.tiny_model, sizes.dp_size)
        with precision():
            plain = replace(plain, trace=train_reference(replace(plain.case, tiny_model=twin)))
    case = replace(plain.case, options=sharding | options)
    if plain.criterion:
        tolerance = replace(tolerance, floor=tolerance.floor * min(_largest_gradient(plain.trace), 1.0))
    try:
        ranks = (_on_threads if on_threads else _on_processes)(sizes.world_size, case, precision)
    except RankError as error:
        return _short(error), [], 0.0
    refusals = [each for each in ranks if isinstance(each, str)]
    if refusals:
        return _short(refusals[0]), [], 0.0
    verdict = compare(plain.trace, ranks, tolerance)
    losses, gradients, _ = verdict.worst
    worst = max(losses.value / tolerance.loss, gradients.value / tolerance.tensor)
    return EXACT if worst < 1 else _short(verdict.first.text), ranks, worst


def _on_processes(world_size: int, *task: Any) -> list[Trace | str]:
    """What ranks that are processes return of `trained_or_refused`; a `RankError` has the last line of the first."""
    try:
        return run_on_ranks(world_size, trained_or_refused, *task, timeout_s=_TIMEOUT_S)
    except RankError as error:
        lines = [line for line in str(error).splitlines() if "Error: " in line]
        raise RankError(lines[-1] if lines else NO_ANSWER) from None


def _on_threads(world_size: int, *task: Any) -> list[Trace | str]:
    """What ranks that are threads return; a `RankError` has the first line of the first that fails."""
    try:
        return run_on_threads(trained_or_refused, world_size, *task, timeout_s=under_load(_TIMEOUT_S))
    except TimeoutError:
        raise RankError(NO_ANSWER) from None
    except Exception as error:  # any of a thousand classes may fail in its own way
        raise RankError(traceback.format_exception_only(error)[0]) from None


@dataclass(frozen=True)
class _InShares:
    """A tiny model whose plain training is that of replicas, each of whose batch norms sees its own rows, as in DDP."""

    twin: TinyModel
    count: int

    @property
    def name(self) -> str:
        return self.twin.name

    def build(self) -> nn.Module:
        model = self.twin.build()
        whole = model.forward

        @wraps(whole)
        def forward(**batch: Any) -> Any:
            shares = split_batch(batch, self.count)
            losses = [whole(**share).loss * rows_of(share) for share in shares]
            return SimpleNamespace(loss=torch.stack(losses).sum() / rows_of(batch))

        model.forward = forward
        return model

    def batch(self, model: nn.Module, step: int, rows: int) -> dict[str, Any]:
        return self.twin.batch(model, step, rows)


def trained_or_refused(case: VerifyCase, precision: Callable[[], AbstractContextManager] = nullcontext) -> Trace | str:
    """Train on this rank; the sentence if the model is refused, on all ranks, which can then train another class."""
    try:
        with precision():
            return train_on_rank(case)
    except ConfigurationError as error:
        if not any(frame.name == build_trained.__name__ for frame in traceback.extract_tb(error.__traceback__)):
            raise  # messages of other ranks may be on their way
        return f"booster.errors.ConfigurationError: {error}"


def judge(head: HeadClass, layouts: list[str], known: Verdict | None = None) -> Verdict:
    """Train a class under those of the layouts that `known` does not tell, and measure what is divided."""
    verdict = known or Verdict(plain=EXACT)
    if (reason := refusal(head)) is not None:  # nothing to train
        verdict.layouts |= dict.fromkeys(layouts, reason)
        return verdict
    plain = plain_run(head)
    if isinstance(plain, str):
        return Verdict(plain=plain)
    verdict.criterion = plain.criterion
    for layout in layouts:
        if layout not in verdict.missing(layouts):
            continue
        verdict.layouts[layout], ranks = sharded_run(head, layout, plain)
        if ranks and _sizes_of(layout)[0].pp_size == 2:
            verdict.share.stages = _divided_by_stages(plain.trace, ranks)
    if any(verdict.exact_under(layout) for layout in ("tp2", "sp2")):
        _measure(plain.case.tiny_model, verdict.share)
    return verdict


def _largest_gradient(plain: Trace) -> float:
    return max(float(abs(each).max(initial=0.0)) for each in plain.steps[0].gradients.values())


def _sizes_of(layout: str) -> tuple[Layout, dict[str, Any]]:
    """Sizes of the axes, and options of the plugin.

    "sp2" is tp2 with sequence parallelism; "sp2-ulysses" and "cp2-ulysses" exchange heads; "ep2" is dp2 whose ranks
    share out experts, "ep2cp2" has two such for each part of the sequences, and of "ep2dp4" two of four share them.
    """
    axes = layout.removesuffix("-ulysses")
    sizes = Layout.named(axes.replace("sp", "tp").replace("ep", "dp"))
    options: dict[str, Any] = {"tp_size": sizes.tp_size, "pp_size": sizes.pp_size, "num_microbatches": sizes.pp_size}
    if sizes.cp_size > 1:
        options["cp_size"] = sizes.cp_size
    if "sp2" in axes:
        options["enable_sequence_parallelism"] = True
    if "ep2" in axes:
        options["ep_size"] = 2
    if axes != layout:
        options["sequence_parallelism_mode"] = "all_to_all"
    return sizes, options


def _measure(twin: TinyModel, share: Share) -> None:
    """Add what two tensor-parallel ranks divide; nothing for a model that does not run without communication."""
    try:
        cut = share_cut(twin.build, twin.batch(twin.build(), 0, _ROWS))
    except Exception:  # any of a thousand classes may fail in its own way
        return
    share.parameters, share.flops = cut.parameters, cut.flops


def _divided_by_stages(plain: Trace, ranks: list[Trace]) -> float:
    """1 if the larger of two stages has half of the elements of all parameters, 0 if it has all."""
    sizes = {name: weight.size for name, weight in plain.first_weights.items()}
    total = sum(sizes[min(names)] for names in plain.aliases)
    largest = max(sum(weight.size for weight in rank.steps[0].weights.values()) for rank in ranks)
    return min(max(2 * (1 - largest / total), 0.0), 1.0)


def _mixes_samples(twin: TinyModel) -> bool:
    model = twin.build()
    return mixed_samples(model) is not None or has_batch_norms(model)


def twin_of(head: HeadClass, dtype: torch.dtype = torch.float32, has_labels: bool = True) -> TinyModel:
    """The tiny model of a class."""
    config_class = getattr(importlib.import_module(head.module), head.name).config_class
    config = small_config(config_class(), _SIZES)
    for path, value in head.switches:
        *owners, name = path.split(".")
        setattr(reduce(getattr, owners, config), name, value)
    return TinyModel(head.module, head.name, config, dtype, None, has_labels)


def _text(error: object) -> str:
    return " ".join(str(error).split()).replace("|", "/") or type(error).__name__


def _short(error: object) -> str:
    text = _text(error)
    return text if len(text) <= _LENGTH else text[: _LENGTH - 1] + "…"
