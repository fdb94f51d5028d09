"""How a batch becomes micro-batches, in `execute_pipeline` and in the ordinary loop under a pipeline.

Samples are split, or a row of packed documents is cut between these. Replicas that wait for one another agree on the
number of parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from booster.data.rows import unknown_rows
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.pipeline import PipelineOptions
from plugins.hybrid_parallel.data.batch_check import FIRST_STEPS
from plugins.hybrid_parallel.data.media import check_parts
from plugins.hybrid_parallel.data.microbatch import (
    MANY,
    PackedRow,
    agreed_microbatches,
    packed_row,
    split_batch,
    stand_in,
)
from plugins.hybrid_parallel.loss.contrastive import compares_samples
from shardformer.attention.packed_documents import may_be_packed
from shardformer.context_parallel.batch_facts import record_facts


@dataclass(frozen=True)
class BatchSplit:
    """A batch in parts.

    Attributes:
        own: the micro-batches of this replica, with labels; empty if its share of the batch is empty.
        microbatches: the same, and placeholders, because other ranks wait for this one at the experts.
        lengths: tokens of each micro-batch, if they are parts of one row; otherwise None.
        rows: samples of this replica; 1 if nothing counts them.
    """

    own: list[dict[str, Any]]
    microbatches: list[dict[str, Any]]
    lengths: tuple[int, ...] | None
    rows: int


class BatchSplitter:
    """Splits the batches of one model.

    Args:
        model: the boosted model.
        pipeline: how a batch is split.
    """

    def __init__(self, model: Any, pipeline: PipelineOptions) -> None:
        self.model, self.mesh, self.pipeline = model, model.mesh, pipeline

    def split(
        self,
        batch: dict[str, Any],
        on_host: Mapping[str, Any],
        trains: bool,
        reads_rows: bool = False,
        must_fill: bool = False,
        least: int = 0,
    ) -> BatchSplit:
        """Split a batch; all replicas must call this.

        Args:
            batch: the arguments of the model's forward, on the device.
            on_host: the same arguments as they were given.
            trains: whether a backward pass follows.
            reads_rows: whether the loss reads whole rows, which are then not cut.
            must_fill: whether the first batch must fill the pipeline.
            least: the fewest micro-batches, also of an empty share.

        Raises:
            ConfigurationError: if the first batch must fill the pipeline and does not; raised on all replicas. If the
                samples of a batch must be counted, and it does not tell how many they are.
        """
        rows = self._rows(batch)
        if self.model.units is not None:
            return self._in_units(batch, on_host, trains, least, rows)
        row = None if reads_rows else self._packed_row(on_host, rows)
        units = rows if row is None else row.num_documents
        if must_fill and not self.model.checked_full_batch:
            is_row = rows == 1 and may_be_packed(batch)  # which may have few documents in any step
            self._refuse_short_start(max(units, self.pipeline.least_batch_size) if is_row else units)
            self.model.checked_full_batch = True
        # Replicas wait for one another at features that all of them compare.
        if self.model.replicas_wait(trains) or compares_samples(self.model.options.inside, batch):
            count = agreed_microbatches(units, self.pipeline.microbatches_of, self.mesh)
        else:
            count = self.pipeline.microbatches_of(units, self.mesh.size("pp")) if units else 0
        tokens = self.model.options.media_tokens
        check_parts(self.model.unwrap(), batch, count)
        cuts = None if row is None or count < 2 else row.cuts(count, self.model.options.hidden_size)
        own, given = (split_batch(each, count, cuts, tokens, rows) if rows else [] for each in (batch, on_host))
        if self.mesh.size("cp") > 1 or may_be_packed(batch):
            record_facts(own, given)
        lengths = None if cuts is None else tuple(end - start for start, end in itertools.pairwise(cuts))
        return BatchSplit(own, own or [stand_in(batch, tokens)] * max(count, least), lengths, rows)

    def _rows(self, batch: Mapping[str, Any]) -> int:
        """Return the number of samples of a batch; 1 if it does not tell and need not, because it stays whole."""
        rows = self.model.options.rows_of(batch)
        if self.model.units is None and not self._may_be_cut:
            return 1 if rows is None else rows
        if self.mesh.size("dp") > 1 and self.model.batches_seen <= FIRST_STEPS:
            agrees = is_known_to_all(rows is not None, self.mesh.group("dp"))
        else:
            agrees = rows is not None
        if not agrees:
            raise unknown_rows(batch)
        return rows

    @property
    def _may_be_cut(self) -> bool:
        return self.pipeline.microbatches_of(MANY, self.mesh.size("pp")) > 1

    def _in_units(
        self, batch: dict[str, Any], on_host: Mapping[str, Any], trains: bool, least: int, rows: int
    ) -> BatchSplit:
        """Split a batch into units of `reproducible=True`; placeholders follow while other replicas have more."""
        units = self.model.units
        count = units.begin(rows, self.model.step_number, self.model.replicas_wait(trains))
        tokens = self.model.options.media_tokens
        own = units.cut(batch, rows, tokens)
        check_parts(self.model.unwrap(), batch, len(own))
        if may_be_packed(batch):
            record_facts(own, units.cut(on_host, rows, tokens))
        return BatchSplit(own, own + [stand_in(batch, tokens, rows)] * (max(count, least) - len(own)), None, rows)

    def _packed_row(self, batch: Mapping[str, Any], rows: int) -> PackedRow | None:
        """Return the documents of a batch of one row that may be cut between them; None if there are none."""
        losses, stages = self.model.losses, self.mesh.size("pp")
        if rows != 1 or not self._may_be_cut:
            return None
        if losses.head_loss is None or not self.model.options.keeps_documents_apart:
            return None
        if losses.lacks_labels(batch):  # on one stage, the outputs may include attentions of the whole row
            return packed_row(batch, losses.head_loss, has_labels=False) if stages > 1 else None
        return packed_row(batch, losses.head_loss) if losses.own_reason(batch) is None else None

    def _refuse_short_start(self, units: int) -> None:
        """Refuse a first batch that cannot fill the pipeline; only the last batch of an epoch may be short.

        The replicas agree, because a rank that raised alone would leave the others waiting.
        """
        least = self.pipeline.least_batch_size
        fewest = torch.tensor(units)  # on the CPU: reading the result must not wait for the device
        if self.mesh.size("dp") > 1:
            dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=self.mesh.group("dp"))
        units = int(fewest)
        if units < least:
            raise ConfigurationError(
                f"the batch has {units} samples, fewer than num_microbatches={least}; "
                f"use batches of {least} or more, or num_microbatches={max(units, 1)}"
            )


def is_known_to_all(is_known: bool, group: dist.ProcessGroup) -> bool:
    """Return whether all replicas know something."""
    known = torch.tensor(is_known, dtype=torch.int32)  # on the CPU, as it is read at once
    dist.all_reduce(known, op=dist.ReduceOp.MIN, group=group)
    return bool(known)
