"""`python -m zoo_tests.campaigns.bits`: `reproducible=True` trains to the same bits under every layout.

    python -m zoo_tests.campaigns.bits [--steps 50] [--families bert,llama] [--precisions fp32,bf16] [--only TEXT]
        [--brief] [--no-cost] [--hidden-sizes 256,1024]

Prints, for each layout and family, whether the weights, the losses and the gradient norms equal those of the unsharded
run; the same for a negative control without the option; and, last, the time of a step with the option over that without
it, for a Llama of four layers on sequences of 128 tokens. No `--families` prints the times alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import prod

from zoo_tests.campaigns.bits.cost import seconds_of_steps
from zoo_tests.campaigns.bits.training import Bits
from zoo_tests.campaigns.bits.trials import FAMILIES, TRIALS, Trial, brief, recipe_of, reference_of
from zoo_tests.harness.ranks import RankError, run_on_ranks

_CONTROLS = (Trial("dp2"), Trial("dp4"))
_TIMED = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2))  # tensor-parallel ranks, stages, replicas
_WAYS = ((1, None), (1, 1), (4, None), (4, 1))  # samples of a unit, blocks of a sequence


def main() -> int:
    """Run the campaign; return 1 if a hash differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--only", default="", help="trials whose name contains this")
    parser.add_argument("--brief", action="store_true", help="one trial for each layout")
    parser.add_argument("--no-cost", action="store_true", help="leave out the times")
    parser.add_argument("--hidden-sizes", default="256", help="of the models that are timed")
    arguments = parser.parse_args()
    failures = 0
    trials = [each for each in (brief() if arguments.brief else TRIALS) if arguments.only in str(each)]
    for family in filter(None, arguments.families.split(",")):
        for precision in arguments.precisions.split(","):
            failures += _compare(family, precision, arguments.steps, trials)
    if not arguments.no_cost:
        for hidden_size in map(int, arguments.hidden_sizes.split(",")):
            _print_cost(hidden_size)
    print(f"{failures} runs differ" if failures else "every run has the bits of the unsharded one")
    return int(failures > 0)


def _compare(family: str, precision: str, steps: int, trials: Sequence[Trial]) -> int:
    """Print the table of one family; return the number of runs that differ."""
    recipe, references, failures = recipe_of(family, precision, steps), dict[Trial, Bits](), 0
    for trial in trials:
        reference = reference_of(trial, family)
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
    plain = Trial().run(recipe, is_on=False)
    for trial in _CONTROLS:
        differs = not trial.run(recipe, is_on=False).same(plain)
        print(f"{family} {precision} | {trial} without the option | {'differs' if differs else 'EQUAL'}", flush=True)
        failures += not differs
    return failures


def _print_cost(hidden_size: int) -> None:
    for sizes in _TIMED:
        for unit, sequence_blocks in _WAYS:
            arguments = (*sizes, unit, sequence_blocks, hidden_size)
            found = run_on_ranks(prod(sizes), seconds_of_steps, *arguments, timeout_s=600.0)
            plain, exact = (max(each) for each in zip(*found, strict=True))
            times = f"{plain:.3f} s without, {exact:.3f} s with the option: {exact / plain:.2f} times"
            blocks = "" if sequence_blocks is None else f" reproducible_sequence_blocks={sequence_blocks}"
            layout = "tp_size={} pp_size={} dp_size={} hidden_size={} unit={}".format(*sizes, hidden_size, unit)
            print(f"{layout}{blocks} | {times}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
