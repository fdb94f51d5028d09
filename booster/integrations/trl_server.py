"""TRL's generation by a vLLM server: one rank talks to it, and the weights of all ranks stream to it.

Client and protocol are TRL's own. What the server says goes to all ranks, failures too: all go on, or all end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor


class ServerError(RuntimeError):
    """A vLLM server did not answer, or refused; raised on all ranks."""


class _ClientOfFirstRank:
    """TRL's client, which the first rank of the job has: all ranks call a method, and get what it returns there.

    Args:
        on_first_rank: calls a function on the first rank, and returns its result on all.

    Raises:
        ServerError: a call failed.
    """

    def __init__(self, url: str, connect: Callable[[], Any], on_first_rank: Callable[..., Any]) -> None:
        self._server, self._on_first_rank = f"the vLLM server at {url}", on_first_rank
        self.client: Any = None

        def connected() -> str:
            self.client = connect()
            return self.client.model

        self._server += f", which serves {self.call('connect', connected)!r},"
        info = self.call("get_server_info", lambda: self.client.get_server_info())
        self.get_server_info = lambda: info  # TRL asks for it on one rank alone

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.call(name, lambda: getattr(self.client, name)(*args, **kwargs))

    def call(self, name: str, work: Callable[[], Any]) -> Any:
        """Return on all ranks what `work`, the method `name` of the client, returns on the first one."""
        try:
            return self._on_first_rank(work, of_job=True)
        except RuntimeError as error:
            said = " ".join(str(error).split())
            raise ServerError(
                f"{self._server} failed in {name}: {said[:_LONGEST]}; start one with this model (vllm serve), and go "
                "on from the newest checkpoint"
            ) from error


_LONGEST = 400  # characters of a server's answer


class _OnEachRank:
    """An accelerator whose ranks all take the main process's way in TRL's code, where the client has one rank do it."""

    is_main_process = True

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def served_generation(trainer: Any) -> type:
    """Return TRL's class of generation by vLLM, for a trainer's model, which is boosted before weights are sent."""
    from trl.generation.vllm_generation import VLLMGeneration

    return type("ServedGeneration", (_ServedGeneration, VLLMGeneration), {"_trainer": trainer})


class _ServedGeneration:
    """What a server needs of a boosted model, before TRL's `VLLMGeneration`.

    Args:
        accelerator, options: as TRL's class takes them.

    Raises:
        ServerError: the server is away; raised on all ranks.
    """

    _trainer: Any

    def __init__(self, accelerator: Any, **options: Any) -> None:
        super().__init__(accelerator=_OnEachRank(accelerator), **options)

    def _init_vllm(self) -> None:
        from trl.generation.vllm_client import VLLMClient

        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        connect = partial(VLLMClient, base_url=url, group_port=self.group_port, connection_timeout=self.server_timeout)
        self.vllm_client = _ClientOfFirstRank(url, connect, self.accelerator.replicas.on_first_rank)
        self.vllm_client.init_communicator(device=self.accelerator.device)

    def sync_weights(self) -> None:
        """Send the server what `save_model` would write, merged; raises ServerError on all ranks if it fails."""
        if self._weight_metadata is None:  # TRL announces all tensors before the first one
            self._weight_metadata = [
                (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in self._weights()
            ]
        weights = self._weights()

        def send() -> None:
            try:
                self.vllm_client.client.update_named_params(self._weight_metadata, weights)
            finally:
                deque(weights, 0)  # the other ranks gather it all

        if dist.get_rank() > 0:
            deque(weights, 0)
        self.vllm_client.call("update_named_params", send)
        self.vllm_client.reset_prefix_cache()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        model = self._trainer.model
        merged = hasattr(model.unwrap(), "peft_config")
        return self._trainer.accelerator.booster.weights(model, to_rank=0, merge_adapters=merged)
