"""The loss of one step, weighted globally.

`arithmetic.py` has the whole formula. The classes here choose what is summed and which count divides it.
`HeadStepLoss` knows the counts before the step, because they depend only on labels, and divides each share by them.
`CriterionStepLoss` may learn them only afterwards, and then returns a factor for the reduced gradients.

The auxiliary loss of routers on several stages, micro-batches, replicas and parts of sequences is `RouterBalance`. Its
derivative with respect to the scores of one micro-batch depends on the choices of all routers for all tokens. So all
forward passes run before any backward pass. Between the two, the sums of `RouterSums` are added over ranks; then each
stage adds the gradient of its own scores to that of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from booster.data.rows import ItemCount, rows_of, unknown_rows
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.microbatch import LossesPromote, has_floats
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from plugins.hybrid_parallel.loss.arithmetic import count_factor, exact_sum, per_copy, share_of_mean, share_of_sum
from shardformer.context_parallel.zigzag import ZigzagSharding
from shardformer.cross_entropy.vocab_parallel import token_scores
from shardformer.distributed.blocks import blocks_of
from shardformer.distributed.collectives import gather_rows
from shardformer.layers.embedding import VocabParallelLMHead, check_indices, deferred_logits, parallel_logits
from shardformer.loss.heads import counted_by, other_loss_of
from shardformer.loss.terms import DIVISOR, IGNORE_INDEX, SHIFTED, HeadLoss, RouterLoss, RouterScores, RouterSums

LOG_PROBS, ENTROPY, _AUX_LOSS = "log_probs", "entropy", "aux_loss"

Microbatches = Sequence[Mapping[str, Any]]


class StepLoss:
    """Base class for the loss of one step.

    Args:
        microbatches: the micro-batches of this replica, as whole mappings with labels.

    Attributes:
        reads_parallel_logits: whether it reads logits that are sharded over the vocabulary.
        reads_parts: whether it reads outputs of this rank's part of each sequence.
        copies: number of context-parallel ranks that compute the same value, because they see whole sequences.
        own_entries: names of batch entries that only the loss reads.
        balance: auxiliary loss of routers that are spread over stages or micro-batches; None if there is none.
        coupled_outputs: names of outputs whose rows depend on other samples of the batch.
        adds_exactly: whether the total is the same bits in any order of micro-batches and replicas.
        counts_without_rows: whether a replica without samples has a share of the loss, too.
        passes: forward passes of this step, those on placeholders included; set before `reading`.
        needs_all_forwards: whether backward passes need what all forward passes have computed.
    """

    reads_parallel_logits = False
    reads_parts = False
    own_entries: Collection[str] = ()
    balance: RouterBalance | None = None
    coupled_outputs: Collection[str] = ()
    adds_exactly = counts_without_rows = needs_all_forwards = False
    passes = 1

    def __init__(self, microbatches: Microbatches, mesh: HybridMesh) -> None:
        self.microbatches, self.mesh = microbatches, mesh
        self.copies = mesh.size("cp")
        self.total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.shares: list[tuple[int, Tensor]] = []  # (micro-batch, its share of the loss)

    def reading(self, model: nn.Module, keeps_outputs: bool = False) -> AbstractContextManager[None]:
        """Return a context in which heads of `model` make the logits this reads; `keeps_outputs`: of the pass too."""
        return parallel_logits(model) if self.reads_parallel_logits else nullcontext()

    def share(self, outputs: Any, index: int) -> Tensor | None:
        """Return the share of micro-batch `index` in the global loss (0-d, differentiable), on the last stage."""
        loss = self._share(outputs, index)
        if loss is not None:
            loss = per_copy(loss, self.copies)
            self.shares.append((index, loss.detach()))
            self.total += loss.detach()
        return loss

    def _share(self, outputs: Any, index: int) -> Tensor | None:
        raise NotImplementedError

    def finish(self, return_loss: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return the global loss if asked for, and a factor for this step's gradients if one is needed."""
        return (self._total_over_replicas() if return_loss else None), None

    def _total_over_replicas(self) -> Tensor:
        if not self.adds_exactly:
            return self._sum_over_replicas(self.total)
        return self.total.new_tensor(exact_sum((value for _, value in self.shares), self.mesh.replica_group))

    def _sum_over_replicas(self, value: Tensor) -> Tensor:
        """Sum over stages (only the last one has a value), data- and context-parallel ranks."""
        if dist.get_world_size(self.mesh.replica_group) > 1:
            dist.all_reduce(value, group=self.mesh.replica_group)
        return value

    def _sum_over_data(self, value: Tensor) -> Tensor:
        if self.mesh.size("dp") > 1:
            dist.all_reduce(value, group=self.mesh.group("dp"))
        return value

    @property
    def _is_whole(self) -> bool:
        """Whether one micro-batch is the global batch, whose samples need no count."""
        return len(self.microbatches) == 1 and self.mesh.size("dp") == 1

    def _least_over_data(self, *values: float) -> list[float]:
        """Return the minimum of each value over the data-parallel ranks."""
        least = torch.tensor(values, dtype=torch.float64)  # on the CPU: the result is read at once
        if self.mesh.size("dp") > 1:
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.mesh.group("dp"))
        return least.tolist()

    def _check_divisor(self, given: Tensor | float) -> None:
        """Refuse a divisor that counts the labels of one replica: the sum over all replicas is divided by it once."""
        labels = [microbatch["labels"] for microbatch in self.microbatches if "labels" in microbatch]
        number = torch.full((), given, device=self.mesh.device) if isinstance(given, int | float) else given.reshape(())
        counts = [
            sum((each[..., skipped:] != IGNORE_INDEX).sum() for each in labels) + 0 * number for skipped in (0, 1)
        ]
        # Read together: the host waits for the device once.
        divisor, *counts = torch.stack([number.double(), *(each.double() for each in counts)]).tolist()
        least, most, counts_share = self._least_over_data(divisor, -divisor, float(divisor in counts))
        if least != -most or counts_share:
            what = f"{least:g} on one replica and {-most:g} on another" if least != -most else f"{least:g}"
            raise ConfigurationError(
                f"{DIVISOR} is {what}, which counts the labels of a replica's share; it divides the sum over all "
                f"dp_size={self.mesh.size('dp')} replicas: give the count of the global batch, or leave it out"
            )


class NoLoss(StepLoss):
    """No loss: the pass only computes outputs, because the batch has no labels and there is no criterion."""

    def _share(self, outputs: Any, index: int) -> None:
        return None

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model's forward."""
        return dict(batch)

    def of_tokens(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        """Return what becomes of the outputs for a batch."""
        return outputs

    def finish(self, return_loss: bool) -> tuple[None, None]:
        """Return no loss and no factor."""
        return None, None


class TokenLogProbs(NamedTuple):
    """What a model says of the tokens of a batch, [batch, seq - 1] each; 0 where a token is not scored."""

    log_probs: Tensor  # log-probability of the next token
    entropy: Tensor  # of the prediction of the next token, in nats


@dataclass(frozen=True)
class ScoresAsked:
    """Which scores of tokens the passes of a model give."""

    fields: tuple[str, ...] = (LOG_PROBS, ENTROPY)  # see `shardformer.cross_entropy.vocab_parallel`
    temperature: float = 1.0  # divides the logits

    def __post_init__(self) -> None:
        given = self.temperature
        is_number = isinstance(given, Real) or (isinstance(given, Tensor) and given.dim() == 0)
        if not (is_number and given > 0):
            raise ConfigurationError(f"temperature={given} divides the logits; use a number above 0")


class TokenScores(NoLoss):
    """No loss: the outputs are the scores of the tokens in `shift_labels`, each at the position that predicts it.

    Args:
        head_loss: loss of the model's head, which knows the inputs that are derived from labels; None if unknown.
        axis: the axis over which the model leaves sequences split; None if its outputs are of whole sequences.
    """

    own_entries = (SHIFTED,)

    def __init__(
        self,
        microbatches: Microbatches,
        mesh: HybridMesh,
        model: nn.Module,
        asked: ScoresAsked,
        head_loss: HeadLoss | None,
        axis: ZigzagSharding | None,
    ) -> None:
        super().__init__(microbatches, mesh)
        self.model, self.asked, self.head_loss, self.axis = model, asked, head_loss, axis

    def reading(self, model: nn.Module, keeps_outputs: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the heads leave their logits to the scores."""
        is_blocked = self._head is not None and blocks_of(self._head.group) is not None
        return nullcontext() if is_blocked else deferred_logits(model)

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model's forward."""
        inputs = {name: value for name, value in batch.items() if name not in self.own_entries}
        return inputs if self.head_loss is None else self.head_loss.inputs(inputs)

    def of_tokens(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the scores instead of the logits, of this rank's part of each sequence."""
        logits, labels = getattr(outputs, "logits", None), batch[SHIFTED]
        if logits is None or logits.dim() != labels.dim() + 1:
            raise ConfigurationError(
                f"{type(self.model).__name__} has no logits of each token, whose log-probabilities are asked for; load "
                "it by AutoModelForCausalLM"
            )
        # Virtual tokens of peft stand in front of those that have labels.
        length = logits.shape[1] if self.axis is None else self.axis.latest.length
        labels = F.pad(labels.to(logits.device), (length - labels.shape[1], 0), value=IGNORE_INDEX)
        labels = labels if self.axis is None else self.axis.take(labels, fill=IGNORE_INDEX)
        head = self._head
        is_whole = head is None or head.gather_output
        check_indices(labels, logits.shape[-1] if is_whole else head.full_out_features, "label", ignored=IGNORE_INDEX)
        cut = () if is_whole else (head.vocab_range, head.group)
        scores = token_scores(logits, labels, self.asked.fields, self.asked.temperature, *cut)
        aux_loss = getattr(outputs, _AUX_LOSS, None)
        return scores if aux_loss is None else {**scores, _AUX_LOSS: aux_loss}

    @property
    def _head(self) -> VocabParallelLMHead | None:
        return next((each for each in self.model.modules() if isinstance(each, VocabParallelLMHead)), None)


class HeadStepLoss(StepLoss):
    """Loss of the model's own head.

    Args:
        batch: the batch that the micro-batches are parts of; it has its keys even if this replica's share is empty.
        axis: the axis over which the model leaves sequences split; None if its outputs are of whole sequences.
        adds_routers: whether to add the auxiliary loss of the model's routers, all of which are in one pass.
    """

    reads_parts = True
    aux_loss: Tensor | None = None  # of the routers in the last pass, over all replicas

    def __init__(
        self,
        microbatches: Microbatches,
        mesh: HybridMesh,
        head_loss: HeadLoss,
        batch: Mapping[str, Any],
        axis: ZigzagSharding | None = None,
        adds_routers: bool = False,
    ) -> None:
        super().__init__(microbatches, mesh)
        self.axis = axis
        if axis is not None:
            self.copies = 1
        self.head_loss, self.routers = head_loss, head_loss.routers if adds_routers else None
        self.reads_parallel_logits = not head_loss.reads_whole_logits
        counts = torch.zeros(len(head_loss.terms), dtype=torch.float64, device=mesh.device)
        for microbatch in microbatches:
            counts += head_loss.counts(microbatch)
        if mesh.size("dp") > 1 and head_loss.divisor(batch) is not None:
            self._check_divisor(head_loss.divisor(batch))
        self.global_counts = self._sum_over_data(counts)

    def reading(self, model: nn.Module, keeps_outputs: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the heads leave their logits to the loss, or shard them if outputs are kept."""
        if not self.reads_parallel_logits:
            return nullcontext()
        return parallel_logits(model) if keeps_outputs else deferred_logits(model)

    def _share(self, outputs: Any, index: int) -> Tensor:
        part = None if self.axis is None else partial(self.axis.take, fill=IGNORE_INDEX)
        microbatch = self.microbatches[index]
        loss = self.head_loss.weighted_sum(outputs, microbatch, self.global_counts, part)
        if self.routers is None:
            return loss
        replicas = self.mesh.size("dp")
        gather = partial(gather_rows, group=self.mesh.group("dp")) if replicas > 1 else None
        of_routers = self.routers.of_all(outputs, microbatch, gather)
        self.aux_loss = of_routers.detach()
        return loss + (self.routers.factor * of_routers / replicas).to(loss)


class CriterionStepLoss(StepLoss):
    """Loss of a user's criterion: a mean over samples, or a (sum, count).

    Args:
        criterion: (outputs, batch) -> mean, or (sum, count). Its attributes `reads_parallel_logits` and `own_entries`
            may say what it reads.
        main_input: name of the entry that has a row for each sample, if the model tells.
    """

    def __init__(
        self,
        microbatches: Microbatches,
        mesh: HybridMesh,
        criterion: Callable[[Any, Mapping[str, Any]], Any],
        main_input: str | None = None,
    ) -> None:
        super().__init__(microbatches, mesh)
        self.criterion = criterion
        self.reads_parallel_logits = getattr(criterion, "reads_parallel_logits", False)
        self.own_entries = getattr(criterion, "own_entries", ())
        # A criterion that counts by itself needs no rows: where they are not known, any number will do.
        rows = [rows_of(microbatch, main_input) for microbatch in microbatches]
        self.rows, is_unknown = [1 if each is None else each for each in rows], None in rows and not self._is_whole
        # On the CPU, while the first forward pass runs: reading the result must not wait for the device.
        self._sums, self._work = torch.tensor([sum(self.rows), is_unknown]), None
        if mesh.size("dp") > 1:
            self._work = dist.all_reduce(self._sums, group=mesh.group("dp"), async_op=True)
        self.count = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.counts_itself = torch.zeros((), dtype=torch.float64, device=mesh.device)

    @cached_property
    def global_rows(self) -> Tensor:
        """The number of samples of the global batch (0-d, float64)."""
        return torch.full((), float(self._rows_of_all()[0]), dtype=torch.float64, device=self.mesh.device)

    def _rows_of_all(self) -> list[int]:
        """Return the number of samples of all replicas, and how many of these do not know their own."""
        if self._work is not None:
            self._work.wait()
        return self._sums.tolist()

    def _share(self, outputs: Any, index: int) -> Tensor:
        microbatch = self.microbatches[index]
        with LossesPromote():
            value = self._value(outputs, microbatch)
        if isinstance(value, tuple):
            value, count = value
            self.count += per_copy(count.detach() if isinstance(count, Tensor) else count, self.copies)
            self.counts_itself.fill_(1.0)
        elif value is None:
            raise ConfigurationError(
                "criterion returned None, as outputs.loss is where a criterion computes the loss; leave the criterion "
                "out to train on the loss of the model"
            )
        elif self._rows_of_all()[1]:
            raise unknown_rows(microbatch)
        else:
            value = value * self.rows[index]
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise ConfigurationError(
                f"criterion returned {_describe(value)}; return a 0-d tensor (a mean over samples) or (sum, count)"
            )
        # If the criterion counts by itself, the global count is not known yet: the number of samples keeps gradients in
        # range until `finish` corrects it.
        return share_of_sum(value, self.global_rows)

    def _value(self, outputs: Any, microbatch: Mapping[str, Any]) -> Any:
        """Call the criterion."""
        try:
            return self.criterion(outputs, microbatch)
        except (AttributeError, TypeError) as error:
            if "NoneType" in str(error) and getattr(outputs, "loss", self) is None:
                raise ConfigurationError(
                    f"{error} in the criterion: outputs.loss is None where a criterion computes the loss; take "
                    "outputs.logits, or leave the criterion out to train on the loss of the model"
                ) from error
            raise

    def finish(self, return_loss: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return the global loss if asked for, and the factor that corrects gradients to the criterion's own count."""
        sums = self._sum_over_replicas(torch.stack([self.total, self.count, self.counts_itself]))
        total, count, counts_itself = sums
        if self.adds_exactly:
            total = self._total_over_replicas()
        factor = count_factor(self.global_rows, count, counts_itself)
        return (total * factor if return_loss else None), factor


class ModelStepLoss(StepLoss):
    """Loss that a model computes itself, taken as a mean over its samples.

    A mean over labels gives the same result only if all parts of the batch have equally many labels per sample, or if
    there is one part. A sum that the forward has divided by the number of items of all replicas is a share as it is.

    Args:
        batch: the batch that the micro-batches are parts of; an `ItemCount` in it has divided the loss.
        reason: why the model computes it, for error messages.
        main_input: name of the entry that has a row for each sample, if the model tells.
        model: the model.
    """

    def __init__(
        self,
        microbatches: Microbatches,
        mesh: HybridMesh,
        batch: Mapping[str, Any],
        reason: str,
        main_input: str | None,
        model: nn.Module,
    ) -> None:
        super().__init__(microbatches, mesh)
        self.model, self.reason, self.reads_floats = model, reason, has_floats(batch)
        self.is_divided = isinstance(batch.get(DIVISOR), ItemCount)
        self.rows = [1] if self._is_whole else [rows_of(each, main_input) for each in microbatches]
        if len(microbatches) > 1 or mesh.size("dp") > 1:
            self._check_parts(batch)
        rows = torch.full((), float(sum(self.rows)), dtype=torch.float64, device=mesh.device)
        self.global_rows = self._sum_over_data(rows)

    def _check_parts(self, batch: Mapping[str, Any]) -> None:
        if self.is_divided:
            self._check_divisor(batch[DIVISOR])
            return
        if batch.get(DIVISOR) is not None:
            raise self._refusal(f"{DIVISOR} says that it is a sum")
        if any(isinstance(value, list) for name, value in batch.items() if "labels" in name):
            raise self._refusal("its labels are a list of targets, whose numbers differ between samples")
        if (other := other_loss_of(self.model)) is not None:
            raise self._refusal(other)
        counted = counted_by(self.model)
        rates = torch.stack([rate for each in counted for rate in self._rates(*each)]).tolist()  # the host waits once
        *found, all_known = self._least_over_data(*rates, None not in self.rows)
        if not all_known:
            raise unknown_rows(batch)
        for (name, _), least, most in zip(counted, found[::2], found[1::2], strict=True):
            if least < -most:
                what = "labels" if "label" in name else f"values of {name}"
                raise self._refusal(f"they have {least:g} to {-most:g} {what} a sample")

    def _rates(self, name: str, ignored: float) -> tuple[Tensor, Tensor]:
        """Return the least number, per sample, of values of an entry that are not `ignored`, and -1 times the most."""
        given = [each.get(name) for each in self.microbatches]
        given = [each for each in given if isinstance(each, Tensor) and each.dim() and len(each)]
        if not given or (isinstance(ignored, int) and given[0].is_floating_point()):
            none = torch.full((), float("inf"), dtype=torch.float64, device=self.mesh.device)
            return none, none
        rates = torch.stack([(each != ignored).sum(dtype=torch.float64) / len(each) for each in given])
        return rates.min(), -rates.max()

    def _refusal(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self.reason}, whose means over {len(self.microbatches)} micro-batches on each of "
            f"dp_size={self.mesh.size('dp')} replicas cannot be put together, because {why}; pass a criterion that "
            "returns (sum, count), or use num_microbatches=1 and dp_size=1"
        )

    def reading(self, model: nn.Module, keeps_outputs: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the model's losses take outputs in 16 bits and labels in their own dtype."""
        return LossesPromote() if self.reads_floats else nullcontext()

    def _share(self, outputs: Any, index: int) -> Tensor:
        is_loss = isinstance(outputs, Tensor) and outputs.dim() == 0
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        loss = outputs if is_loss else loss
        if loss is None:
            raise ConfigurationError("the model returned no loss; give labels in the batch or a criterion")
        return loss if self.is_divided else share_of_mean(loss, self.rows[index], self.global_rows)


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def next_tokens(batch: Mapping[str, Any], head_loss: HeadLoss | None) -> tuple[dict[str, Any], bool]:
    """Return a batch with `shift_labels` instead of labels, and whether they are those of the next tokens.

    Without labels, each token of a text is one, but for padding and the first of each packed document.
    """
    ids = batch.get("input_ids")
    if batch.get(SHIFTED) is not None:
        _check_labels(batch[SHIFTED], batch.get("decoder_input_ids", ids))
        return {name: value for name, value in batch.items() if name != "labels"}, False
    labels = batch.get("labels")
    if labels is None:
        if ids is None:
            raise ConfigurationError("token_log_probs() finds neither labels nor input_ids in the batch; give either")
        labels, mask, positions = ids, batch.get("attention_mask"), batch.get("position_ids")
        if mask is not None and mask.dim() == 2:
            labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
        elif positions is not None and positions.dim() == 2:
            labels = labels.masked_fill(positions == 0, IGNORE_INDEX)
    known = None if head_loss is None else head_loss.terms[0]
    if known is not None and (known.is_input or SHIFTED not in known.keywords):
        return {**batch, "labels": labels, SHIFTED: labels}, False
    _check_labels(labels, ids)
    rest = {name: value for name, value in batch.items() if name != "labels"}
    return {**rest, SHIFTED: F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]}, True


def _check_labels(labels: Tensor, ids: Tensor | None) -> None:
    """Refuse labels that are not those of the tokens: scores would be of other positions."""
    if ids is not None and labels.shape != ids.shape:
        raise ConfigurationError(
            f"token_log_probs() gets labels of shape {tuple(labels.shape)} for input_ids of shape {tuple(ids.shape)}; "
            f"give each token a label, {IGNORE_INDEX} where it does not count"
        )


class RouterBalance:
    """The auxiliary loss of one batch.

    Args:
        masks: the attention mask of this rank's tokens in each micro-batch, [batch, seq/cp] or None; none if the share
            of this replica is empty.
        cuts_over_tp: whether tensor-parallel ranks route different tokens (`all_to_all` sequence parallelism).

    Attributes:
        weight: gradient of the total with respect to the auxiliary loss; set before the backward passes.
        latest: the auxiliary loss (0-d), once it is known.
    """

    def __init__(
        self,
        routers: RouterLoss,
        scores: RouterScores,
        masks: Sequence[Tensor | None],
        mesh: HybridMesh,
        cuts_over_tp: bool = False,
    ) -> None:
        self._routers, self._scores, self._masks, self._mesh = routers, scores, masks, mesh
        self._cuts_over_tp = cuts_over_tp
        self._parts: dict[tuple[int, int], RouterSums] = {}  # by stage and micro-batch
        self._total = routers.no_sums(mesh.device)
        self.weight: Tensor | float = 0.0
        self.latest: Tensor | None = None

    @property
    def factor(self) -> float:
        """Weight of the auxiliary loss in the model's loss."""
        return self._routers.factor

    @contextmanager
    def watching(self, stage: int, microbatch: int) -> Iterator[None]:
        """Collect the scores of a forward pass of one stage."""
        with self._scores.collecting() as scores:
            yield
        if scores and microbatch < len(self._masks):
            self._parts[stage, microbatch] = self._routers.sums(scores, self._masks[microbatch])

    def finish(self) -> Tensor:
        """Return the auxiliary loss of the global batch (0-d), on all ranks; call it after all forward passes."""
        return self._sum_over(self._mesh.replica_group)

    def share_of_batch(self) -> Tensor:
        """Return this rank's share of the weighted loss (0-d), of one stage and pass; shares add up."""
        value, self.weight = self.finish() * self.factor, self.factor
        return self._with_gradient(value / self._mesh.size(DP_CP))

    def loss_of_replica(self) -> Tensor:
        """Return this replica's auxiliary loss (0-d), of one stage and pass; context ranks average it."""
        value, self.weight = self._sum_over(self._mesh.group("cp")), float(self._mesh.size("cp"))
        return self._with_gradient(value)

    def root(self, stage: int, microbatch: int) -> Tensor | None:
        """Return a value (0-d) whose gradient is that of the loss, by the scores of one pass; None if there is none."""
        part = self._parts.pop((stage, microbatch), None)
        if part is None or not part.probabilities.requires_grad:
            return None
        return (self._total.derivatives * self.weight * part.probabilities).sum()

    def _sum_over(self, group: ProcessGroup) -> Tensor:
        mine = [self._routers.no_sums(self._mesh.device), *self._parts.values()]
        total = torch.stack([each.packed() for each in mine]).sum(0)
        for each in (group, self._mesh.group("tp")) if self._cuts_over_tp else (group,):
            if dist.get_world_size(each) > 1:
                dist.all_reduce(total, group=each)
        self._total = RouterSums.unpacked(total)
        self.latest = self._total.loss
        return self.latest

    def _with_gradient(self, value: Tensor) -> Tensor:
        """Return `value` with the gradient of `root`, whose own value is another."""
        root = self.root(0, 0)
        return value if root is None else _OfSums.apply(root, value)


class _OfSums(torch.autograd.Function):
    """A value over all ranks, whose gradient each rank has by its own scores; a collective to those who search it."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, value: Tensor) -> Tensor:
        """Return `value`."""
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Send the gradient to `root`."""
        return grad, None
