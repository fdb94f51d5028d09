"""`python -m zoo_tests.campaigns.census.plain`: train every head class plainly only, and count how many do.

    python -m zoo_tests.campaigns.census.plain [--only PATTERN]

It starts no ranks: what fails here is the tiny configuration, the inputs or the labels that the census makes.
"""

from __future__ import annotations

import argparse
import re
import sys

from zoo_tests.campaigns.census.classes import head_classes
from zoo_tests.campaigns.census.trained import plain_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on Family/Class")
    arguments = parser.parse_args()
    chosen = [head for head in head_classes() if re.search(arguments.only, f"{head.family}/{head.name}")]
    trained = 0
    for number, head in enumerate(chosen, start=1):
        outcome = plain_run(head)
        trained += not isinstance(outcome, str)
        if isinstance(outcome, str):
            reason = f"plain: {outcome}"
        else:
            reason = f"trains with a criterion: {outcome.criterion}" if outcome.criterion else "trains"
        sys.stdout.write(f"{number}/{len(chosen)} {head.family}/{head.name}: {reason}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{trained} of {len(chosen)} head classes train plainly\n")


if __name__ == "__main__":
    main()
