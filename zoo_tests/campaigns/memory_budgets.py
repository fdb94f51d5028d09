"""Plan random models on random layouts within random budgets, train them, and count whether a rank exceeds its budget.

    python -m zoo_tests.campaigns.memory_budgets --cases 200 --seed 1

A model has one profile for each way of sharding its layers, so that several cases share a model. Some models have a
quantised base, some are trained on packed rows, and some budgets are too small for any layout without offload.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.planner.costs import Prediction, TooLarge
from plugins.hybrid_parallel.planner.device import Device, Link
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.plan import Space, search
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler
from plugins.hybrid_parallel.planner.proxy_model import Packing, QuantisedBase, batch_of, name_in_skeleton
from plugins.hybrid_parallel.planner.stage_map import ModelMap
from zoo_tests.harness.case import Recipe
from zoo_tests.harness.counted_memory import highest_bytes
from zoo_tests.harness.ranks import run_on_ranks

_LAYOUTS_OF_A_MODEL = 8
_MOST_RANKS = 4
_HERE = Device(
    name="this-machine",
    memory=2.0**40,
    flops=dict.fromkeys(("fp32", "bf16", "fp16"), 5e10),
    matmul_efficiency=1.0,
    bandwidth=1e10,
    inside=Link(1e-4, 2e9),
    between=Link(1e-4, 2e9),
    operator=0.0,
    overlap=0.0,
)
# family -> head, modules that get adapters, and settings that change which parameters it has
_FAMILIES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "llama": ("causal_lm", ("q_proj", "down_proj"), "tie_word_embeddings"),
    "gpt2": ("lm_head", ("c_attn",), "tie_word_embeddings"),
    "bert": ("masked_lm", ("query", "value"), "tie_word_embeddings"),
}
_KINDS = ("plain", "packed", "plain", "quantised")
_PACKED = ("llama", "gpt2")  # whose attention keeps documents apart
# kind of the planner -> options of `BitsAndBytesConfig`
_QUANTISED: dict[str, tuple[tuple[str, Any], ...]] = {
    "nf4": (("load_in_4bit", True), ("bnb_4bit_quant_type", "nf4")),
    "int8": (("load_in_8bit", True),),
}
_WHOLE_BLOCKS = (("hidden_size", 64), ("intermediate_size", 192))  # also on two tensor-parallel ranks
_DIRECTORY = Path(tempfile.gettempdir()) / "booster-memory-budgets"


@dataclass(frozen=True)
class Planned:
    """What is to be trained.

    Attributes:
        recipe: the model.
        length: tokens of a row.
        document: tokens of each document of a packed row; None for one document in each row.
    """

    recipe: Recipe
    length: int
    document: int | None = None

    def __str__(self) -> str:
        recipe = self.recipe
        words = [recipe.family, *(f"{name}={value}" for name, value in recipe.config), *recipe.frozen, *recipe.adapters]
        words += [f"{name}={value}" for name, value in recipe.quantisation]
        words.append(f"{self.length} tokens" + ("" if self.document is None else f" in documents of {self.document}"))
        return " ".join(words)

    @property
    def quantised(self) -> QuantisedBase | None:
        """How the base is stored."""
        kind = next((kind for kind, options in _QUANTISED.items() if options == self.recipe.quantisation), None)
        return None if kind is None else QuantisedBase(kind)

    def predictor(self) -> Predictor:
        """Predictor of memory and time; the planner gets the model without values, and so before it is quantised."""
        recipe = replace(self.recipe, quantisation=())
        model, base = ModelMap(recipe.model), self.quantised
        names = () if base is None else base.names(model.model)
        packing = None if self.document is None else Packing(self.document, self.length, is_varlen=False)
        names = frozenset(name_in_skeleton(name, model.lists) for name in names)
        profiler = Profiler(
            recipe.model, self.length, _HERE, recipe.precision, quantised=base, quantised_names=names, packing=packing
        )
        return Predictor(model, profiler)


@dataclass(frozen=True)
class Budgeted:
    """A plan, and the bytes that it may use.

    Attributes:
        job: the model and its rows.
        plan: what was chosen.
        budget: bytes of a rank.
    """

    job: Planned
    plan: Prediction
    budget: float

    def __str__(self) -> str:
        return f"{self.job}, {self.plan.layout}"


@dataclass(frozen=True)
class Outcome:
    """A plan that was trained.

    Attributes:
        case: the plan.
        counted: the most bytes that a rank had at once.
    """

    case: Budgeted
    counted: int

    @property
    def is_over(self) -> bool:
        """Whether a rank had more than the plan needs, which is at most the budget."""
        return self.counted > self.case.plan.memory.needed


def cases(count: int, seed: int) -> Iterator[Budgeted]:
    """Draw plans within budgets; the same for a seed."""
    generator, kinds = random.Random(seed), itertools.cycle(_KINDS)
    drawn = 0
    while drawn < count:
        job = _job(generator, next(kinds))
        predictor = job.predictor()
        for _ in range(min(_LAYOUTS_OF_A_MODEL, count - drawn)):
            found = _within_budget(generator, job, predictor)
            if found is not None:
                drawn += 1
                yield found


def _job(generator: random.Random, kind: str) -> Planned:
    quantises = kind == "quantised" and find_spec("bitsandbytes") is not None
    recipe = _quantised_model(generator) if quantises else _model(generator, _PACKED if kind == "packed" else _FAMILIES)
    length = generator.choice((24, 40, 64))
    return Planned(recipe, length, generator.choice((5, 12)) if kind == "packed" else None)


def _quantised_model(generator: random.Random) -> Recipe:
    head, targets, _ = _FAMILIES["llama"]
    return Recipe(
        family="llama",
        head=head,
        optimizer="adamw",
        precision="fp32",  # of the products with dequantised weights
        config=(*_WHOLE_BLOCKS, ("vocab_size", generator.choice((500, 3000)))),
        adapters=targets,
        quantisation=_QUANTISED[generator.choice(list(_QUANTISED))],
    )


def _model(generator: random.Random, families: Iterable[str]) -> Recipe:
    family = generator.choice(list(families))
    head, targets, tie = _FAMILIES[family]
    config: dict[str, Any] = {tie: generator.random() < 0.5, "vocab_size": generator.choice((500, 1021, 3000))}
    trained = generator.choice(("all", "all", "adapters", "frozen"))
    return Recipe(
        family=family,
        head=head,
        optimizer="adamw",
        precision=generator.choice(("fp32", "fp32", "bf16", "fp16")),
        config=tuple(config.items()),
        adapters=targets if trained == "adapters" else (),
        frozen=_first_parameters(family) if trained == "frozen" else (),
    )


def _first_parameters(family: str) -> tuple[str, ...]:
    return {
        "llama": ("model.layers.0", "model.layers.1"),
        "gpt2": ("transformer.h.0", "transformer.wpe"),
        "bert": ("bert.embeddings.position", "bert.encoder.layer.0"),
    }[family]


def _within_budget(generator: random.Random, job: Planned, predictor: Predictor) -> Budgeted | None:
    """Draw a part of the layouts and a budget that some of them exceed; return what is planned within it."""
    offloads = generator.random() < 0.25
    world_size = generator.choice((1, 2, 2, 2, 4, _MOST_RANKS))
    space = Space(
        world_size,
        global_batch=world_size * generator.choice((1, 2, 4)),
        precision=job.recipe.precision,
        num_layers=predictor.model.num_layers,
        largest_tp=generator.choice((1, 2)),
        cp_sizes=generator.choice(((1,), (1, 2))) if predictor.model.shares_sequences else (1,),
        styles=generator.choice(((("1f1b", 1), ("gpipe", 1)), (("zero_bubble", 1), ("zbv", 2)))),
        rows=(generator.choice((1, 2)),),
        zero_stages=generator.choice(((0, 1), (2,), (3,), (0, 1, 2, 3))),
        node_size=generator.choice((None, 2)),
        place=str(_DIRECTORY) if offloads else None,
    )
    needs = _needs(predictor, space.layouts())
    if not needs:
        return None
    if offloads:  # less than any layout without offload needs
        least = _needs(predictor, space.offloaded())
        budget = generator.uniform(min(least, default=needs[0]), needs[0])
    else:
        budget = generator.uniform(needs[0], needs[min(len(needs) - 1, 1 + len(needs) // 3)])
    ranked = search(predictor.within(budget), space, count=1).ranked
    return Budgeted(job, generator.choice(ranked[:3]), budget) if ranked else None


def _needs(predictor: Predictor, layouts: Iterable[Layout]) -> list[float]:
    return sorted(filter(None, (_need(predictor, layout) for layout in layouts)))


def _need(predictor: Predictor, layout: Layout) -> float | None:
    try:
        return predictor.predict(layout, exact=False).memory.needed
    except TooLarge:
        raise
    except ConfigurationError:
        return None


def train(case: Budgeted) -> Outcome:
    """Train a plan for two steps, and count its bytes on every rank."""
    layout = case.plan.layout
    counted = run_on_ranks(layout.world_size, highest_of_rank, case.job, layout, timeout_s=180.0)
    return Outcome(case, max(counted))


def highest_of_rank(job: Planned, layout: Layout) -> int:
    """Train on this rank; return the most bytes that it had at once."""
    plugin = HybridParallelPlugin(**layout.options(), seed=7)
    model = job.recipe.model()
    shape = batch_of(model, layout.rows * layout.num_microbatches, job.length)
    batch = {name: _values(model, name, value, plugin.dp_rank) for name, value in shape.items()}
    batch["labels"] = batch["input_ids"]
    if job.document is not None:
        batch["position_ids"] = (torch.arange(job.length) % job.document).expand_as(batch["input_ids"])
        batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, -100)
    booster = Booster(plugin=plugin)
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def step() -> None:
        booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return highest_bytes(model, [step, step])


def _values(model: nn.Module, name: str, like: Tensor, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(17 + replica)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(1, vocabulary, like.shape, generator=generator) if name == "input_ids" else like


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; return 1 if a budget was exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    over, tightness = 0, []
    for number, case in enumerate(cases(options.cases, options.seed), 1):
        outcome = train(case)
        tightness.append(outcome.counted / case.plan.memory.needed)
        over += outcome.is_over
        mark = "OVER" if outcome.is_over else "fits"
        sys.stdout.write(
            f"{number} {mark}: {outcome.counted:,} of {case.budget:,.0f} bytes, {tightness[-1]:.2f} of those planned: "
            f"{case}\n"
        )
        sys.stdout.flush()
    tightness.sort()
    sys.stdout.write(
        f"{len(tightness)} cases, {over} over budget; counted over planned bytes: median "
        f"{tightness[len(tightness) // 2]:.2f}, highest {tightness[-1]:.2f}\n"
    )
    return int(over > 0)


if __name__ == "__main__":
    from zoo_tests.campaigns import memory_budgets  # ranks find the functions under this name

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(memory_budgets.main())
