"""Compiled layers as CUDA graphs, on the simulated device: what torch would record; nothing is replayed.

Its recorder is replaced by one that runs each graph, and looks at what a replay would rely on: weights that stay
where they are, and results that nothing reads any more when the next step writes over them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef

from plugins.hybrid_parallel.features import compilation
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.hybrid_parallel.features.test_compilation import Trained

RECOMPUTED = {"num_microbatches": 2, "gradient_checkpointing": "full", "precision": "bf16"}
# Case -> family, ranks, options, and how many graphs are recorded: one for each layer.
CASES: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "recomputed": ("llama", 1, RECOMPUTED, 2),
    "dropout": ("bert", 1, {"zero_stage": 0}, 2),
    "dp2": ("vit", 2, {"zero_stage": 2, "overlap_allgather": True}, 2),
    "kinds of layers": ("t5", 1, {"num_microbatches": 2}, 6),
}


class Recorder:
    """Stands in for `torch._inductor.cudagraph_trees.cudagraphify_impl`.

    Attributes:
        recorded: addresses of the weights of each recorded forward graph.
        overwritten: results that were in use when the next step began; they are nan since.
    """

    def __init__(self) -> None:
        self.recorded: set[tuple[int, ...]] = set()
        self.overwritten = 0
        self._results: set[StorageWeakRef] = set()

    def __call__(
        self, model: Callable[..., Any], inputs: list[Any], _: Any, *, is_backward: bool, **options: Any
    ) -> Callable[[list[Any]], Any]:
        fixed = () if is_backward else torch._guards.TracingContext.get().fw_metadata.static_input_indices

        def run(given: list[Any]) -> Any:
            if fixed:
                self.recorded.add(tuple(given[index].data_ptr() for index in fixed))
            before = {StorageWeakRef(each.untyped_storage()) for each in given if isinstance(each, Tensor)}
            results = model(given)
            made = {StorageWeakRef(each.untyped_storage()) for each in results if isinstance(each, Tensor)}
            self._results |= made - before
            return results

        return run

    def next_step(self) -> None:
        for each in self._results:
            storage = torch.UntypedStorage._new_with_weak_ptr(each.cdata)
            if storage is not None:
                self.overwritten += 1
                torch.empty(0, device=storage.device).set_(storage).fill_(torch.nan)
        self._results.clear()


def compare(family: str, options: dict[str, Any]) -> tuple[int, int, int]:
    """Train with and without; the number of recorded graphs, of overwritten results, and of graphs not recorded."""
    options = {"lengths": (12, 12, 12), **options}
    eager, recorder = Trained(family, **options), Recorder()
    with (
        torch._dynamo.config.patch(disable=False),
        mock.patch.object(compilation, "_BACKEND", "cudagraphs"),
        mock.patch.object(compilation, "has_compiler", return_value=True),
        mock.patch("torch._inductor.cudagraph_trees.cudagraphify_impl", recorder),
        mock.patch.object(torch.compiler, "cudagraph_mark_step_begin", recorder.next_step),
    ):
        graphs = Trained(family, compile_layers=True, cuda_graphs=True, **options)
    close = partial(torch.testing.assert_close, **({"rtol": 2e-2, "atol": 2e-3} if "precision" in options else {}))
    close(graphs.losses, eager.losses)
    close(graphs.weights, eager.weights)
    return len(recorder.recorded), recorder.overwritten, counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if number else ()) for number, name in enumerate(CASES)]
)
def test_weights_stay_at_their_addresses_and_results_end_with_the_step(name: str) -> None:
    family, world_size, options, recorded = CASES[name]
    for found in run_on_ranks(world_size, compare, family, options, device="simcuda"):
        assert found == (recorded, 0, 0)
