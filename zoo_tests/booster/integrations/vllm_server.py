"""A stand-in for a vLLM server: it answers what TRL's client asks over HTTP, and receives weights through a socket.

`talking` lets TRL's client run without vLLM and GPUs: NCCL, which moves the tensors, becomes a socket. All else, the
requests, their order and the threads, is TRL's own code.
"""

from __future__ import annotations

import io
import json
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class StandInServer:
    """Serves a model of its own, whose weights are those that it gets.

    Args:
        model: of which it takes names and shapes.
        dies_at: number of tensors after which it is gone, 0 for none of them announced, or path of the request in which
            it is gone; None for never.

    Attributes:
        url: base of its addresses.
        updates: the tensors of each finished update, by name.
        calls: the paths that were asked, in order.
    """

    def __init__(self, model: nn.Module, dies_at: int | str | None = None) -> None:
        self.model, self._dies_at = model.eval(), dies_at
        self.updates: list[dict[str, Tensor]] = []
        self.calls: list[str] = []
        self._arriving: dict[str, Tensor] | None = None
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._group: Any = None

    def __enter__(self) -> StandInServer:
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.end()

    def end(self) -> None:
        """Be gone: no address answers any more."""
        self._http.shutdown()
        self._http.server_close()
        if self._group is not None:
            self._group.close()

    # ----- what is asked -----

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a request.

        Raises:
            ValueError: the request is refused.
        """
        self.calls.append(path)
        self._die_if_at(path)
        if path.startswith("/server_info"):
            config = {"weight_transfer_config": {"backend": "nccl"}}
            return {"vllm_config": config | {"model_config": {"logprobs_mode": "processed_logprobs"}}}
        names = {"/v1/models": {"data": [{"id": "stand-in"}]}, "/get_world_size": {"world_size": 1}, "/health": {}}
        actions: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/init_weight_transfer_engine": lambda body: self._join(**body["init_info"]),
            "/start_weight_update": lambda body: self._start(),
            "/update_weights": lambda body: self._receive(**body["update_info"]),
            "/finish_weight_update": lambda body: self._load(),
            "/reset_prefix_cache": lambda body: None,
            "/v1/completions": self._complete,
        }
        return names[path] if path in names else actions[path](body) or {}

    def _join(self, master_address: str, master_port: int, rank_offset: int, world_size: int) -> None:
        assert (rank_offset, world_size) == (1, 2)
        self._group = _Group(_connected(master_address, master_port))

    def _start(self) -> None:
        self._arriving = {}
        self._die_if_at(0)

    def _die_if_at(self, place: int | str) -> None:
        if place == self._dies_at:
            threading.Thread(target=self.end).start()
            raise ConnectionAbortedError

    def _receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]], packed: bool) -> None:
        own = {**self._in_files(), **dict(self.model.named_parameters())}
        for name, shape in zip(names, shapes, strict=True):
            if name not in own or list(own[name].shape) != shape:
                raise ValueError(f"this model has no parameter {name} of the shape {shape}")
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            self._die_if_at(len(self._arriving))
            tensor = self._group.receive()
            assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{dtype}", shape)
            self._arriving[name] = tensor

    def _load(self) -> None:
        if self._arriving:
            with tempfile.TemporaryDirectory() as folder:
                self.model.config.save_pretrained(folder)
                save_file(self._arriving, f"{folder}/model.safetensors")
                self.model.load_state_dict(type(self.model).from_pretrained(folder).state_dict())
            self.updates.append(self._arriving)
        self._arriving = None

    def _in_files(self) -> dict[str, Tensor]:
        """Parameters by the names of files, by which vLLM loads them: those of experts stand alone there."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            return load_file(f"{folder}/model.safetensors")

    @torch.no_grad()
    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self._arriving is None and self.updates, "it generates with the weights of this training"
        generator = torch.Generator().manual_seed(self.calls.count("/v1/completions"))
        choices = []
        for prompt in body["prompt"]:
            for _ in range(body["n"]):
                choices.append(self._sample(prompt, body["max_tokens"], body["temperature"], generator))
        return {"choices": choices}

    def _sample(self, prompt: list[int], longest: int, temperature: float, generator: torch.Generator) -> Any:
        tokens: list[int] = []
        log_probs: list[float] = []
        ends = self.model.config.eos_token_id
        while len(tokens) < longest and not (tokens and tokens[-1] in ends):
            logits = self.model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1] / temperature
            scores = logits.log_softmax(-1)
            tokens.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
            log_probs.append(float(scores[tokens[-1]]))
        names = [f"token_id:{each}" for each in tokens]
        told = {"tokens": names, "token_logprobs": log_probs, "top_logprobs": [None] * len(tokens)}
        return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": told}


def _handler_of(server: StandInServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self._answer(json.loads(self.rfile.read(length) or "{}"))

        def _answer(self, body: dict[str, Any]) -> None:
            try:
                status, answer = 200, server.answer(self.path, body)
            except ValueError as error:
                status, answer = 400, {"error": str(error)}
            except ConnectionError:
                self.close_connection = True
                return
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


# ----- instead of NCCL -----


def free_port() -> int:
    """Return a port of this machine that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _connected(address: str, port: int) -> socket.socket:
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((address, port))
        time.sleep(0.01)


class _Group:
    """Two processes that send each other tensors."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.group = connection, SimpleNamespace()

    def send(self, tensor: Tensor) -> None:
        buffer = io.BytesIO()
        torch.save(tensor.clone(), buffer)
        self._connection.sendall(struct.pack("<q", buffer.tell()) + buffer.getvalue())

    def receive(self) -> Tensor:
        (size,) = struct.unpack("<q", self._read(8))
        return torch.load(io.BytesIO(self._read(size)))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._connection.recv(size - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return data

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class _Engine:
    """vLLM's engine for weights, on the trainer's side."""

    @staticmethod
    def trainer_init(init_info: dict[str, Any]) -> _Group:
        with socket.create_server((init_info["master_address"], init_info["master_port"])) as listening:
            return _Group(listening.accept()[0])

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: Any) -> None:
        for _, tensor in iterator:
            trainer_args.group.send(tensor)


@contextmanager
def talking() -> Iterator[None]:
    """Let TRL's client talk to a stand-in."""
    from trl.generation import vllm_client as module
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient

    join, retry = VLLMClient.init_communicator, module.Retry
    vllm = {
        "is_vllm_available": lambda *args, **kwargs: True,
        "get_ip": lambda: "127.0.0.1",
        "NCCLWeightTransferEngine": _Engine,
        "NCCLTrainerSendWeightsArgs": SimpleNamespace,
        "Retry": lambda **options: retry(**options | {"backoff_factor": 0}),
    }
    with (
        patch.multiple(module, create=True, **vllm),
        patch.object(vllm_generation, "is_vllm_available", vllm["is_vllm_available"]),
        patch.object(VLLMClient, "init_communicator", lambda self, device: join(self, "cuda")),  # it opens no device
    ):
        yield
