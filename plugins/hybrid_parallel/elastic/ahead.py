"""Plans made ahead: the best layout for every number of ranks that an elastic job may have left.

A process with low priority runs the planner while the job trains, so that a restart only looks its layout up. A machine
has one at a time: it outlives the round that started it, whose plans later rounds and layouts find, and ends with the
job.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from booster.elastic.place import ElasticPlace
from plugins.hybrid_parallel.config.options import HybridParallelConfig

_LOCK = "plan-lock"
_MOST_COUNTS = 32  # numbers of ranks that are planned for, the largest first
_USUAL_LENGTH = 512  # tokens of a sample, if the loader has shown none
_LOW_PRIORITY = ("nice", "-n", "19")


class PlansAhead:
    """Layouts for other numbers of ranks.

    Args:
        place: place of this rank in its elastic job; None if no plans are needed.
        config: options of the plugin as the script gives them, which are for the largest number of ranks.
        known: plans that an earlier round has made: number of ranks -> description.
    """

    def __init__(
        self,
        place: ElasticPlace | None = None,
        config: HybridParallelConfig | None = None,
        known: dict[str, Any] | None = None,
    ) -> None:
        self._place, self._config, self._known = place, config, known or {}
        self._process: subprocess.Popen | None = None
        self._result: Path | None = None  # where the plans will be
        self._is_asked = False

    def known(self) -> dict[str, Any]:
        """Return the plans that are known by now, on rank 0."""
        if self._process is not None:
            self._process.poll()
        if self._result is not None and self._result.exists() and not self._known:
            self._known = json.loads(self._result.read_text())
        return self._known

    def begin(self, model: Any, loader: Any) -> None:
        """Start to plan on rank 0; without plans, a restart reduces the sizes of the layout.

        Args:
            model: the boosted model; nothing is planned if it cannot be built from its configuration.
            loader: the boosted loader, which knows the global batch.
        """
        if self._place is None or self._is_asked or self._known or dist.get_rank() != 0:
            return
        self._is_asked = True
        if self._config.parallel.elastic_layouts is not None or model is None or loader is None:
            return
        request = _request(self._place, self._config, model.unwrap(), loader)
        if request is None:
            return
        path = _request_path(self._place, request)
        self._result = _result_of(path)
        with path.with_name(_LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # the planner of an earlier round still runs
            if not self._result.exists():
                path.write_text(json.dumps(request))
                self._process = _start_planner(path, lock.fileno())


def _request_path(place: ElasticPlace, request: dict[str, Any]) -> Path:
    lasting = {name: value for name, value in request.items() if name != "length"}  # the longest sample so far
    digest = hashlib.sha256(json.dumps(lasting).encode()).hexdigest()
    return Path(place.memory) / f"plan-{digest[:12]}.json"


def _result_of(request: Path) -> Path:
    return request.with_suffix(".plans")


def _start_planner(request: Path, lock: int) -> subprocess.Popen:
    """Start the planner, which holds the lock until it ends."""
    command = (sys.executable, "-m", "plugins.hybrid_parallel.elastic.planning", request, _result_of(request))
    nothing = subprocess.DEVNULL
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*_LOW_PRIORITY, *map(str, command)],
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        env=environment,
        pass_fds=(lock,),
    )


def _request(place: ElasticPlace, config: HybridParallelConfig, model: Any, loader: Any) -> dict[str, Any] | None:
    """Describe what is to be planned, as JSON; None for nothing, or a model that no configuration describes."""
    name = type(model).__name__
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(getattr(transformers, name, None), type):
        return None
    if place.min_ranks == place.max_ranks:
        return None
    is_cpu = not torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local
    return {
        "model": name,
        "config": model.config.to_dict(),
        "counts": list(range(place.max_ranks - 1, place.min_ranks - 1, -1))[:_MOST_COUNTS],
        "global_batch": loader.global_batch_size,
        "length": loader.longest or _USUAL_LENGTH,
        "precision": config.mixed_precision.precision,
        "zero_stage": config.zero.zero_stage,
        "pp_style": config.pipeline.pp_style,
        "num_chunks": config.pipeline.chunks_per_rank(2),
        "sequence": config.parallel.enable_sequence_parallelism,
        "recomputation": config.kernels.gradient_checkpointing,
        "device": None if is_cpu else torch.cuda.get_device_name(),
        "memory": memory if is_cpu else torch.cuda.get_device_properties(0).total_memory,
        "node_size": local,
        "largest_cp": config.parallel.cp_size,
    }
