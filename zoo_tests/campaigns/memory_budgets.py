"""Plan random models on random layouts within random budgets, train them, and count whether a rank exceeds its budget.

    python -m zoo_tests.campaigns.memory_budgets --cases 200 --seed 1

A model has one profile for each way of sharding its layers, so that several cases share a model.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.planner.costs import Prediction, TooLarge
from plugins.hybrid_parallel.planner.device import Device, Link
from plugins.hybrid_parallel.planner.layout import Layout
from plugins.hybrid_parallel.planner.predict import Predictor
from plugins.hybrid_parallel.planner.profile import Profiler
from plugins.hybrid_parallel.planner.search import search
from plugins.hybrid_parallel.planner.space import Space
from plugins.hybrid_parallel.planner.stage_map import ModelMap
from plugins.hybrid_parallel.planner.synthetic_batch import batch_of
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


@dataclass(frozen=True)
class Budgeted:
    """A plan, and the bytes that it may use.

    Attributes:
        recipe: the model.
        length: tokens of a sample.
        plan: what was chosen.
        budget: bytes of a rank.
    """

    recipe: Recipe
    length: int
    plan: Prediction
    budget: float

    def __str__(self) -> str:
        recipe = self.recipe
        words = [recipe.family, *(f"{name}={value}" for name, value in recipe.config), *recipe.frozen, *recipe.adapters]
        return f"{' '.join(words)}, {self.length} tokens, {self.plan.layout}"


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
    generator = random.Random(seed)
    drawn = 0
    while drawn < count:
        recipe, length = _model(generator), generator.choice((24, 40, 64))
        predictor = Predictor(ModelMap(recipe.model), Profiler(recipe.model, length, _HERE, recipe.precision))
        for _ in range(min(_LAYOUTS_OF_A_MODEL, count - drawn)):
            found = _within_budget(generator, recipe, length, predictor)
            if found is not None:
                drawn += 1
                yield found


def _model(generator: random.Random) -> Recipe:
    family = generator.choice(list(_FAMILIES))
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


def _within_budget(generator: random.Random, recipe: Recipe, length: int, predictor: Predictor) -> Budgeted | None:
    """Draw a part of the layouts and a budget that some of them exceed; return what is planned within it."""
    world_size = generator.choice((1, 2, 2, 2, 4, _MOST_RANKS))
    space = Space(
        world_size,
        global_batch=world_size * generator.choice((1, 2, 4)),
        precision=recipe.precision,
        num_layers=predictor.model.num_layers,
        largest_tp=generator.choice((1, 2)),
        cp_sizes=generator.choice(((1,), (1, 2))) if predictor.model.shares_sequences else (1,),
        styles=generator.choice(((("1f1b", 1), ("gpipe", 1)), (("zero_bubble", 1), ("zbv", 2)))),
        rows=(generator.choice((1, 2)),),
        zero_stages=generator.choice(((0, 1), (2,), (3,), (0, 1, 2, 3))),
        node_size=generator.choice((None, 2)),
    )
    needs = sorted(filter(None, (_need(predictor, layout) for layout in space.layouts())))
    if not needs:
        return None
    budget = generator.uniform(needs[0], needs[min(len(needs) - 1, 1 + len(needs) // 3)])
    ranked = search(predictor.within(budget), space, count=1).ranked
    return Budgeted(recipe, length, generator.choice(ranked[:3]), budget)


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
    counted = run_on_ranks(layout.world_size, highest_of_rank, case.recipe, layout, case.length, timeout_s=180.0)
    return Outcome(case, max(counted))


def highest_of_rank(recipe: Recipe, layout: Layout, length: int) -> int:
    """Train on this rank; return the most bytes that it had at once."""
    plugin = HybridParallelPlugin(**layout.options(), seed=7)
    model = recipe.model()
    shape = batch_of(model, layout.rows * layout.num_microbatches, length)
    batch = {name: _values(model, name, value, plugin.dp_rank) for name, value in shape.items()}
    batch["labels"] = batch["input_ids"]
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
