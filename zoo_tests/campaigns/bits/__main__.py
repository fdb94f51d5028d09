"""`python -m zoo_tests.campaigns.bits`: `reproducible=True` trains to the same bits under every layout.

    python -m zoo_tests.campaigns.bits [--steps 50] [--families bert,llama] [--precisions fp32,bf16] [--only TEXT]

Prints, for each layout and family, whether the weights, the losses and the gradient norms equal those of the unsharded
run; the same for a negative control without the option; and the time of a step with the option over that without it.
"""

from __future__ import annotations

import argparse
import sys

from zoo_tests.campaigns.bits.training import Bits
from zoo_tests.campaigns.bits.trials import FAMILIES, TRIALS, Trial, recipe_of, reference_of
from zoo_tests.harness.ranks import RankError

_CONTROLS = (Trial("dp2"), Trial("dp4"))
_TIMED = (Trial("single"), Trial("pp2"), Trial("dp2"), Trial("pp2dp2"))


def main() -> int:
    """Run the campaign; return 1 if a hash differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--only", default="", help="trials whose name contains this")
    arguments = parser.parse_args()
    failures = 0
    for family in arguments.families.split(","):
        for precision in arguments.precisions.split(","):
            failures += _compare(family, precision, arguments.steps, arguments.only)
    print(f"{failures} runs differ" if failures else "every run has the bits of the unsharded one")
    return int(failures > 0)


def _compare(family: str, precision: str, steps: int, only: str) -> int:
    """Print the table of one family; return the number of runs that differ."""
    recipe, references, failures = recipe_of(family, precision, steps), dict[Trial, Bits](), 0
    for trial in (each for each in TRIALS if only in str(each)):
        reference = reference_of(trial)
        if reference not in references:
            references[reference] = reference.run(recipe)
            print(f"{family} {precision} | {reference} | {references[reference].weights}", flush=True)
        try:
            bits = trial.run(recipe)
        except RankError as error:
            failures += 1
            print(f"{family} {precision} | {trial} | FAILED: {str(error).strip().splitlines()[-1]}", flush=True)
            continue
        same = bits.same(references[reference], with_losses=trial.accumulation is None)
        failures += not same
        print(f"{family} {precision} | {trial} | {bits.weights} | {'equal' if same else 'DIFFERS'}", flush=True)
    plain = {trial: trial.run(recipe, is_on=False) for trial in (*_CONTROLS, *_TIMED)}
    for trial in _CONTROLS:
        differs = not plain[trial].same(plain[Trial("single")])
        print(f"{family} {precision} | {trial} without the option | {'differs' if differs else 'EQUAL'}", flush=True)
        failures += not differs
    for trial in _TIMED:
        ratio = trial.run(recipe).seconds / plain[trial].seconds
        print(f"{family} {precision} | {trial} | time of a step: {ratio:.2f} times", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
