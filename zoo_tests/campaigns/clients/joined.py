"""Runs a script plainly, in one process whose batches are those of several.

    python -m zoo_tests.campaigns.clients.joined NUMBER SCRIPT [ARGUMENTS...]

A loader that the script makes gives so many times the samples that it asks for. So replicas are compared with a script
whose batch no argument sets: accelerate's own processes have another order of samples, for which they draw a seed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader


def main() -> None:
    number, script, sys.argv = int(sys.argv[1]), sys.argv[2], sys.argv[2:]
    sys.path.insert(0, str(Path(script).parent))
    make = DataLoader.__init__

    def __init__(loader: DataLoader, *args: Any, **options: Any) -> None:  # noqa: N807
        is_of_script = sys._getframe(1).f_globals["__name__"] == "__main__"
        if is_of_script and options.get("batch_size") is not None:
            options["batch_size"] *= number
        make(loader, *args, **options)

    DataLoader.__init__ = __init__
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
