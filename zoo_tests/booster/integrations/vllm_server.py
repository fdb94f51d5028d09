"""Stand-ins for vLLM: a server, which TRL's client asks over HTTP and sends weights through a socket, and an engine.

`talking` lets TRL's client run without vLLM and GPUs: NCCL, which moves the tensors, becomes a socket. All else, the
requests, their order and the threads, is TRL's own code.
"""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


class StandInServer:
    """Serves a model of its own, whose weights are those that it gets.

    Args:
        model: of which it takes names and shapes.
        dies_at: number of tensors after which it is gone, 0 for none of them announced, or path of the request in which
            it is gone; None for never.
        takes_adapters: whether it loads adapters of LoRA beside its model.

    Attributes:
        url: base of its addresses.
        updates: the tensors of each finished update, by name, or of each adapter.
        calls: the paths that were asked, in order.
    """

    def __init__(self, model: nn.Module, dies_at: int | str | None = None, takes_adapters: bool = False) -> None:
        self.model, self._dies_at = model.eval(), dies_at
        self._adapters = {"max_lora_rank": 16, "max_loras": 7} if takes_adapters else None
        self.updates: list[dict[str, Tensor]] = []
        self.calls: list[str] = []
        self._arriving: dict[str, Tensor] | None = None
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._group: Any = None
        self._num_generations = 0

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
            model = {"logprobs_mode": "processed_logprobs", "dtype": "float32"}
            config = {"model_config": model, "weight_transfer_config": {"backend": "nccl"}}
            config |= {"lora_config": self._adapters, "parallel_config": {"data_parallel_size": 1}}
            return {"vllm_config": config}
        names = {"/v1/models": {"data": [{"id": "stand-in"}]}, "/get_world_size": {"world_size": 1}, "/health": {}}
        names |= {"/pause?mode=keep": {}, "/resume": {}}
        actions: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/init_weight_transfer_engine": lambda body: self._join(**body["init_info"]),
            "/start_weight_update": lambda body: self._start(),
            "/update_weights": lambda body: self._receive(**body["update_info"]),
            "/finish_weight_update": lambda body: self._load(),
            "/reset_prefix_cache": lambda body: None,
            "/v1/load_lora_adapter": lambda body: self._load_adapter(body["lora_path"]),
            "/v1/unload_lora_adapter": lambda body: None,
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
        own = _in_files(self.model)
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
            _load(self.model, self._arriving)
            self.updates.append(self._arriving)
        self._arriving = None

    def _load_adapter(self, folder: str) -> None:
        assert {each.name for each in Path(folder).iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
        self.updates.append(load_file(f"{folder}/adapter_model.safetensors"))

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        if "prompt_logprobs" in body:
            return {"choices": [{"prompt_logprobs": self._scored(text, body)} for text in body["prompt"]]}
        assert self._arriving is None and self.updates, "it generates with the weights of this training"
        self._num_generations += 1
        generator = torch.Generator().manual_seed(self._num_generations)
        choices = []
        given = body["prompt"] if isinstance(body["prompt"][0], list | str) else [body["prompt"]]
        texts = [self._tokens(each) if isinstance(each, str) else each for each in given]
        for prompt in texts:
            for _ in range(body.get("n", 1)):
                tokens, log_probs = _sampled(self.model, prompt, body["max_tokens"], body["temperature"], generator)
                names = [f"token_id:{each}" for each in tokens]
                told = {"tokens": names, "token_logprobs": log_probs, "top_logprobs": [None] * len(tokens)}
                choices.append({"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": told})
        return {"choices": choices}

    @staticmethod
    def _tokens(text: str) -> list[int]:
        from zoo_tests.booster.integrations.trl_jobs import tokenizer

        return tokenizer()(text)["input_ids"]

    @torch.no_grad()
    def _scored(self, text: list[int], body: dict[str, Any]) -> list[dict[str, Any] | None]:
        """Log-probabilities of each token but the first, and of the most probable ones at its place."""
        scores = (self.model(input_ids=torch.tensor([text])).logits[0] / body["temperature"]).log_softmax(-1)
        found: list[dict[str, Any] | None] = [None]
        for token, row in zip(text[1:], scores, strict=False):
            ranks = row.argsort(descending=True).argsort() + 1
            told = {token, *row.topk(body["prompt_logprobs"]).indices.tolist()}
            found.append({str(each): {"logprob": float(row[each]), "rank": int(ranks[each])} for each in told})
        return found


def _in_files(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by the names of files, by which vLLM loads them, those of experts each by itself, and by their own."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {**load_file(f"{folder}/model.safetensors"), **dict(model.named_parameters())}


def _load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_file(tensors, f"{folder}/model.safetensors")
        model.load_state_dict(type(model).from_pretrained(folder).state_dict())


@torch.no_grad()
def _sampled(
    model: nn.Module, prompt: list[int], longest: int, temperature: float, generator: torch.Generator
) -> tuple[list[int], list[float]]:
    """A completion, and the log-probability of each of its tokens."""
    tokens: list[int] = []
    log_probs: list[float] = []
    ends = model.config.eos_token_id
    while len(tokens) < longest and not (tokens and tokens[-1] in ends):
        scores = (model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1] / temperature).log_softmax(-1)
        tokens.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
        log_probs.append(float(scores[tokens[-1]]))
    return tokens, log_probs


class StandInEngine:
    """vLLM's `LLM` on a rank: a model of its own, which it has not while it sleeps.

    Args:
        model: folder of its configuration.
        options: as TRL gives them.

    Attributes:
        made: the engines of this process.
        shares: of how many engines one process takes the place: each draws by a seed of its own.
        updates: the tensors of each update, by name.
        calls: what was called, in order.
    """

    made: list[StandInEngine] = []
    shares = 1

    def __init__(
        self, model: str, seed: int, enable_sleep_mode: bool, tensor_parallel_size: int, **options: Any
    ) -> None:
        assert options["distributed_executor_backend"] == "external_launcher"
        assert options["logprobs_mode"] == "processed_logprobs"
        if dist.is_initialized():  # vLLM's processes are ranks
            assert os.environ["RANK"] == str(dist.get_rank()) and os.environ["WORLD_SIZE"] == str(dist.get_world_size())
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self._in_files = {**load_file(f"{model}/model.safetensors"), **dict(self.model.named_parameters())}
        self.seed, self.updates, self.calls, self._awake = seed, [], [], {"weights", "kv_cache"}
        self._arriving: dict[str, Tensor] = {}
        self._num_calls = 0
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        self.made.append(self)

    def load_weights(self, tensors: list[tuple[str, Tensor]]) -> None:
        assert "weights" in self._awake
        self._arriving |= {name: tensor.clone() for name, tensor in tensors}

    def reset_prefix_cache(self) -> None:
        assert all(self._in_files[name].shape == tensor.shape for name, tensor in self._arriving.items())
        _load(self.model, self._arriving)
        self.updates.append(self._arriving)
        self._arriving = {}

    def sleep(self, level: int) -> None:
        assert level == 2
        self.calls.append("sleep")
        self._awake.clear()
        for param in self.model.parameters():
            param.data.fill_(torch.nan)

    def wake_up(self, tags: list[str]) -> None:
        self.calls += tags
        self._awake |= {*tags}

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert self._awake == {"weights", "kv_cache"} and self.updates and not self._arriving
        self._num_calls += 1
        size, found = -(-len(prompts) // self.shares), []
        for index, prompt in enumerate(prompts):
            if index % size == 0:
                generator = torch.Generator().manual_seed(1000 * (self.seed + index // size) + self._num_calls)
            given = (sampling_params.max_tokens, sampling_params.temperature, generator)
            tokens, log_probs = _sampled(self.model, prompt["prompt_token_ids"], *given)
            told = [
                {token: SimpleNamespace(rank=1, logprob=each)} for token, each in zip(tokens, log_probs, strict=True)
            ]
            completion = SimpleNamespace(token_ids=tokens, logprobs=told)
            found.append(SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[completion]))
        return found


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
            self.send_header("Content-Type", "application/json")
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
    """Let TRL's client and its engine be those of a stand-in, in modules that are imported before."""
    from trl.generation import vllm_client, vllm_generation
    from trl.generation.vllm_client import VLLMClient

    StandInEngine.made.clear()
    join, retry = VLLMClient.init_communicator, vllm_client.Retry
    group = {
        "get_ip": lambda: "127.0.0.1",
        "NCCLWeightTransferEngine": _Engine,
        "NCCLTrainerSendWeightsArgs": SimpleNamespace,
    }
    of_client = group | {"Retry": lambda **options: retry(**options | {"backoff_factor": 0})}
    transfers = [each for name, each in sys.modules.items() if name.startswith("trl.") and name.endswith("_transfer")]
    asking = [each for name, each in sys.modules.items() if name.startswith("trl.") and _ASKED in vars(each)]
    with ExitStack() as stack:
        for module in asking:
            stack.enter_context(patch.object(module, _ASKED, lambda *args, **kwargs: True))
        stack.enter_context(patch.multiple(vllm_client, create=True, **of_client))
        for module in transfers:  # of the asynchronous trainers
            stack.enter_context(patch.multiple(module, create=True, get_open_port=free_port, **group))
        engine = {"LLM": StandInEngine, "SamplingParams": SimpleNamespace}
        stack.enter_context(patch.multiple(vllm_generation, create=True, **engine))
        if (own := sys.modules.get("trl.experimental.online_dpo.online_dpo_trainer")) is not None:
            stack.enter_context(patch.multiple(own, create=True, SamplingParams=SimpleNamespace))
        # It opens no device.
        stack.enter_context(patch.object(VLLMClient, "init_communicator", lambda self, device: join(self, "cuda")))
        yield


_ASKED = "is_vllm_available"
