"""`auto_accelerate`: strategies in every form train to the numbers of plain training, and without one it finds one.

What breaks here first: a method's settings, or a layout that is tried. Look in `plugins/hybrid_parallel/auto/`.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import booster
from booster import launch_from_torch
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import DeepSpeed3DParallelConfig, auto_accelerate
from plugins.hybrid_parallel.compat.auto_accelerate import plugin_of
from zoo_tests.harness.ranks import run_on_ranks

_STEPS, _ROWS, _LENGTH, _VOCAB = 3, 8, 12, 97


class _Text(Dataset):
    """Different texts, with ignored labels at different places."""

    def __len__(self) -> int:
        return _STEPS * _ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(_VOCAB, (_LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": torch.where(torch.arange(_LENGTH) < 3 + index % 7, ids, -100)}


def _model() -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=_VOCAB,
        max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _plain() -> list[float]:
    model, data, losses = _model(), _Text(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(_STEPS):
        samples = [data[step * _ROWS + row] for row in range(_ROWS)]
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _train(strategy: Any, path: str | None = None, **options: Any) -> tuple[list[float], Any, dict[str, Any]]:
    status, result, best = auto_accelerate(
        _model(),
        torch.optim.AdamW,
        _Text(),
        optim_args={"lr": 0.01},
        dataloader_args={"batch_size": _ROWS},
        load_strategy=strategy,
        save_strategy_to_file=path,
        **options,
    )
    assert status
    batches = iter(result.dataloader)
    losses = [result.train_step(batches).item() for _ in range(_STEPS)]
    assert result.prepare_input({"x": torch.zeros(1)})["x"].device == result.plugin.grid.device
    return losses, best, result.args


_GROUPS = ([("tensor", 2), ("data", 1), ("pipeline", 2)], None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        {"mode": "hybrid", "sharding_size": 2, "stage_cnt": 2, "accum_degree": 2},
        {"tp_size": 2, "pp_size": 1, "zero_stage": 1, "enable_sequence_parallelism": True},
        [("parallel_mode", _GROUPS), "module_replace", ("checkpoint", None), "zero1"],
        [("parallel_mode", _GROUPS), ("deepspeed_3d_parallel", DeepSpeed3DParallelConfig())],
    ],
)
def test_a_strategy_is_applied(strategy: Any) -> None:
    losses, best, _ = run_on_ranks(4, _train, strategy)[0]
    assert losses == pytest.approx(_plain(), rel=1e-5)
    assert type(best) is type(strategy)


def _search(path: Path) -> None:
    """Find a strategy, and then find that none is left.

    Planned for a device by its name: measuring this machine beside other tests would take long.
    """
    # The planner starts a process, which daemons such as the pool's ranks may not.
    multiprocessing.current_process()._config["daemon"] = False
    launch_from_torch(seed=3)
    options: dict[str, Any] = {"device": "H100", "precision": "fp32", "num_candidates": 3, "num_steps": 1}
    report = _train(None, str(path / "strategy.json"), **options)
    status = auto_accelerate(
        _model(),
        torch.optim.AdamW,
        _Text(),
        dataloader_args={"batch_size": _ROWS},
        excluded=lambda options: True,
        **options,
    )
    assert status == (False, None, None)
    (path / f"{dist.get_rank()}.json").write_text(json.dumps(report))


@pytest.mark.slow
def test_without_one_the_fastest_that_is_tried_is_kept(tmp_path: Path) -> None:
    run_on_ranks(2, _search, tmp_path)
    path, plain = tmp_path / "strategy.json", _plain()
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for losses, best, args in reports:
        assert losses == pytest.approx(plain, rel=1e-5)
        assert best == json.loads(path.read_text()) == reports[0][1]
        tried = args["tried"]
        assert len(tried) == 3
        fastest = min((row for row in tried if row["measured"] is not None), key=lambda row: row["measured"])
        assert fastest["options"] == best
        assert len({(row["options"]["sharding_size"], row["options"]["stage_cnt"]) for row in tried}) > 1
    losses, best, _ = run_on_ranks(2, _train, str(path))[0]
    assert losses == pytest.approx(plain, rel=1e-5) and best == str(path)


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        (["native_dynamo"], "the method 'native_dynamo' is not available; use 'module_replace'"),
        (["moduel_replace"], "the method 'moduel_replace' is not known; use 'module_replace'"),
        ([("amp_native", {"dtype": "int8"})], "amp_native with dtype='int8' is not available; use 'fp16' or 'bf16'"),
        ([("amp_native", {"type": "bf16"})], "amp_native has no setting 'type'; use dtype and skip_if_nonfinite"),
        ([3], "3 is no method of a strategy"),
        (["tensor_parallel"], "tensor_parallel needs a size"),
        ([("parallel_mode", ([("expert", 2)], None))], "parallel_mode has no group 'expert'"),
        (["deepspeed_3d_parallel"], "deepspeed_3d_parallel also needs parallel_mode"),
        ({"tp_siz": 2}, "HybridParallelPlugin has no option 'tp_siz'; use tp_size"),
    ],
)
def test_a_strategy_is_refused_by_name(strategy: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        plugin_of(strategy)


def test_methods_are_options_of_the_plugin() -> None:
    plugin = plugin_of([("amp_native", {"dtype": torch.bfloat16, "skip_if_nonfinite": True}), "sequence_parallel",
                        ("tensor_parallel", {"size": 2}), ("checkpoint", 0.5)])  # fmt: skip
    expected = {"precision": "bf16", "nonfinite": "skip", "tp_size": 2, "gradient_checkpointing": 0.5}
    options = plugin.config.options()
    assert options.items() >= (expected | {"sequence_parallelism_mode": "all_to_all"}).items()
    assert plugin_of([("half", "bf16")]).config.mixed_precision.master_weights is False


def _with_objects(kind: str) -> list[float]:
    model = _model()
    given = {"optimizer": torch.optim.AdamW} if kind == "class" else {"optim_func": torch.optim.AdamW}
    if kind == "object":
        given = {"optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
    status, result, _ = booster.auto_accelerate(
        model,
        loss_func=lambda outputs, batch: (outputs.logits.float().square().sum(), outputs.logits.numel()),
        dataset=_Text(),
        dataloader_args={"batch_size": _ROWS},
        load_strategy={"tp_size": 2},
        lr_scheduler_cls=torch.optim.lr_scheduler.StepLR,
        lr_scheduler_args={"step_size": 1, "gamma": 0.5},
        **given,
        **({} if kind == "object" else {"optim_args": {"lr": 0.01}}),
    )
    assert status
    batches = iter(result.dataloader)
    losses = [result.train_step(batches).item() for _ in range(_STEPS)]
    assert result.lr_scheduler.get_last_lr() == [0.01 * 0.5**_STEPS]
    return losses


@pytest.mark.slow
def test_optimizers_in_every_form_and_a_loss_of_the_users_own() -> None:
    found = [run_on_ranks(2, _with_objects, kind)[0] for kind in ("object", "class", "function")]
    assert found[0] == found[1] == found[2]
    assert found[0][0] > found[0][-1] > 0


def test_an_optimizer_is_needed_once() -> None:
    with pytest.raises(ConfigurationError, match="needs optimizer or optim_func, and none is given; use one of them"):
        auto_accelerate(_model(), load_strategy={"tp_size": 1})
