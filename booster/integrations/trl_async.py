"""TRL's asynchronous trainers: they train on rollouts of a queue, while a server generates the next ones.

TRL lets one process talk to server, worker and queue, and sends the others their share. Here all ranks run the code of
that process; what is outside is asked by the first rank alone, and its answers, or errors, reach all of them.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.integrations.arguments import check_asynchronous
from booster.integrations.replicas import Replicas
from booster.integrations.trl_server import ServerError, announced, merged_weights, said, sending
from booster.launch import launch_from_torch
from booster.plugin import Plugin
from shardformer.attention import log_once

_STOPS_WITHIN_S = 30.0  # TRL gives a child 20
_TEXTS = ("prompt", "completion")  # of a sample: for tables of rollouts, which one rank writes


class _OfFirstRank:
    """An object of the first rank, whose methods all ranks call: they get its answers, or raise a ServerError.

    Args:
        what: names it in errors.
        make: returns the object; called on the first rank alone.
    """

    def __init__(self, what: str, replicas: Replicas, make: Callable[[], Any]) -> None:
        self._what, self._replicas, self.inside = what, replicas, None
        self._ask("start", lambda: setattr(self, "inside", make()))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._ask(name, lambda: getattr(self.inside, name)(*args, **kwargs))

    def _ask(self, name: str, work: Callable[[], Any]) -> Any:
        try:
            return self._replicas.on_first_rank(work, of_job=True)
        except RuntimeError as error:
            again = "look at its log, and go on from the newest checkpoint"
            raise ServerError(f"{self._what} failed in {name}: {said(error)}; {again}") from error


class _Queue(_OfFirstRank):
    """A queue of samples or metrics, of which all ranks take the same."""

    _size = 0

    def get(self, timeout: float) -> Any:
        """Return the next entry; raises queue.Empty after so many seconds."""
        return self._next("get", lambda: self.inside.get(timeout=timeout))

    def get_nowait(self) -> Any:
        """Return the next entry; raises queue.Empty if there is none."""
        return self._next("get_nowait", lambda: self.inside.get_nowait())

    def qsize(self) -> int:
        """Return how many entries were left behind the latest one."""
        return self._size

    def _next(self, name: str, take: Callable[[], Any]) -> Any:
        taken: list[Any] = []

        def work() -> Any:
            try:
                taken.append(take())
            except queue.Empty:
                return None
            return [self.inside.qsize(), isinstance(taken[0], dict), _fields_of(taken[0])]

        if (answer := self._ask(name, work)) is None:
            raise queue.Empty
        self._size, is_dict, fields = answer
        return taken[0] if taken else fields if is_dict else SimpleNamespace(**fields)


def _fields_of(sample: Any) -> dict[str, Any]:
    if isinstance(sample, dict):
        return sample
    names = [each.name for each in dataclasses.fields(sample)] if dataclasses.is_dataclass(sample) else vars(sample)
    return {name: getattr(sample, name) for name in names if name not in _TEXTS}


class _Worker(_OfFirstRank):
    """What makes rollouts."""

    def __init__(self, replicas: Replicas, make: Callable[[], Any]) -> None:
        super().__init__("the rollout worker", replicas, make)
        self.rollout_buffer = _Queue("the queue of rollouts", replicas, lambda: self.inside.rollout_buffer)
        self.metrics_queue = _Queue("the queue of metrics", replicas, lambda: self.inside.metrics_queue)

    def stop(self) -> None:
        """Stop it, also where one rank has failed and the others are elsewhere.

        TRL's waits for ever for a child that has died, and would keep the job from ending.
        """
        if self.inside is not None:
            stopping = Thread(target=self.inside.stop, daemon=True)
            stopping.start()
            stopping.join(_STOPS_WITHIN_S)


class _WorkerOfTRL(_Worker):
    """TRL's worker, whose place in the dataset checkpoints hold."""

    def __init__(self, replicas: Replicas, make: Callable[[], Any]) -> None:
        super().__init__(replicas, make)
        self._loop_kwargs = getattr(self.inside, "_loop_kwargs", {})


class _Transfer(_OfFirstRank):
    """What brings weights to the server."""

    def send_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send weights, which all ranks gather."""
        self._ask("send_weights", sending(lambda stream: self.inside.send_weights(stream), weights))

    def destroy(self) -> None:
        """Let its connection go, also where one rank has failed and the others are elsewhere."""
        if self.inside is not None:
            self.inside.destroy()


class _TransferOfTRL(_Transfer):
    """TRL's client, which tells the server what comes: names, dtypes and shapes of the stream.

    Args:
        weights: returns a stream.
        make: TRL's class.
        client: of the server.
    """

    def __init__(
        self,
        replicas: Replicas,
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
        make: Callable[..., Any],
        vllm_client: _OfFirstRank,
        weight_sync_timeout: int,
        **of_whole_model: Any,
    ) -> None:
        super().__init__("the transfer of weights", replicas, lambda: None)
        self._weights = weights
        self._make = lambda info: make(vllm_client.inside, info, weight_sync_timeout=weight_sync_timeout)

    def init_weight_transfer(self) -> None:
        """Join the server's group for weights."""
        columns = [list(column) for column in zip(*announced(self._weights()), strict=True)]

        def join() -> None:
            self.inside = self._make(dict(zip(("names", "dtype_names", "shapes"), columns, strict=True)))
            self.inside.init_weight_transfer()

        self._ask("init_weight_transfer", join)


class BoostedAsyncTrainer:
    """Mixin of a boosted trainer of TRL whose rollouts come from a queue."""

    def __init__(self, *args: Any, plugin: Plugin | None = None, **kwargs: Any) -> None:
        self._outside: dict[str, Callable[..., Any]] = {}
        if plugin is not None:
            launch_from_torch(seed=None)
            for given in (*args, *kwargs.values()):
                if hasattr(given, "accelerator_config"):
                    check_asynchronous(type(given).__name__, plugin)
                    # How TRL's one process shares batches out.
                    given.accelerator_config.split_batches = given.accelerator_config.dispatch_batches = None
            self._outside = self._what_asks_outside(Replicas(plugin))
        super().__init__(*args, plugin=plugin, **kwargs)
        replicas, worker, transfer = self.accelerator.replicas, self.rollout_worker, self.weight_transfer
        if not isinstance(worker, _Worker):
            self.rollout_worker = _Worker(replicas, lambda: worker)
            self.rollout_queue = self.rollout_worker.rollout_buffer
        if not isinstance(transfer, _Transfer | None):
            self.weight_transfer = _Transfer("the transfer of weights", replicas, lambda: transfer)

    def _what_asks_outside(self, replicas: Replicas) -> dict[str, Callable[..., Any]]:
        """Return what takes the place of TRL's functions and classes, by their names."""
        modules = (sys.modules[each.__module__] for each in type(self).__mro__)
        trl = next(each for each in modules if each.__name__.startswith("trl."))
        client, transfer, worker = trl.VLLMClient, trl.WeightTransferClient, trl.AsyncRolloutWorker
        peak_flops, packing = trl.get_peak_flops_per_device, sys.modules.get(f"{trl.__package__}.packing")
        of_trees = {"_flash_attn": _kernel_of_trees, "get_target_dtype": _dtype_of_kernel} if packing else {}
        of_trees = {name: partial(ours, getattr(packing, name)) for name, ours in of_trees.items()}

        def connected(url: str, *rest: Any) -> _OfFirstRank:
            return _OfFirstRank(f"the vLLM server at {url}", replicas, partial(client, url, *rest))

        def __init__(self: _WorkerOfTRL, **options: Any) -> None:
            _WorkerOfTRL.__init__(self, replicas, partial(worker, **options))

        return {
            "VLLMClient": connected,
            "WeightTransferClient": partial(_TransferOfTRL, replicas, lambda: self._streaming_iter(), transfer),
            "AsyncRolloutWorker": type("AsyncRolloutWorker", (_WorkerOfTRL,), {"__init__": __init__}),
            "save_lora_adapter": self._save_adapter,
            **of_trees,
            "get_peak_flops_per_device": lambda *given: peak_flops(*given) if torch.cuda.is_available() else None,
        }

    def _of_replicas(self, **ours: Callable[..., Any]) -> AbstractContextManager[None]:
        return super()._of_replicas(**self._outside)

    def create_accelerator_and_postprocess(self) -> None:
        """Take rows of the batches that all ranks make of the queue."""
        super().create_accelerator_and_postprocess()
        self.accelerator.takes_rows = True

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save as the trainer does; the first rank alone writes where the worker is."""
        self.accelerator.all_ranks_lead = False
        try:
            super()._save_checkpoint(*args, **kwargs)
        finally:
            self.accelerator.all_ranks_lead = True

    def get_train_dataloader(self) -> Any:
        """Return the loader of this replica's rows; the first rank alone writes tables of rollouts."""
        loader = super().get_train_dataloader()
        if dist.get_rank() > 0:
            self._rollout_dataset.report_to = []
        return loader

    # ----- weights -----

    def _streaming_iter(self) -> Iterator[tuple[str, Tensor]]:
        """Return what `save_model` would write, merged, on the first rank."""
        return merged_weights(self)

    def _sync_weight_merged(self, t0: float) -> tuple[float, float, float]:
        """Send the weights as the trainer does, but for adapters, which the stream merges.

        Returns:
            When the server was paused, when all ranks knew, and when the weights were sent.
        """
        if self.weight_transfer:
            self.weight_transfer.pause()
        paused = time.time()
        self.accelerator.wait_for_everyone()
        together = time.time()
        if self.weight_transfer:
            self.weight_transfer.send_weights(self._streaming_iter())
        sent = time.time()
        if self.weight_transfer:
            self.weight_transfer.resume()
        self.model_version += 1
        self.rollout_worker.update_model_version(self.model_version)
        return paused, together, sent

    def _save_adapter(self, model: nn.Module, accelerator: Any, adapter_name: str, folder: str) -> None:
        """Write the adapter where the server reads it; it appears at once."""
        made = Path(folder).with_name(f".{Path(folder).name}.tmp")
        self.accelerator.save_model(self.model, made)
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            (made if adapter_name == "default" else made / adapter_name).rename(folder)
            shutil.rmtree(made, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    # ----- distillation -----

    def _compute_loss(self, student: nn.Module, inputs: Any) -> Tensor:
        """Compute AsyncDistillationTrainer's divergence from logits: a head's weight is cut."""
        return super()._compute_loss(_LogitsForHidden(student), inputs)


class _LogitsForHidden(nn.Module):
    """A model whose hidden states are its logits, [batch, seq, vocabulary], and whose head changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._run, self.config = partial(model), SimpleNamespace(get_text_config=SimpleNamespace)

    def base_model(self, **batch: Any) -> SimpleNamespace:
        """Run the whole model."""
        return SimpleNamespace(last_hidden_state=self._run(**batch).logits)

    def get_output_embeddings(self) -> SimpleNamespace:
        """Return a head that gives back what it gets."""
        return SimpleNamespace(weight=_Identity(), bias=None)


class _Identity:
    """A weight, [vocabulary, vocabulary], by which a product is the other factor."""

    def float(self) -> _Identity:
        return self

    def t(self) -> _Identity:
        return self

    def sum(self) -> float:
        return 0.0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Tensor:
        return args[0]  # of `logits @ weight`


# ----- attention over trees of tokens -----


def _kernel_of_trees(of_trl: Callable[[], Any]) -> Any:
    """Return TRL's kernel where it runs, on GPUs of Hopper or AMD with the package kernels; else torch's operators."""
    if torch.version.hip or (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9):
        with suppress(ImportError):
            return of_trl()
    log_once("AsyncGRPOTrainer", "attends segment by segment: the kernel of trees needs a Hopper GPU and kernels")
    return SimpleNamespace(flash_attn_varlen_func=attend_along_paths)


def _dtype_of_kernel(of_whole_layers: Callable[..., Any], query: Tensor, module: nn.Module) -> torch.dtype | None:
    """Return the dtype that TRL gives a kernel instead of fp32: of the layer's weights, which a layout may have cut."""
    try:
        return of_whole_layers(query, module)
    except StopIteration:  # it looks for an nn.Linear
        return next((each.dtype for each in module.parameters() if each.dim() > 1), None)


def attend_along_paths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_borders: Tensor,
    key_borders: Tensor,
    *longest: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Return attention of segments of queries to the ends of paths of keys, as flash-attn's function does.

    Args:
        query: [tokens, heads, head_dim].
        key, value: [tokens of all paths, key/value heads, head_dim].
        query_borders, key_borders: [segments + 1], first tokens of segments and of their paths.
        window_size: tokens that a query sees before it; -1 for all.

    Returns:
        [tokens, heads, head_dim].
    """
    lengths, before = query_borders.diff().tolist(), window_size[0]
    paths = key_borders.diff().tolist()
    groups, scale = query.shape[1] // key.shape[1], softmax_scale or 1 / math.sqrt(query.shape[-1])
    found = []
    for queries, keys, values in zip(query.split(lengths), key.split(paths), value.split(paths), strict=True):
        ends = torch.arange(len(keys) - len(queries), len(keys), device=query.device)[:, None]
        places = torch.arange(len(keys), device=query.device)
        hidden = (places > ends) | ((places < ends - before) if before >= 0 else False)  # [queries, keys]
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(groups, 1)) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1, torch.float32).to(value.dtype)
        found.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(groups, 1)))
    return torch.cat(found)
