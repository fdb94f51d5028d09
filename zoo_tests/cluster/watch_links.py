"""What `MachineLinks` reports on a machine: `watch_links.py FILE RANK LIMIT`, with a file as the store of two ranks."""

from __future__ import annotations

import sys
import time
from functools import partial

import torch.distributed as dist

from booster.failure.machine_links import MachineLinks


def main() -> None:
    store, rank, limit_s = dist.FileStore(sys.argv[1], 2), int(sys.argv[2]), float(sys.argv[3])
    say = partial(print, flush=True)
    links = MachineLinks(rank, ["node1", "node2"], "10.77.0.1", limit_s, lambda failure: say(failure.line()))
    while True:
        links.look(store)
        links.watch()
        if links._links:
            say("connected")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
