"""`python -m zoo_tests.campaigns.fuzz`: play random training scripts, and compare them with plain ones.

    python -m zoo_tests.campaigns.fuzz --minutes 30 --seed 0
    python -m zoo_tests.campaigns.fuzz --cases 100 --seed 1 2 3 4 5 --output docs/results/fuzz.md
    python -m zoo_tests.campaigns.fuzz --case '{"family": "llama", ...}'
    python -m zoo_tests.campaigns.fuzz --mutant "mean of means"

Exit code 1 when a case failed; with `--mutant` when none did.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zoo_tests.campaigns.fuzz.campaign import page, run_seed
from zoo_tests.campaigns.fuzz.case import Case
from zoo_tests.campaigns.fuzz.space import draw
from zoo_tests.campaigns.fuzz.trial import Trials
from zoo_tests.campaigns.mutations.mutants import MUTANTS
from zoo_tests.harness.ranks import stop_pools, use_mutant

_ENDLESS = 10**6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign that is asked for; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="of the cases; several share the time")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to go on")
    parser.add_argument("--cases", type=int, default=_ENDLESS, help="how many cases a seed, at most")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", help="play this one case, as it was printed")
    parser.add_argument("--no-shrink", action="store_true", help="leave failures as they are")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break the library, and stop at the first failure")
    parser.add_argument("--output", type=Path, help="Markdown page to write")
    options = parser.parse_args(arguments)
    _quiet()
    trials = Trials()
    try:
        if options.case is not None:
            return _one(Case.from_json(options.case), trials)
        if options.mutant is not None:
            return _hunt(options, trials)
        return _campaign(options, trials)
    finally:
        trials.close()
        stop_pools()


def _campaign(options: argparse.Namespace, trials: Trials) -> int:
    minutes, by_seed = options.minutes / len(options.seed), {}
    for seed in options.seed:
        found = run_seed(seed, options.first, options.cases, minutes, trials, _say, not options.no_shrink)
        by_seed[seed] = found
    text = page(by_seed)
    _say(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    return 1 if any(found.failures for found in by_seed.values()) else 0


def _one(case: Case, trials: Trials) -> int:
    outcome = trials.run(case)
    _say(f"{outcome.kind} ({outcome.seconds:.1f} s)\n{outcome.text}")
    return 1 if outcome.is_failure else 0


def _hunt(options: argparse.Namespace, trials: Trials) -> int:
    """Play cases until the fault of a mutant shows."""
    use_mutant(options.mutant)
    for index in range(options.first, options.first + min(options.cases, 200)):
        outcome = trials.run(draw(options.seed[0], index))
        if outcome.is_failure:
            _say(f"'{options.mutant}' was found by case {index - options.first + 1}: {outcome.text.strip()[:300]}")
            return 0
    _say(f"'{options.mutant}' was not found")
    return 1


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
