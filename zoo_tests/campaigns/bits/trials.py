"""The recipes and the layouts of the campaign, and one training on the ranks of a layout."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo_tests.campaigns.bits.training import Bits, train_to_bits
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks

# Family -> its head, and options of its configuration: dropout everywhere, tied weights where there are any, and
# numbers of features that 4 divides but 8 does not.
FAMILIES: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "bert": (
        "masked_lm",
        (("hidden_dropout_prob", 0.1), ("attention_probs_dropout_prob", 0.1), ("intermediate_size", 92)),
    ),
    "llama": ("causal_lm", (("attention_dropout", 0.1), ("tie_word_embeddings", True), ("intermediate_size", 84))),
    "gpt2": ("lm_head", (("resid_pdrop", 0.1), ("embd_pdrop", 0.1), ("attn_pdrop", 0.1), ("n_inner", 92))),
    "t5": ("generation", (("dropout_rate", 0.1), ("d_ff", 84))),
    "mixtral": ("causal_lm", (("attention_dropout", 0.1),)),
}
ON = ("reproducible", True)
WHOLE = (("reproducible_sequence_blocks", 1),)  # another tree of sums than the default
CUT = (("enable_sequence_parallelism", True),)
# Whose losses do not read `num_items_in_batch`: the sum over parts of a batch is not that over the whole.
_DIVIDE_EACH_PART = ("bert", "t5")


@dataclass(frozen=True)
class Trial:
    """One way to run a recipe.

    Attributes:
        layout: name in `LAYOUTS`.
        zero_stage: 0 to 3.
        options: further options of the plugin.
        accumulation: parts of a batch that are passed one after the other; None for whole batches.
        resumed_from: the layout of the first half of the steps.
        ordinary_loop: `model(**batch)` and `booster.backward`.
    """

    layout: str = "single"
    zero_stage: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    accumulation: int | None = None
    resumed_from: str | None = None
    ordinary_loop: bool = False

    def __str__(self) -> str:
        parts = [self.layout, *([f"zero {self.zero_stage}"] if self.zero_stage != 1 else [])]
        parts += [f"{name}={value}" for name, value in self.options]
        parts += ["ordinary loop"] if self.ordinary_loop else []
        parts += [f"accumulation {self.accumulation}"] if self.accumulation is not None else []
        return ", ".join([*parts, *([f"first half as {self.resumed_from}"] if self.resumed_from else [])])

    def case(self, recipe: Recipe, is_on: bool = True) -> Case:
        """The recipe on this layout."""
        options = self.options + ((ON,) if is_on else ())
        return Case(
            recipe=recipe,
            layout=self.layout,
            zero_stage=self.zero_stage,
            options=options,
            ordinary_loop=self.ordinary_loop,
        )

    def run(self, recipe: Recipe, is_on: bool = True) -> Bits:
        """Train, and return the bits of the first rank."""
        case = self.case(recipe, is_on)
        before = None if self.resumed_from is None else Trial(self.resumed_from).case(recipe, is_on)
        with tempfile.TemporaryDirectory() as directory:
            arguments = (case, Path(directory), self.accumulation, before)
            return run_on_ranks(case.sizes.world_size, train_to_bits, *arguments, timeout_s=900.0)[0]


TRIALS = (
    Trial("single", options=(("num_microbatches", 4),)),
    Trial("single", ordinary_loop=True),
    Trial("single", options=(("gradient_checkpointing", "full"),)),
    Trial("pp2"),
    Trial("pp2", options=(("pp_style", "gpipe"),)),
    Trial("pp2", options=(("pp_style", "zero_bubble"),)),
    Trial("pp2", options=(("pp_style", "zbv"),)),
    Trial("pp2", options=(("pp_style", "interleaved"),)),
    Trial("pp2", ordinary_loop=True),
    Trial("pp4"),
    *(Trial("dp2", stage) for stage in (0, 1, 2, 3)),
    Trial("dp2", 2, ordinary_loop=True),
    Trial("dp4"),
    Trial("dp4", options=(("zero_size", 2),)),
    Trial("pp2dp2"),
    Trial("pp2dp2", 3),
    Trial("dp2", resumed_from="pp2"),
    Trial("tp2"),
    Trial("tp2", 3, ordinary_loop=True),
    Trial("tp2", options=(("gradient_checkpointing", "full"),), resumed_from="pp2"),
    Trial("tp2", 2, accumulation=2),
    Trial("tp4"),
    Trial("tp2pp2"),
    Trial("tp2pp2", options=(("pp_style", "zbv"),), resumed_from="tp4"),
    Trial("tp2dp2"),
    Trial("tp2dp2", 2),
    Trial("cp2"),
    Trial("cp2", 3, options=(("sequence_parallelism_mode", "all_to_all"),), ordinary_loop=True),
    Trial("cp2pp2", resumed_from="dp4"),
    Trial("cp2tp2"),
    Trial("cp2tp2", 2, accumulation=2),
    Trial("tp2", options=WHOLE),
    Trial("tp2", options=CUT),
    Trial("tp2", 2, options=CUT, accumulation=2),
    Trial("tp4", options=CUT),
    Trial("tp2pp2", options=CUT),
    Trial("dp2", options=WHOLE),
    Trial("tp2dp2", 3, options=CUT, ordinary_loop=True),
    *(Trial("single", accumulation=parts) for parts in (2, 4)),
    Trial("single", accumulation=2, ordinary_loop=True),
    Trial("dp2", accumulation=2),
    Trial("dp2", 2, accumulation=2, ordinary_loop=True),
)


def brief() -> list[Trial]:
    """Return the first trial of each layout, with and without sequence parallelism."""
    first: dict[tuple[str, bool], Trial] = {}
    for trial in TRIALS:
        if trial.accumulation is None and WHOLE[0] not in trial.options:
            first.setdefault((trial.layout, CUT[0] in trial.options), trial)
    return list(first.values())


def recipe_of(family: str, precision: str, steps: int, rows: int = 9) -> Recipe:
    """The recipe of a family: AdamW with clipping, dropout on."""
    head, config = FAMILIES[family]
    return Recipe(
        family=family,
        head=head,
        optimizer="adamw",
        precision=precision,
        max_norm=0.5,
        steps=steps,
        rows=rows,
        config=config,
    )


def reference_of(trial: Trial, family: str) -> Trial:
    """The unsharded run that a trial must equal."""
    options = tuple(each for each in trial.options if each in WHOLE)
    if trial.accumulation is None or family in _DIVIDE_EACH_PART:
        return Trial("single", options=options, accumulation=trial.accumulation)
    return Trial("single", options=options, accumulation=1)
