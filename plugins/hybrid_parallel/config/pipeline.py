"""Options of the pipeline: its schedule, its stages, and the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plugins.hybrid_parallel.config.option_group import COUNT, OptionGroup, Rule, is_integer, one_of, option, positive
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Schedule

_SPLIT = "is no list of positive integers; use one number for each stage, as in [3, 5]"


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(OptionGroup):
    """How a batch is split into micro-batches, and how they go through the stages.

    Attributes:
        num_microbatches: number of parts that a batch is split into; None for one per pipeline stage.
        microbatch_size: number of samples in a micro-batch, instead of their number.
        pp_style: pipeline schedule: "1f1b", "gpipe", "interleaved", "zero_bubble", "zbv" or "dualpipev".
        num_model_chunks: stages per rank, for interleaved schedules; None for the smallest number that interleaves
            (two).
        layers_per_stage: explicit split of the layers, one number per stage.
        contrastive: which samples a contrastive loss, as CLIP's, compares: those of the "global" batch, or those of
            each "replica" alone, as DistributedDataParallel does.
    """

    num_microbatches: int | None = option(None, positive(4))
    microbatch_size: int | None = option(None, positive(4))
    pp_style: str = option("1f1b", one_of(*SCHEDULES))
    num_model_chunks: int | None = option(None, COUNT)
    layers_per_stage: Sequence[int] | None = option(
        None,
        Rule(
            (
                (lambda value: isinstance(value, Sequence) and all(map(is_integer, value)), _SPLIT),
                (lambda value: all(number >= 1 for number in value), _SPLIT),
            ),
            [3, 5],
        ),
    )

    contrastive: str = option("global", one_of("global", "replica"))

    def microbatches_of(self, num_rows: int, pp_size: int) -> int:
        """Return the number of micro-batches that a batch of `num_rows` samples is split into."""
        if self.microbatch_size is not None:
            return -(-num_rows // self.microbatch_size)
        return min(self.num_microbatches or pp_size, num_rows)

    def schedule_of(self, pp_size: int) -> Schedule:
        """Return the pipeline schedule; "1f1b" if there is a single stage."""
        return SCHEDULES[self.pp_style if pp_size > 1 else "1f1b"]

    def chunks_per_rank(self, pp_size: int) -> int:
        """Return the number of stages per rank."""
        return self.schedule_of(pp_size).chunks or self.num_model_chunks or 2

    @property
    def least_batch_size(self) -> int:
        """The smallest batch size that fills the requested micro-batches."""
        return self.num_microbatches or 1

    def conflicts(self) -> list[str]:
        """Return one sentence for each broken rule between these options."""
        problems = self._check_chunks()
        if self.num_microbatches is not None and self.microbatch_size is not None:
            problems.append("num_microbatches and microbatch_size are both given; use one of them")
        return problems

    def _check_chunks(self) -> list[str]:
        schedule, chunks = SCHEDULES.get(self.pp_style), self.num_model_chunks
        if schedule is None or chunks is None or chunks < 1:
            return []
        if schedule.chunks not in (None, chunks):
            chosen = " or ".join(repr(name) for name, each in SCHEDULES.items() if each.chunks is None)
            return [
                f"num_model_chunks={chunks} does not fit pp_style={self.pp_style!r}, which has {schedule.chunks} a "
                f"rank; leave it out, or use pp_style={chosen}"
            ]
        if schedule.chunks is None and chunks < schedule.least_chunks:
            least = schedule.least_chunks
            return [f"pp_style={self.pp_style!r} needs {least} model chunks or more; use num_model_chunks={least}"]
        return []
