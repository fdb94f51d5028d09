"""Values that replicas exchange through `Accelerator`, and where each rank is.

What breaks here first: a replica whose share of a batch is empty. Look in `booster/integrations/replicas.py`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProfileKwargs
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, Metric, SumMetric
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import SequenceClassifierOutput

from booster.errors import ConfigurationError
from booster.integrations.accelerate import Accelerator
from booster.integrations.replicas import of_all_samples
from booster.integrations.trainer_accelerator import Samples, TrainerAccelerator
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.booster.integrations.accelerate_loop import bert, collate, fresh_accelerate, samples
from zoo_tests.harness.ranks import distributed, run_on_ranks


@contextmanager
def _accelerator(**layout: Any) -> Iterator[Accelerator]:
    with fresh_accelerate():
        yield Accelerator(plugin=HybridParallelPlugin(**layout))


@distributed(4)
def test_replicas_count_as_processes() -> None:
    with _accelerator(tp_size=2) as accelerator:
        rank = dist.get_rank()
        assert (accelerator.num_processes, accelerator.process_index) == (2, accelerator.booster.plugin.dp_rank)
        assert accelerator.is_main_process == accelerator.is_local_main_process == (rank == 0)
        assert accelerator.local_process_index == rank and accelerator.is_last_process == (rank == 3)
        assert accelerator.state.num_processes == 4 and accelerator.use_distributed
        out = io.StringIO()
        with redirect_stdout(out):
            accelerator.print("once")
            accelerator.on_main_process(print)("main")
        assert out.getvalue() == ("once\nmain\n" if rank == 0 else "")


@distributed(4)
def test_values_of_replicas_are_joined_once_each() -> None:
    with _accelerator(tp_size=2) as accelerator:
        mine = accelerator.process_index
        rows = torch.full((mine + 1, 2), float(mine))
        assert accelerator.gather(rows).tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
        assert accelerator.gather(torch.tensor(mine)).tolist() == [0, 1]
        assert accelerator.reduce(torch.tensor([mine + 1])).tolist() == [3]
        assert accelerator.reduce(torch.tensor([mine + 1.0]), "mean").tolist() == [1.5]
        assert accelerator.reduce([torch.tensor([mine, -mine])], "max")[0].tolist() == [1, 0]
        _check_metrics(mine)
        assert accelerator.reduce(torch.tensor(mine), "none") == mine
        with pytest.raises(ConfigurationError, match="reduction='min' is not one of sum, mean, max, none"):
            accelerator.reduce(torch.tensor(1), "min")
        outputs = SequenceClassifierOutput(loss=torch.tensor(1.0 + mine), logits=rows)
        gathered = accelerator.gather(outputs)
        assert isinstance(gathered, SequenceClassifierOutput) and gathered.loss.tolist() == [1.0, 2.0]
        assert outputs.loss == 1.0 + mine, "what was given is as it was"


class _Listed(Metric):
    """A metric that keeps what it is given, as those of boxes and of masks do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("values", [], dist_reduce_fx=None)

    def update(self, *values: Any) -> None:
        self.values += values

    def compute(self) -> list[Any]:
        return list(self.values)


def _check_metrics(mine: int) -> None:
    """Metrics of torchmetrics have each sample once, where replica 0 has one of them and replica 1 three or none."""
    rows = [torch.full((2, each), float(each)) for each in ((1,), (2, 3, 4))[mine]]
    total, joined, kept, masks = SumMetric(), CatMetric(), _Listed(), _Listed()
    total.update(len(rows)), kept.update(*rows), masks.update(*[(2, bytes([mine]))] * len(rows))
    if mine == 0:
        joined.update(torch.arange(300.0))
    for _ in range(2):  # the states are a replica's own again
        assert total.compute() == 4 and joined.compute().equal(torch.arange(300.0))
        assert [each.shape[1] for each in kept.compute()] == [1, 2, 3, 4]
        assert masks.compute() == [(2, b"\0"), *[(2, b"\1")] * 3]
        total.update(0), joined.update([]), kept.update(), masks.update()
    with of_all_samples():
        total.update(0)
        assert total.compute() == len(rows)
    everywhere = SumMetric(process_group=dist.group.WORLD)
    everywhere.update(1)
    assert everywhere.compute() == 4


def _generate(layout: dict[str, Any]) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    with _accelerator(**layout) as accelerator:
        torch.manual_seed(1)
        plain = T5ForConditionalGeneration(T5Config(vocab_size=50, **sizes)).eval()
        rows = [{"input_ids": torch.arange(1, 6) + index} for index in range(5)]
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "num_beams": 2}
        expected = plain.generate(torch.stack([row["input_ids"] for row in rows]), **options)
        model, batches = accelerator.prepare(plain, DataLoader(rows, batch_size=4 // accelerator.num_processes))
        whole = [] if layout else [accelerator.unwrap_model(model).generate]
        for generate in (model.generate, *whole):
            found = [accelerator.gather_for_metrics(generate(batch["input_ids"], **options)) for batch in batches]
            assert torch.equal(torch.cat(found), expected)
        with torch.no_grad():
            empty = model.generate(input_ids=rows[0]["input_ids"][None][:0], **options)
        assert empty.shape == (0, 4)


@pytest.mark.parametrize(("ranks", "layout"), [(2, {}), pytest.param(4, {"pp_size": 2}, marks=pytest.mark.slow)])
def test_a_replica_without_rows_generates_none(ranks: int, layout: dict[str, Any]) -> None:
    run_on_ranks(ranks, _generate, layout)


@distributed(2)
def test_rows_of_other_lengths_are_padded_or_refused() -> None:
    with _accelerator() as accelerator:
        mine = accelerator.process_index
        ragged = torch.full((1, 2 + mine), mine)
        padded = accelerator.pad_across_processes(ragged, dim=1, pad_index=-100)
        assert accelerator.gather(padded).tolist() == [[0, 0, -100], [1, 1, 1]]
        with pytest.raises(ConfigurationError, match=r"shapes \[\[1, 2\], \[1, 3\]\], which cannot be joined; pad"):
            accelerator.gather(ragged)
        empty = torch.zeros(0, 5) if mine else torch.ones(2, 3)
        assert accelerator.gather(empty).tolist() == [[1.0] * 3] * 2, "a replica without rows has no length of them"
        assert accelerator.gather(torch.zeros(0, 3)).shape == (0, 3)


@distributed(2)
def test_objects_of_replicas_are_joined() -> None:
    with fresh_accelerate():
        accelerator = TrainerAccelerator(plugin=HybridParallelPlugin())
        mine = accelerator.process_index
        assert accelerator.gather_for_metrics([f"text {mine}", {"a": [mine, None], 6: (mine, {7})}]) == [
            *("text 0", {"a": [0, None], 6: (0, {7})}),
            *("text 1", {"a": [1, None], 6: (1, {7})}),
        ]
        boxes = Samples.among(([{"boxes": torch.full((2 + mine, 4), mine)}] * (2 - mine), torch.ones(2)), 2 - mine)
        joined, _ = accelerator.gather_for_metrics(accelerator.pad_across_processes(boxes, dim=1))
        assert [tuple(each["boxes"].shape) for each in joined] == [(2, 4), (2, 4), (3, 4)]
        masks = [torch.full((3 + mine, 2), mine)] * (2 - mine)  # an item for each sample, as collators of segments make
        batch = accelerator.gather_for_metrics({"pixels": torch.ones(2 - mine, 4), "masks": masks})
        assert len(batch["pixels"]) == 3 and [len(each) for each in batch["masks"]] == [3, 3, 4]
        with pytest.raises(ConfigurationError, match=r"the list\[0\]\[0\] is a builtin_function_or_method"):
            accelerator.gather_for_metrics([(print, 2)])


def _outputs_under_a_pipeline() -> None:
    with _accelerator(pp_size=2, num_microbatches=2) as accelerator:
        model = accelerator.prepare(bert(torch.float64)).eval()
        batch = collate(samples(5))
        with torch.no_grad():
            outputs = model(**batch)
            found = accelerator.gather_for_metrics((outputs.logits.argmax(-1), batch["labels"]))
            both = accelerator.gather({"outputs": outputs})["outputs"]
        expected = bert(torch.float64).eval()(**batch).logits
        assert torch.equal(found[0], expected.argmax(-1)) and torch.equal(found[1], batch["labels"])
        torch.testing.assert_close(both["logits"], expected, rtol=1e-9, atol=1e-11)


def test_outputs_of_a_pipeline_are_gathered_on_all_of_its_ranks() -> None:
    run_on_ranks(2, _outputs_under_a_pipeline)


@distributed(4)
def test_inputs_are_split_between_replicas() -> None:
    with _accelerator(tp_size=2) as accelerator:
        mine = accelerator.process_index
        with accelerator.split_between_processes(["a", "b", "c"]) as part:
            assert part == [["a", "b"], ["c"]][mine]
        with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as part:
            assert part == [["a", "b"], ["c", "c"]][mine]
        with accelerator.split_between_processes({"x": torch.arange(5), "y": list("abcde")}) as part:
            assert part["x"].tolist() == [[0, 1, 2], [3, 4]][mine] and part["y"] == [list("abc"), list("de")][mine]


@distributed(4)
def test_a_trigger_of_any_rank_is_seen_by_all() -> None:
    with _accelerator(tp_size=2) as accelerator:
        assert accelerator.check_trigger() is False
        for rank in range(4):
            if dist.get_rank() == rank:
                accelerator.set_trigger()
            assert accelerator.check_trigger() is True
            assert accelerator.check_trigger() is False


def _in_turn(folder: str) -> None:
    with _accelerator(tp_size=2) as accelerator:
        mark = Path(folder) / "mark"
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                mark.write_text("main")
            assert mark.read_text() == "main", "the others come later"
        accelerator.wait_for_everyone()
        with accelerator.local_main_process_first():
            assert mark.exists()


def test_the_main_process_goes_first(tmp_path: Path) -> None:
    run_on_ranks(2, _in_turn, str(tmp_path))


def _profile(folder: str) -> None:
    with (
        _accelerator(tp_size=2) as accelerator,
        accelerator.profile(ProfileKwargs(output_trace_dir=folder)) as profiler,
    ):
        torch.ones(4).sum()
    assert profiler.key_averages()


def test_each_rank_writes_its_own_trace(tmp_path: Path) -> None:
    run_on_ranks(2, _profile, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"profile_0.json", "profile_1.json"}


@distributed(2)
def test_autocast_keeps_the_precision_of_the_plugin() -> None:
    with _accelerator(precision="bf16") as accelerator:
        assert accelerator.mixed_precision == "bf16"
        model = accelerator.prepare(bert())
        with accelerator.autocast():
            assert not torch.is_autocast_enabled("cpu")
            assert model(**collate(samples(2))).logits.dtype == torch.bfloat16
