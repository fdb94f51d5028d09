"""TRL's trainers that generate by vLLM, under layouts: server and engines get the weights, all ranks their completions.

What breaks here first: the names under which weights travel, ranks that do not hear of a failure. Look in
`booster/integrations/trl_server.py`.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from zoo_tests.booster.integrations.trl_jobs import Job, classes_of, differences, model_of, ranks_of, run
from zoo_tests.booster.integrations.vllm_server import StandInEngine, StandInServer, free_port, talking
from zoo_tests.harness.ranks import run_on_ranks

_LORA: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "up_proj"]}
_FEW = {"max_steps": 3, "beta": 0.04, "learning_rate": 5e-3, "eval_strategy": "steps", "eval_steps": 2}
_OTHERS = {"max_steps": 3, "learning_rate": 5e-3}
_BY_SGD = {"max_steps": 3, "learning_rate": 0.05, "optim": "sgd"}  # Adam scales up a gradient that is rounding alone
_LIVE = {"use_teacher_server": True, "teacher_model_kind": "live"}
JOBS = {
    "grpo": Job("grpo", _FEW),
    "grpo lora": Job("grpo", _FEW, adapters=_LORA),
    "grpo tied": Job("grpo", _FEW | {"loss_type": "grpo"}, family="qwen3", sizes={"tie_word_embeddings": True}),
    "grpo experts": Job("grpo", _FEW, family="mixtral", sizes={"intermediate_size": 36}),
    "rloo": Job("rloo", _FEW),
    "sdpo": Job("sdpo", _OTHERS),
    "sdft": Job("sdft", _OTHERS),
    "iw_opd": Job("iw_opd", _OTHERS, data="chats"),
    "gold": Job("gold", _OTHERS, data="chats"),
    "distillation": Job("distillation", _OTHERS),
    "online_dpo": Job("online_dpo", _BY_SGD),
    "online_dpo lora": Job("online_dpo", _BY_SGD, adapters=_LORA),
    "sdpo of a server": Job("sdpo", _OTHERS | _LIVE | {"distillation_mode": "sampled_token"}),
    "sdft of a server": Job("sdft", _OTHERS | _LIVE | {"distillation_mode": "topk_logits", "distillation_topk": 3}),
    "teacher": Job("server_distillation", _OTHERS | {"beta": 0.5, "gradient_accumulation_steps": 2}),
    "teacher's best": Job("server_distillation", _OTHERS | {"beta": 0.0, "loss_top_k": 3, "temperature": 0.8}),
}
_CAMPAIGN = pytest.mark.campaign
_SAMPLE = [("grpo", "tp2pp2"), ("grpo lora", "tp2"), ("online_dpo", "tp2"), ("sdpo of a server", "pp2")]
_REPLICATED = ("teacher's best", "online_dpo", "sdpo of a server", "sdft of a server")
_CASES = [
    pytest.param(name, layout, marks=() if (name, layout) in _SAMPLE else _CAMPAIGN)
    for name in JOBS
    for layout in ("tp2", "pp2", "tp2pp2")
]
_TOLERANCE = 1e-5
_MEANS_OF_MEANS = ("sampling/", "self_distillation/", "sdpo/", "sdft/")  # TRL's means of the means of processes


def _too_far(worst: dict[str, float], means: tuple[str, ...] = ()) -> dict[str, float]:
    own = {name: gap for name, gap in worst.items() if not name.removeprefix("eval_").startswith(means)}
    return {name: gap for name, gap in own.items() if gap > _TOLERANCE}


def served(job: Job, folder: str, layout: str | None, url: str, port: int) -> list[dict[str, Any]]:
    """Train with a server on this rank, or in this process; save the model each time that it is sent."""
    options = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_group_port": port}
    job = dataclasses.replace(job, arguments=job.arguments | options | {"vllm_server_timeout": 0.0})

    of_its_own = job.kind == "online_dpo"

    def save(trainer: Any) -> None:
        sender, name = (trainer, "_move_model_to_vllm") if of_its_own else (trainer.vllm_generation, "sync_weights")
        sync = getattr(sender, name)

        def sync_weights() -> None:
            sync()
            trainer.save_model(f"{folder}/sent-{trainer.state.global_step}")

        setattr(sender, name, sync_weights)

    classes_of(job.kind)
    with ExitStack() as stack:
        stack.enter_context(talking())
        if of_its_own:  # it asks for the number of a GPU
            on_cpu = lambda check_available=False: torch.device("cpu")  # noqa: E731
            stack.enter_context(patch.object(torch.accelerator, "current_accelerator", on_cpu))
        return run(job, folder, layout, before=save)


def _with_server(
    job: Job, folder: Path, layout: str | None = None
) -> tuple[list[list[dict[str, Any]]], list[dict[str, torch.Tensor]]]:
    """Return what each rank logs, and what the server got."""
    with StandInServer(model_of(job, seed=8)) as server, StandInServer(model_of(job, seed=4)) as teacher:
        if job.kind == "server_distillation":
            job = dataclasses.replace(job, arguments=job.arguments | {"teacher_model_server_url": teacher.url})
        given = (job, str(folder), layout, server.url, free_port())
        found = [served(*given)] if layout is None else run_on_ranks(ranks_of(layout), served, *given, timeout_s=300.0)
        assert server.calls.count("/reset_prefix_cache") == len(server.updates)
        return found, server.updates


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), _CASES)
def test_a_server_gets_each_tensor_and_all_ranks_its_completions(name: str, layout: str, tmp_path: Path) -> None:
    job = JOBS[name]
    [expected], plain = _with_server(job, tmp_path / "plain")
    histories, sent = _with_server(job, tmp_path / layout, layout)
    for history in histories:
        worst = differences(history, expected)
        assert {"loss", "eval_loss", "sampling/sampling_logp_difference/mean"} <= worst.keys() or job.kind != "grpo"
        assert not _too_far(worst)
    assert len(sent) == len(plain) >= 2
    for step, (found, theirs) in enumerate(zip(sent, plain, strict=True)):
        if name != "grpo experts":  # TRL sends those of a layer as one tensor
            assert {key: (each.shape, each.dtype) for key, each in found.items()} == {
                key: (each.shape, each.dtype) for key, each in theirs.items()
            }
            assert all(torch.allclose(found[key], theirs[key], atol=1e-4) for key in found)
        if job.adapters is None:
            files = (tmp_path / layout / f"sent-{step}").glob("*.safetensors")
            saved = {key: each for path in files for key, each in load_file(path).items()}
            assert saved.keys() == found.keys() and all(torch.equal(saved[key], found[key]) for key in saved)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "teacher", *(pytest.param(each, marks=_CAMPAIGN) for each in _REPLICATED)])
def test_replicas_get_their_completions(name: str, tmp_path: Path) -> None:
    # Over several steps, each replica would shuffle its own rows.
    given = {"eval_strategy": "no", "gradient_accumulation_steps": 1}
    job = dataclasses.replace(JOBS[name], arguments=JOBS[name].arguments | given)
    [expected], _ = _with_server(job, tmp_path / "plain")
    histories, _ = _with_server(job, tmp_path / "dp2", "dp2")
    for history in histories:
        worst = differences(history, expected)
        assert not {
            name: gap
            for name, gap in worst.items()
            if gap > _TOLERANCE and not name.removeprefix("eval_").startswith(_MEANS_OF_MEANS)
        }


def colocated(
    job: Job, folder: str, layout: str | None, size: int, shares: int = 1
) -> tuple[list[dict[str, Any]], list[dict[str, torch.Tensor]], list[str]]:
    """Train with engines of `size` ranks; return what is logged, what this rank's engine got, and when it slept."""
    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": size}
    job = dataclasses.replace(job, arguments=job.arguments | options)
    classes_of(job.kind)
    with talking(), patch.object(StandInEngine, "shares", shares), patch.dict(os.environ):
        history = run(job, folder, layout)
        [engine] = StandInEngine.made
    return history, engine.updates, engine.calls


_OTHER_ENGINES = [
    (name, layout, size)
    for name in ("sdpo", "sdft", "iw_opd", "gold", "distillation")
    for layout, size in (("tp2", 1), ("pp2", 2), ("dp2", 1))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "size"),
    [
        ("grpo", "tp2pp2", 2),
        ("grpo lora", "tp2", 1),
        *(pytest.param(*each, marks=_CAMPAIGN) for each in (("grpo experts", "pp2", 2), ("rloo", "dp2", 1))),
        *(pytest.param(*each, marks=_CAMPAIGN) for each in _OTHER_ENGINES),
    ],
)
def test_engines_of_the_ranks_get_each_tensor_and_share_the_prompts(
    name: str, layout: str, size: int, tmp_path: Path
) -> None:
    # Adam would make a step of a gradient that is rounding.
    given = {"vllm_enable_sleep_mode": size == 2, "optim": "sgd", "learning_rate": 0.05}
    job = dataclasses.replace(JOBS[name], arguments=JOBS[name].arguments | given)
    ranks = ranks_of(layout)
    expected, theirs, slept = colocated(job, str(tmp_path / "plain"), None, 1, shares=ranks // size)
    assert slept[:3] == (["sleep", "weights", "kv_cache"] if size == 2 else [])
    found = run_on_ranks(ranks, colocated, job, str(tmp_path / layout), layout, size, timeout_s=300.0)
    for history, updates, calls in found:
        worst = differences(history, expected)
        means = _MEANS_OF_MEANS if layout == "dp2" else ()
        assert not {
            name: gap
            for name, gap in worst.items()
            if gap > _TOLERANCE and not name.removeprefix("eval_").startswith(means)
        }
        assert calls == slept and len(updates) == len(theirs) >= 2
        for ours, plain in zip(updates, theirs, strict=True):
            if name != "grpo experts":  # TRL sends those of a layer as one tensor
                assert ours.keys() == plain.keys()
                assert all(torch.allclose(ours[key], plain[key], atol=1e-4) for key in plain)


# ----- bad input -----


def fails(job: Job, folder: str, layout: str, url: str, port: int) -> str:
    """Return in what error a training ends on this rank."""
    with pytest.raises((RuntimeError, ValueError)) as error:
        served(job, folder, layout, url, port)
    return str(error.value)


def _failure(job: Job, folder: Path, url: str) -> str:
    one, other = run_on_ranks(2, fails, job, str(folder), "tp2", url, free_port(), timeout_s=300.0)
    assert one == other and "\n" not in one and len(one) < 700, "one sentence, the same on all ranks"
    return one


def fails_on_a_rank(job: Job, folder: str) -> str:
    """Return in what error a training ends on this rank, of whose engines one fails."""

    def load_weights(engine: StandInEngine, tensors: Any) -> None:
        if dist.get_rank() == 1:
            raise KeyError("lm_head.weight")

    with patch.object(StandInEngine, "load_weights", load_weights), pytest.raises(RuntimeError) as error:
        colocated(job, folder, "tp2", 1)
    return str(error.value)


@pytest.mark.slow
def test_an_engine_that_fails_is_said_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    model_of(JOBS["grpo"], seed=4).save_pretrained(tmp_path / "reference")
    said = run_on_ranks(2, fails_on_a_rank, JOBS["grpo"], str(tmp_path / "failing"), timeout_s=300.0)
    expected = "the vLLM engine of rank 1 failed in load_weights: 'lm_head.weight'; look at its log, or use "
    assert said == [f"{expected}vllm_mode='server'"] * 2


@pytest.mark.slow
def test_a_server_that_is_away_has_another_model_or_dies_is_said_on_all_ranks(tmp_path: Path) -> None:
    job, away = JOBS["grpo"], f"http://127.0.0.1:{free_port()}"
    (tmp_path / "reference").mkdir()
    model_of(job, seed=4).save_pretrained(tmp_path / "reference")
    said = _failure(job, tmp_path / "away", away)
    assert said.startswith(f"the vLLM server at {away} failed in connect: The vLLM server can't be reached")
    other = dataclasses.replace(job, sizes={"intermediate_size": 36})
    with StandInServer(model_of(other)) as server:
        said = _failure(job, tmp_path / "other", server.url)
    assert "which serves 'stand-in', failed in update_named_params" in said
    for place, method in {0: "update_named_params", 5: "update_named_params", "/v1/completions": "generate"}.items():
        with StandInServer(model_of(job), dies_at=place) as server:
            said = _failure(job, tmp_path / "dying", server.url)
            assert f"failed in {method}" in said and said.endswith("go on from the newest checkpoint")
            assert len(server.updates) == (method == "generate")
