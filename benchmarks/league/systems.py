"""The systems of the league, and the environment of each."""

from __future__ import annotations

from benchmarks.league.automodel import Automodel
from benchmarks.league.controls import Faulty, Ours, Plain
from benchmarks.league.pipelines import TorchPipelining
from benchmarks.league.system import System
from benchmarks.league.tensor_parallel import Accelerate, AutoTP, TorchPlan, TransformersPlan

SYSTEMS: dict[str, System] = {
    "plain transformers": Plain(),
    "ours with a fault": Faulty(),
    "ours": Ours(),
    "transformers tp_plan": TransformersPlan(),
    "accelerate": Accelerate(),
    "torch parallelize_module": TorchPlan(),
    "torch pipelining": TorchPipelining(num_microbatches=2),
    "torch pipelining (1 micro-batch)": TorchPipelining(num_microbatches=1),
    "DeepSpeed AutoTP": AutoTP(),
    "NeMo Automodel": Automodel(),
}
