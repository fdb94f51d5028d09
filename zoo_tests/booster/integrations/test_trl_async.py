"""TRL's asynchronous trainers under layouts: they log, and send, what one plain process does with the same rollouts.

What breaks here first: a rank that takes another sample of the queue, attention over trees, a failure that one rank
keeps to itself. Look in `booster/integrations/trl_async.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import queue
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PrinterCallback

from booster.integrations.transformers import boosted
from booster.integrations.trl_async import attend_along_paths
from booster.integrations.trl_server import ServerError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.booster.integrations.trl_jobs import (
    LAYOUTS,
    Job,
    as_a_new_process,
    differences,
    model_of,
    ranks_of,
    tokenizer,
)
from zoo_tests.booster.integrations.vllm_server import StandInServer, talking
from zoo_tests.harness.ranks import run_on_ranks

_LORA = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "up_proj"], "bias": "none"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
_WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
JOBS = {
    "grpo": Job("async_grpo", {"gradient_accumulation_steps": 2}),
    "grpo in budgets": Job("async_grpo", {"token_budget": 40}),
    "grpo lora": Job("async_grpo", adapters=_LORA),
    "grpo capped": Job("async_grpo", family="gemma2", sizes={**_WINDOW, "query_pre_attn_scalar": 6}),
    "grpo experts": Job("async_grpo", family="qwen3_moe", sizes=_EXPERTS),
    "distillation": Job("async_distillation", {"gradient_accumulation_steps": 2}),
    "distillation mixed": Job("async_distillation", {"beta": 0.4, "teacher_temperature": 0.8}, adapters=_LORA),
}
_CAMPAIGN = pytest.mark.campaign
_SAMPLE = [("grpo", "tp2pp2"), ("distillation", "tp2"), ("grpo lora", "pp2"), ("grpo capped", "tp2"), ("grpo", "dp2")]
_CASES = [
    pytest.param(name, layout, marks=() if (name, layout) in _SAMPLE else _CAMPAIGN)
    for name in JOBS
    for layout in ("tp2", "pp2", "dp2", "tp2pp2")
    # Steps of the first have other samples; the routers of the second are refused.
    if layout != "dp2" or name not in ("grpo in budgets", "grpo experts")
]
_TOLERANCE = 1e-5
# Of rows, of which replicas have one each; and of clocks.
_OF_ROWS, _OF_CLOCKS = ("batch/",), ("perf/", "sample/time_in_queue_s")


class Rollouts:
    """A worker whose rollouts are made before: groups of completions that share prompts and first tokens."""

    def __init__(self, kind: str, dies: bool = False) -> None:
        self.rollout_buffer: queue.Queue = queue.Queue()
        self.metrics_queue: queue.Queue = queue.Queue()
        self.calls: list[Any] = []
        self._dies = dies
        drawn = np.random.default_rng(5)
        for group in range(0 if dies else 24):
            prompt = drawn.integers(40, 250, drawn.integers(3, 9))
            for turn in range(4):
                completion = drawn.integers(40, 250, drawn.integers(2, 9))
                completion[0] = 41 if turn % 2 else completion[0]
                self.rollout_buffer.put(_sample(kind, drawn, group, prompt, completion))

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def update_model_version(self, version: int) -> None:
        self.calls.append(version)
        self.metrics_queue.put({"rollout/versions_total": float(version), "rollout/share": (version, 7)})

    def check_health(self, stale_after_s: float) -> None:
        if self._dies:
            raise RuntimeError("the worker's\nchild is gone")


def _sample(kind: str, drawn: Any, group: int, prompt: Any, completion: Any) -> Any:
    ids, mask = np.concatenate([prompt, completion]), np.array([0] * len(prompt) + [1] * len(completion))
    fields: dict[str, Any] = {"prompt": [], "completion": [], "input_ids": ids, "completion_mask": mask}
    fields |= {"model_version": -9 if len(ids) % 7 == 0 else 0, "metrics": {"reward": float(drawn.normal())}}
    module = importlib.import_module(f"trl.experimental.{kind}.async_rollout_worker")
    if kind == "async_grpo":
        old = np.where(mask, drawn.normal(-5.5, 0.3, len(ids)), 0.0).astype(np.float32)
        fields |= {"old_log_probs": old, "advantage": float(drawn.normal()), "group_id": group}
    else:
        candidates = np.stack([drawn.permutation(250)[:4] for _ in ids])
        candidates[:, 3] = ids
        scores = np.sort(drawn.normal(-4.0, 1.0, candidates.shape).astype(np.float32))[:, ::-1] - 2
        fields |= {"teacher_topk_ids": candidates, "teacher_topk_logprobs": scores, "teacher_id": "ab"[group % 2]}
        fields["prompt_id"] = group
    return module.RolloutSample(**fields)


class Received:
    """A transfer of weights that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Tensor]] = []

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.sent.append({name: tensor.detach().clone() for name, tensor in iterator})


def _by_masks(query: Tensor, key: Tensor, value: Tensor, *borders: Any, **options: Any) -> Tensor:
    """Attention of each query by itself, in place of flash-attn."""
    (starts, paths), found = (each.tolist() for each in borders[:2]), torch.zeros_like(query)
    groups, window = query.shape[1] // key.shape[1], options["window_size"][0]
    for segment in range(len(starts) - 1):
        for index in range(starts[segment], starts[segment + 1]):
            end = paths[segment + 1] - (starts[segment + 1] - 1 - index)
            first = max(paths[segment], end - 1 - window) if window >= 0 else paths[segment]
            keys, values = (each[first:end].repeat_interleave(groups, 1) for each in (key, value))
            scores = (query[index] * keys).sum(-1) * options["softmax_scale"]  # [keys, heads]
            if cap := options.get("softcap"):
                scores = (scores / cap).tanh() * cap
            found[index] = (scores.softmax(0)[..., None] * values).sum(0)
    return found


@contextmanager
def _plainly(kind: str) -> Iterator[None]:
    """Let TRL's own trainer run on CPUs."""
    from trl.experimental.async_grpo import packing

    trainer = importlib.import_module(f"trl.experimental.{kind}.{kind}_trainer")
    with ExitStack() as stack:
        stack.enter_context(patch.object(trainer, "get_peak_flops_per_device", lambda *given: None))
        kernel = SimpleNamespace(flash_attn_varlen_func=_by_masks)
        stack.enter_context(patch.object(packing, "_flash_attn", lambda: kernel))
        yield


def _options(job: Job, folder: str, replicas: int = 1) -> dict[str, Any]:
    from peft import LoraConfig

    name = {"async_grpo": "AsyncGRPO", "async_distillation": "AsyncDistillation"}[job.kind]
    module = importlib.import_module(f"trl.experimental.{job.kind}")
    given = {
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "max_steps": 3,
        "token_budget": 0,
        "max_staleness": 5,
        "dtype": job.dtype,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **job.arguments,
    }
    given["per_device_train_batch_size"] //= replicas
    if job.kind == "async_distillation":
        given["teacher_server_urls"] = {"a": "http://one", "b": "http://other"}
        given |= {"model_init_kwargs": {"attn_implementation": "sdpa"}}
    return {
        "model": str(Path(folder).parent / "model"),
        "args": getattr(module, f"{name}Config")(folder, **given),
        "train_dataset": datasets.Dataset.from_list([{"prompt": "a"}] * 8),
        "processing_class": tokenizer(),
        "peft_config": None if job.adapters is None else LoraConfig(**job.adapters),
        "rollout_worker": Rollouts(job.kind),
        "weight_transfer": Received(),
    }


def train(job: Job, folder: str, layout: str | None, **given: Any) -> tuple[list[dict[str, Any]], list[Any], list[Any]]:
    """Return what is logged, what this rank's transfer was sent, and what its worker was told."""
    as_a_new_process()
    options = {**_options(job, folder, 2 if layout == "dp2" else 1), **given}
    name = type(options["args"]).__name__.replace("Config", "Trainer")
    base = getattr(importlib.import_module(f"trl.experimental.{job.kind}"), name)
    with ExitStack() as stack:
        if layout is None:
            stack.enter_context(_plainly(job.kind))
            trainer = base(**options)
        else:
            trainer = boosted(base)(plugin=HybridParallelPlugin(**LAYOUTS[layout], **job.plugin), **options)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    trainer.save_model(str(Path(folder) / "saved"))
    return trainer.state.log_history, getattr(options["weight_transfer"], "sent", []), options["rollout_worker"].calls


def _write_model(job: Job, folder: Path) -> None:
    model_of(dataclasses.replace(job, kind="grpo")).save_pretrained(folder / "model")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), _CASES)
def test_a_queue_trains_as_in_one_process(name: str, layout: str, tmp_path: Path) -> None:
    job = JOBS[name]
    _write_model(job, tmp_path)
    expected, theirs, calls = train(job, str(tmp_path / "plain"), None)
    assert calls == [1, "start", 2, 3, 4, "stop"] and len(theirs) == 4
    found = run_on_ranks(ranks_of(layout), train, job, str(tmp_path / layout), layout, timeout_s=300.0)
    for rank, (history, sent, told) in enumerate(found):
        worst = differences(history, expected)
        other = (*_OF_CLOCKS, *(_OF_ROWS if layout == "dp2" else ()))
        worst = {key: gap for key, gap in worst.items() if not key.startswith(other)}
        assert {"loss", "grad_norm", "entropy", "rollout/share", "sample/dropped_stale_total"} <= worst.keys()
        print(f"{name}, {layout}: {max(worst.values()):.0e} ({max(worst, key=worst.__getitem__)})")
        assert not {key: gap for key, gap in worst.items() if gap > _TOLERANCE}
        assert (told, len(sent)) == ((calls, 4) if rank == 0 else ([], 0)), "the first rank alone talks"
    sent = found[0][1]
    for ours, plain in zip(sent, theirs, strict=True):
        if name != "grpo experts":  # TRL sends those of a layer as one tensor
            assert ours.keys() == plain.keys()
            assert all(torch.allclose(ours[key], plain[key], atol=1e-4) for key in ours)
    if job.adapters is None:
        files = (tmp_path / layout / "saved").glob("*.safetensors")
        saved = {key: each for path in files for key, each in load_file(path).items()}
        assert saved.keys() == sent[-1].keys() and all(torch.equal(saved[key], sent[-1][key]) for key in saved)


@pytest.mark.parametrize(("window", "cap"), [(-1, 0.0), (2, 3.0)])
def test_segments_attend_along_their_paths(window: int, cap: float) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(7, 4, 6), torch.randn(13, 2, 6), torch.randn(13, 2, 6)
    borders = torch.tensor([0, 3, 5, 7]), torch.tensor([0, 3, 8, 13])
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (window, 0), "softcap": cap}
    found = attend_along_paths(query, key, value, *borders, 3, 5, **options)
    assert torch.allclose(found, _by_masks(query, key, value, *borders, 3, 5, **options), atol=1e-6)


# ----- the server -----


def with_client(job: Job, folder: str, layout: str | None, url: str) -> list[dict[str, Any]]:
    """Train with TRL's own client of the server; return what is logged."""
    arguments = {"vllm_server_base_url": url, "vllm_server_timeout": 0.0}
    job = dataclasses.replace(job, arguments=job.arguments | arguments)
    importlib.import_module(f"trl.experimental.{job.kind}")
    with talking():
        return train(job, folder, layout, weight_transfer=None)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "adapters"),
    [
        ("grpo", "tp2", False),
        ("grpo lora", "pp2", True),
        pytest.param("grpo lora", "pp2", False, marks=_CAMPAIGN),
        pytest.param("distillation", "pp2", False, marks=_CAMPAIGN),
        pytest.param("distillation mixed", "tp2", True, marks=_CAMPAIGN),
    ],
)
def test_a_server_gets_each_tensor(name: str, layout: str, adapters: bool, tmp_path: Path) -> None:
    """Or adapters in files, if it takes these."""
    job = JOBS[name]
    _write_model(job, tmp_path)
    with StandInServer(model_of(job, seed=8), takes_adapters=adapters) as server:
        with_client(job, str(tmp_path / "plain"), None, server.url)
        theirs = server.updates
    with StandInServer(model_of(job, seed=8), takes_adapters=adapters) as server:
        run_on_ranks(2, with_client, job, str(tmp_path / layout), layout, server.url, timeout_s=300.0)
        assert len(server.updates) == len(theirs) == 4 == server.calls.count("/resume")
        for ours, plain in zip(server.updates, theirs, strict=True):
            assert ours.keys() == plain.keys() and any("lora_A" in key for key in ours) == adapters
            assert all(torch.allclose(ours[key], plain[key], atol=1e-4) for key in ours)


# ----- bad input -----


def fails(job: Job, folder: str, layout: str, **given: Any) -> str:
    """Return in what error a training ends on this rank."""
    with pytest.raises(ServerError) as error:
        train(job, folder, layout, **given)
    return str(error.value)


def fails_with_client(job: Job, folder: str, layout: str, url: str) -> str:
    """Return in what error a training with TRL's client ends on this rank."""
    with pytest.raises(ServerError) as error:
        with_client(job, folder, layout, url)
    return str(error.value)


def fails_with_dead_worker(job: Job, folder: str, layout: str) -> str:
    """Return in what error a training ends on this rank, of whose worker nothing comes."""
    return fails(job, folder, layout, rollout_worker=Rollouts(job.kind, dies=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=_CAMPAIGN)])
def test_what_fails_outside_is_said_on_all_ranks(layout: str, tmp_path: Path) -> None:
    job = dataclasses.replace(JOBS["grpo"], arguments={"heartbeat_stale_after_s": 1.0})
    _write_model(job, tmp_path)
    folder = str(tmp_path / layout)

    def said(function: Any, *given: Any, **options: Any) -> str:
        one, other = run_on_ranks(2, function, job, folder, layout, *given, timeout_s=300.0, **options)
        assert one == other and "\n" not in one, "one sentence, the same on all ranks"
        return one

    dead = "the rollout worker failed in check_health: the worker's child is gone; look at its log, and go on from the "
    assert said(fails_with_dead_worker) == f"{dead}newest checkpoint"
    for place, method in {0: "send_weights", 5: "send_weights", "/pause?mode=keep": "pause"}.items():
        with StandInServer(model_of(job), dies_at=place) as server:
            assert f"failed in {method}" in said(fails_with_client, server.url)
    with StandInServer(model_of(dataclasses.replace(job, sizes={"intermediate_size": 36}))) as server:
        assert "the transfer of weights failed in send_weights" in said(fails_with_client, server.url)
