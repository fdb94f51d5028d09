"""The layout for the ranks that are there, and the step boundary at which all leave so that others can join.

The best layout for every number of ranks that the job may have left is planned ahead, by a process of low priority
while the job trains: a restart only looks it up. A machine has one planner at a time: it outlives the round that
started it, whose plans later rounds and layouts find, and ends with the job.

Snapshots are written by each rank, copied to the next machine, and read by the next round.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from booster import failure
from booster.elastic.job_environment import FOLDER, LEAVE, LIMIT, MODULES, ElasticPlace
from booster.errors import ConfigurationError
from booster.failure.diagnosis import LEFT
from booster.launch import elastic_place, job_store, machine_of_this_rank
from plugins.hybrid_parallel.checkpoint import training_state
from plugins.hybrid_parallel.checkpoint.global_tensor import buffers_of_earlier_stages
from plugins.hybrid_parallel.checkpoint.io import HybridParallelCheckpointIO
from plugins.hybrid_parallel.checkpoint.training_state import Piece
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.distributed.mesh import HybridMesh, control_group
from plugins.hybrid_parallel.guards import check_boosted
from shardformer.distributed.process_groups import all_gather_json

_LOCK = "plan-lock"
_MOST_COUNTS = 32  # numbers of ranks that are planned for, the largest first
_USUAL_LENGTH = 512  # tokens of a sample, if the loader has shown none
_LOW_PRIORITY = ("nice", "-n", "19")


class PlansAhead:
    """Layouts for other numbers of ranks.

    Args:
        place: place of this rank in its elastic job; also an attribute.
        config: options of the plugin as the script gives them, which are for the largest number of ranks.
        known: plans that an earlier round has made: number of ranks -> description.
    """

    def __init__(
        self,
        place: ElasticPlace,
        config: HybridParallelConfig,
        known: dict[str, Any] | None = None,
    ) -> None:
        self.place, self._config, self._known = place, config, known or {}
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
        """Start to plan on rank 0, for a `model` that its configuration builds; else restarts shrink the layout."""
        if self._is_asked or self._known or dist.get_rank() != 0:
            return
        self._is_asked = True
        if self._config.parallel.elastic_layouts is not None or model is None or loader is None:
            return
        request = _request(self.place, self._config, model.unwrap(), loader)
        if request is None:
            return
        path = _request_path(self.place, request)
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


_KEY = "elastic/leave_at"


class StepBoundary:
    """Agreement on the snapshot after which all ranks leave.

    Rank 0 says in one snapshot that the next is the last. No rank can pass the step between the two without rank 0, so
    all of them know when they get there.
    """

    def __init__(self, place: ElasticPlace, store: dist.Store, rank: int) -> None:
        self._place, self._store, self._rank = place, store, rank
        self._is_said = False

    def pass_or_leave(self, number: int) -> None:
        """End this process if all ranks leave after the snapshot `number`."""
        if self._store.check([_KEY]) and int(self._store.get(_KEY)) <= number:
            leave(self._place)
        if self._rank == 0 and not self._is_said and self._place.get(LEAVE):
            self._is_said = True
            self._store.set(_KEY, str(number + 1))


def leave(place: ElasticPlace) -> NoReturn:
    """End this process in a way that its agent takes for no failure; all ranks call this together."""
    place.note("left")
    sys.exit(LEFT)


_SIZES = ("tp_size", "pp_size", "cp_size")
# Options that belong to the sizes of the script's layout.
_BOUND_TO_SIZES = ("dp_size", "sp_size", "layers_per_stage", "device_mapping", "zero_size", "num_microbatches")
_OF_SEQUENCES = ("enable_sequence_parallelism", "sequence_parallelism_mode", "enable_sequence_overlap")


def for_present_ranks(options: dict[str, Any]) -> tuple[dict[str, Any], PlansAhead]:
    """Return the options of a plugin for the ranks that are there, and what plans for other numbers of ranks.

    With as many ranks as the job's `--max-ranks`, these are the options as given. In a job with too few ranks for any
    layout, or with a number of ranks that none fits, all ranks leave, and ask for a round with fewer.

    Args:
        options: keywords of `HybridParallelPlugin`, for the largest number of ranks.

    Raises:
        ConfigurationError: the options are invalid, or no layout fits; raised on all ranks.
    """
    place = elastic_place()
    if not dist.is_initialized():
        raise ConfigurationError(
            "HybridParallelPlugin() of an elastic job must know how many ranks are there; call launch_from_torch() "
            "before it"
        )
    place.note("started", rank=dist.get_rank())
    config = HybridParallelConfig.from_options(**options)
    config.parallel.data_parallel_size(place.max_ranks)
    found = training_state.newest_snapshot([place.pieces], control_group())
    known = {} if found is None else found.plans
    plans = PlansAhead(place, config, known)
    world_size = dist.get_world_size()
    if world_size == place.max_ranks:
        place.note(
            "planned", rank=dist.get_rank(), layout=config.layout(config.parallel.data_parallel_size(world_size))
        )
        return options, plans
    loader = None if found is None else found.manifest.state["dataloader"]
    global_batch = None if loader is None else loader["global_batch_size"]
    choice = LayoutChoice(options, config, known, global_batch)
    chosen = choice.best(world_size)
    if chosen is None:
        _leave_with_fewer(choice, world_size, place)
    _tell(HybridParallelConfig.from_options(**chosen), choice, world_size, place)
    return chosen, plans


class LayoutChoice:
    """Choice of a layout by the number of ranks.

    Args:
        global_batch: samples of a step; None before the first.
    """

    def __init__(
        self,
        options: dict[str, Any],
        config: HybridParallelConfig,
        known: Mapping[str, Any],
        global_batch: int | None,
    ) -> None:
        self._options, self._config, self._known, self._global_batch = options, config, known, global_batch

    def best(self, world_size: int) -> dict[str, Any] | None:
        """Return the options for a number of ranks; None if no layout fits."""
        for layout in self._candidates(world_size):
            block = math.prod(layout.get(name, 1) for name in _SIZES)
            if world_size % block or (self._global_batch or 0) % (world_size // block):
                continue
            options = self._with(layout, world_size // block)
            try:
                config = HybridParallelConfig.from_options(**options)
                config.zero.num_shards(config.parallel.data_parallel_size(world_size) * config.parallel.cp_size)
            except ConfigurationError:
                continue
            return options
        return None

    def plan_s(self, world_size: int) -> float | None:
        """Return how long the plan for a number of ranks took; None without a plan."""
        is_planned = self._config.parallel.elastic_layouts is None
        return self._known.get(str(world_size), {}).get("seconds") if is_planned else None

    def _candidates(self, world_size: int) -> Iterator[Mapping[str, Any]]:
        """Yield layouts in the order of preference: the user's own, the plan, parts of the script's layout."""
        users = self._config.parallel.elastic_layouts
        if users is not None:
            yield from [users(world_size)] if callable(users) else users
            return
        plan = self._known.get(str(world_size))
        if plan is not None:
            yield from [plan["options"]] if "options" in plan else []
            return
        given = {name: getattr(self._config.parallel, name) for name in _SIZES}
        smaller = [
            {"tp_size": tp, "pp_size": pp, "cp_size": cp}
            for tp in _divisors(given["tp_size"])
            for pp in _divisors(given["pp_size"])
            for cp in _divisors(given["cp_size"])
        ]
        # The more ranks share the state, the less memory each needs.
        yield from sorted(smaller, key=lambda sizes: (-math.prod(sizes.values()), -sizes["tp_size"]))

    def _with(self, layout: Mapping[str, Any], dp_size: int) -> dict[str, Any]:
        """Return the script's options under another layout."""
        options = {name: value for name, value in self._options.items() if name not in _BOUND_TO_SIZES}
        options |= {name: 1 for name in _SIZES if name in options} | dict(layout)
        if options.get("tp_size", 1) == options.get("cp_size", 1) == 1:
            options = {name: value for name, value in options.items() if name not in _OF_SEQUENCES}
        if "ep_size" in options:
            options["ep_size"] = math.gcd(options["ep_size"], dp_size * options.get("cp_size", 1))
        return options


def _divisors(size: int) -> list[int]:
    return [each for each in range(1, size + 1) if size % each == 0]


def _leave_with_fewer(choice: LayoutChoice, world_size: int, place: ElasticPlace) -> None:
    """Have the job go on with fewer ranks, if a layout fits those."""
    fewer = next((count for count in range(world_size - 1, 0, -1) if choice.best(count) is not None), None)
    if fewer is None:
        raise ConfigurationError(
            f"no layout fits {world_size} ranks or fewer; start more agents, or give elastic_layouts one for fewer"
        )
    place.put(LIMIT, fewer)
    if dist.get_rank() == 0:
        sys.stderr.write(f"elastic: no layout fits {world_size} ranks; going on with {fewer}\n")
    all_gather_json(None, control_group())  # all have written the limit
    leave(place)


def _tell(config: HybridParallelConfig, choice: LayoutChoice, world_size: int, place: ElasticPlace) -> None:
    layout = config.layout(config.parallel.data_parallel_size(world_size))
    place.note("planned", rank=dist.get_rank(), layout=layout, plan_s=choice.plan_s(world_size))
    if dist.get_rank() == 0:
        sys.stderr.write(f"elastic: {world_size} of {place.max_ranks} ranks are there; layout {layout}\n")


class ElasticCheckpointIO(HybridParallelCheckpointIO):
    """Adds snapshots in the memory of the machines to checkpoints; a job continues from the newer of the two."""

    def __init__(self, mesh: HybridMesh, plans: PlansAhead) -> None:
        super().__init__(mesh)
        self._place, self._plans = plans.place, plans
        self._number = self._complete = 0  # of the last snapshot, and of the newest that all ranks have written
        self._boundary: StepBoundary | None = None

    @failure.guard("booster.snapshot")
    def snapshot(self, folder: str, objects: dict[str, Any], extra: dict[str, Any]) -> None:
        """Leave the training state in the memory of the machines; the next round of an elastic job goes on from it.

        Args:
            objects: objects to save, by kind ("model", "optimizer", "lr_scheduler", "dataloader").

        Raises:
            ConfigurationError: the arguments are invalid, gradients are accumulated, or the memory is full.
        """
        check_boosted(objects)
        if objects.get("optimizer") is not None:
            objects["optimizer"].refuse_accumulated()
        is_first = self._boundary is None
        if is_first:
            self._begin(folder, objects.get("model"))
        state = training_state.take_snapshot(self.mesh, objects, extra, self._elsewhere)
        # All ranks have written the last one, or gone on from it: none can finish a step without the others.
        training_state.remove_before(self._complete, self._place.pieces)
        piece = Piece(self._number + 1, self._place.round, dist.get_world_size(), dist.get_rank())
        training_state.write_piece(piece, self._place.pieces, state, self._plans.known())
        self._neighbours.exchange(piece, self._place.pieces)
        self._number = self._complete = piece.number
        if is_first:
            self._place.note("first_step", rank=dist.get_rank(), number=self._number)
            if self._place.get(MODULES) is None:
                self._place.put(MODULES, list(_installed_modules(dict(sys.modules))))
        self._plans.begin(objects.get("model"), objects.get("dataloader"))
        self._boundary.pass_or_leave(self._number)

    def load_checkpoint(self, directory: str, objects: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
        """Read a checkpoint, or the newest snapshot in memory if it is newer."""
        extra = super().load_checkpoint(directory, objects, resume)
        self._place.note("moved", rank=dist.get_rank())
        return extra

    def _snapshot_folders(self, folder: Path | None) -> list[Path]:
        return [*super()._snapshot_folders(folder), self._place.pieces]

    def _begin(self, folder: str, model: Any) -> None:
        """Prepare the snapshots of this round."""
        self._elsewhere = set() if model is None else buffers_of_earlier_stages(model, self.mesh, self.group)
        # Earlier rounds left some.
        left = max((piece.number for piece in training_state.pieces_in(self._place.pieces)), default=0)
        names, numbers = zip(*all_gather_json([machine_of_this_rank(), left], self.group), strict=True)
        self._neighbours = Neighbours([names.index(name) for name in names], self.group)
        found = training_state.newest_snapshot([self._place.pieces], self.group)
        self._number, self._complete = max(numbers), 0 if found is None else found.number
        self._boundary = StepBoundary(self._place, job_store(), dist.get_rank())
        self._place.put(FOLDER, str(Path(folder).resolve()))


class Neighbours:
    """Who sends copies of pieces to whom."""

    def __init__(self, machines: list[int], group: ProcessGroup) -> None:
        self._group, self._rank = group, dist.get_rank()
        ranks_of: dict[int, list[int]] = {}
        for rank, machine in enumerate(machines):
            ranks_of.setdefault(machine, []).append(rank)
        rows = list(ranks_of.values())
        self.target: dict[int, int] = {}  # rank -> rank of the next machine that keeps its copy
        if len(rows) > 1:
            for index, row in enumerate(rows):
                there = rows[(index + 1) % len(rows)]
                self.target |= {rank: there[position % len(there)] for position, rank in enumerate(row)}

    def exchange(self, piece: Piece, directory: Path) -> None:
        """Send this rank's complete `piece`, and keep those of others in `directory`; all ranks call this."""
        if not self.target:
            return
        sources = [rank for rank, target in self.target.items() if target == self._rank]
        own = [_bytes_of(piece.data_in(directory)), _bytes_of(piece.header_in(directory))]
        sizes = {rank: torch.zeros(2, dtype=torch.int64) for rank in sources}
        self._transfer([torch.tensor([each.numel() for each in own])], {rank: [each] for rank, each in sizes.items()})
        room = {
            rank: [torch.empty(int(size), dtype=torch.uint8) for size in each.tolist()] for rank, each in sizes.items()
        }
        self._transfer(own, room)
        for rank, (data, header) in room.items():
            copy = Piece(piece.number, piece.round, piece.world_size, rank)
            copy.data_in(directory).write_bytes(data.numpy().data)
            training_state.publish(copy, directory, header.numpy().tobytes())

    def _transfer(self, sent: list[Tensor], received: dict[int, list[Tensor]]) -> None:
        group, target = self._group, self.target[self._rank]
        works = [dist.isend(each, group=group, group_dst=target) for each in sent]
        works += [dist.irecv(each, group=group, group_src=rank) for rank, parts in received.items() for each in parts]
        for work in works:
            work.wait()


def _bytes_of(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def _installed_modules(modules: dict[str, ModuleType]) -> Iterator[str]:
    """Yield the modules of installed packages and of this one, in the order in which they were imported."""
    ours = Path(__file__).resolve().parents[3]
    for name, module in modules.items():
        file = getattr(module, "__file__", None) or ""
        is_ours = file.startswith(str(ours)) and name.partition(".")[0] in ("booster", "plugins", "shardformer")
        if is_ours or "site-packages" in file:
            yield name
