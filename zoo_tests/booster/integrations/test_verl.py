"""The engine for verl: an update of a policy under a layout is that of plain torch.

It runs against verl's own `BaseEngine`, registry, micro-batches and losses, and is skipped where verl is not installed.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen3Config, Qwen3MoeConfig

from zoo_tests.harness.ranks import run_on_ranks

pytest.importorskip("verl", reason="verl is not installed")
pytestmark = pytest.mark.slow

TOLERANCE = 1e-7  # Qwen3's norms round to fp32
PROMPTS, RESPONSES = (3, 5, 1, 4, 2, 6), (4, 2, 7, 1, 5, 3)
TEMPERATURE, ENTROPY, CLIP, NORM = 0.7, 0.05, (0.1, 0.3, 3.0), 0.3
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "dp2": {},
    "dp2zero3": {"zero_stage": 3},
    "dp2offload": {"param_offload": True, "optimizer_offload": True},
    "cp2": {"cp_size": 2},
    "tp2pp2": {"tp_size": 2, "pp_size": 2},
    "pp2ep2": {"pp_size": 2, "ep_size": 2},
}
IN_PIECES = {"tp2", "dp2", "pp2", "pp2ep2"}  # of which a rank has one of each weight
RANKS = {"plain": 1, "tp2pp2": 4, "pp2ep2": 4}


def tiny(kind: str) -> Any:
    """Return a model with perturbed norms and a vocabulary that no layout divides."""
    sizes = {
        "vocab_size": 71,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "initializer_range": 0.2,
        "attention_bias": True,
        "tie_word_embeddings": kind in {"qwen3", "lora"},
    }
    config = Qwen3Config(**sizes)
    if kind == "moe":
        config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=10)
    config._experts_implementation = "eager"  # others know no fp64
    torch.manual_seed(3)
    kinds = AutoModelForTokenClassification if kind == "values" else AutoModelForCausalLM
    if kind == "values":
        config.num_labels, config.classifier_dropout = 1, 0.0
    model = kinds.from_config(config).double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn_like(param))
        if kind == "lora":
            modules = ["q_proj", "v_proj", "down_proj"]
            model = get_peft_model(model, LoraConfig(r=3, target_modules=modules, task_type=TaskType.CAUSAL_LM))
            for param in model.parameters():
                param.add_(0.05 * torch.randn_like(param) if param.requires_grad else 0)
    return model


def sequences() -> list[dict[str, Tensor]]:
    """Return ragged sequences with what a policy's loss reads of each response."""
    torch.manual_seed(5)
    made = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        mask = (torch.rand(response) > 0.25).long()
        mask[0] = 1
        made.append(
            {
                "input_ids": torch.randint(0, 71, (prompt + response,)),
                "response_mask": mask,
                "advantages": torch.randn(response, dtype=torch.float64),
                "old_log_probs": -4 + torch.randn(response, dtype=torch.float64),
                "values": torch.randn(response, dtype=torch.float64),
                "returns": torch.randn(response, dtype=torch.float64),
            }
        )
    return made


def batch_of(rows: list[dict[str, Tensor]], prompts: tuple[int, ...], **settings: Any) -> Any:
    """Return the rows of a replica as verl's jagged TensorDict."""
    from verl.utils import tensordict_utils

    def jagged(values: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    ids = [row["input_ids"] for row in rows]
    data = {name: jagged([row[name] for row in rows]) for name in rows[0]}
    data["prompts"] = jagged([each[:size] for each, size in zip(ids, prompts, strict=True)])
    data["responses"] = jagged([each[size:] for each, size in zip(ids, prompts, strict=True)])
    data["position_ids"] = jagged([torch.arange(len(each)) for each in ids])
    data["loss_mask"] = data["response_mask"]
    return tensordict_utils.get_tensordict(data, settings)


def worker_config(folder: str, layout: str, kind: str, **more: Any) -> Any:
    """Return what verl's worker is made of."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    from booster.integrations.verl import HybridBoosterEngineConfig

    lora = {"lora_rank": 3, "lora_adapter_path": f"{folder}/adapter", "lora": {"merge": True}}
    return TrainingWorkerConfig(
        model_type="value_model" if kind == "values" else "language_model",
        model_config=HFModelConfig(
            path=folder,
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa", "_experts_implementation": "eager"},
            enable_gradient_checkpointing=kind == "qwen3",
            **(lora if kind == "lora" else {}),
        ),
        engine_config=HybridBoosterEngineConfig(**LAYOUTS[layout], dtype="float32", model_dtype="fp64", **more),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=NORM, total_training_steps=4),
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    )


def engine_of(folder: str, layout: str, kind: str) -> Any:
    """Return an initialised engine from verl's registry."""
    from verl.workers.engine.base import EngineRegistry

    config = worker_config(folder, layout, kind)
    with mock.patch.dict(os.environ, VERL_ENGINE_DEVICE="cpu"):
        engine = EngineRegistry.new(
            config.model_type,
            "hybrid_booster",
            model_config=config.model_config,
            engine_config=config.engine_config,
            optimizer_config=config.optimizer_config,
            checkpoint_config=config.checkpoint_config,
        )
    engine.initialize()
    return engine


def policy_loss() -> Any:
    """Return verl's own loss of a policy."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    low, high, dual = CLIP
    config = ActorConfig(
        strategy="hybrid_booster",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
        entropy_coeff=ENTROPY,
    )
    return partial(ppo_loss, config)


def job_of(engine: Any, kind: str, packs: bool) -> tuple[slice, Any, Any]:
    """Return which sequences this replica has, its batch, and verl's loss."""
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss

    own = slice(engine.get_data_parallel_rank(), None, engine.get_data_parallel_size())
    data = batch_of(
        sequences()[own],
        PROMPTS[own],
        temperature=TEMPERATURE,
        calculate_entropy=True,
        calculate_sum_pi_squared=True,
        global_batch_size=len(PROMPTS),
        use_dynamic_bsz=packs,
        max_token_len_per_gpu=13,
        micro_batch_size_per_gpu=1,
        use_remove_padding=packs,
    )
    loss = policy_loss()
    if kind == "values":
        config = CriticConfig(strategy="hybrid_booster", ppo_micro_batch_size_per_gpu=1, cliprange_value=0.5)
        loss = partial(value_loss, config)
    return own, data, loss


def updated(folder: str, layout: str, kind: str, packs: bool = True, resume: str | None = None) -> dict[str, Any]:
    """Infer, train a step through verl's loss and save, on one rank; or go on from what another layout saved."""
    engine = engine_of(folder, layout, kind)
    own, data, loss = job_of(engine, kind, packs)
    with mock.patch("verl.utils.seqlen_balancing.get_device_name", return_value="cpu"):
        if resume is not None:
            engine.load_checkpoint(resume)
        with engine.eval_mode():
            inferred = engine.infer_batch(data)["model_output"]
        before = {name: each.bfloat16() for name, each in engine.get_per_tensor_param()[0]}
        engine.prime_delta_snapshots()
        with engine.train_mode():
            engine.optimizer_zero_grad()
            outputs = engine.forward_backward_batch(data, loss)
            gradients = {name: each.clone() for name, each in engine.optimizer.full_gradients().items()}
            norm = engine.optimizer_step()
        rate = engine.lr_scheduler_step()
    weights = {name: each.clone() for name, each in engine.get_per_tensor_param()[0]}
    saved = str(Path(folder) / f"saved_{layout}")
    if resume is None:
        engine.save_checkpoint(saved)
    return {
        "speaks": engine.is_mp_src_rank_with_outputs(),
        "rows": list(range(len(PROMPTS)))[own],
        "inferred": {name: list(each.unbind()) for name, each in inferred.items()},
        "loss": sum(outputs["loss"]),
        "metrics": sorted(outputs["metrics"]),
        "gradients": gradients,
        "norm": norm,
        "rate": rate,
        "weights": weights,
        "saved": saved,
        "before": before,
        "changes": [
            (slots[0][0], places, values)
            for slots, _, _, places, values, _ in engine.get_per_tensor_param_delta_shard()[0]
        ]
        if layout in IN_PIECES
        else [],
        "pieces": [
            (name, values, spec.place, spec.contributes, spec.full_shape)
            for name, values, spec in engine.get_per_tensor_param_shard()[0]
        ]
        if layout in IN_PIECES
        else [],
    }


def plain_update(kind: str, steps: int = 1) -> dict[str, Any]:
    """Compute the same in one process, each sequence by itself, with the loss written out."""
    model = tiny(kind).train()
    trained = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    tokens = sum(int(row["response_mask"].sum()) for row in sequences())
    for _ in range(steps):
        trained.zero_grad()
        inferred: dict[str, list[Tensor]] = {}
        loss = torch.zeros((), dtype=torch.float64)
        for row, prompt in zip(sequences(), PROMPTS, strict=True):
            logits, ids = model(input_ids=row["input_ids"][None]).logits[0], row["input_ids"]
            mask = row["response_mask"]
            if kind == "values":
                values = logits.squeeze(-1)
                inferred.setdefault("values", []).append(values.detach())
                values = values[prompt - 1 : -1]
                clipped = torch.clamp(values, row["values"] - 0.5, row["values"] + 0.5)
                worst = torch.maximum((values - row["returns"]) ** 2, (clipped - row["returns"]) ** 2)
                loss = loss + 0.5 * (worst * mask).sum() / tokens
                continue
            every = (logits / TEMPERATURE).log_softmax(-1)
            chosen = every[:-1].gather(-1, ids[1:, None]).squeeze(-1)
            entropy, squares = -(every.exp() * every).sum(-1), (2 * every).exp().sum(-1)
            found = {"log_probs": chosen, "entropy": entropy, "sum_pi_squared": squares}
            for name, each in found.items():
                inferred.setdefault(name, []).append(each.detach())
            ratio, (low, high, dual) = (chosen[prompt - 1 :] - row["old_log_probs"]).exp(), CLIP
            gain = row["advantages"]
            clipped = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - low, 1 + high))
            clipped = torch.where(gain < 0, torch.minimum(clipped, -gain * dual), clipped)
            loss = loss + ((clipped - ENTROPY * entropy[prompt - 1 : -1]) * mask).sum() / tokens
        loss.backward()
        gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        trained.step()
    return {
        "inferred": inferred,
        "loss": float(loss.detach()),
        "gradients": gradients,
        "norm": float(norm),
        "model": model,
    }


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    kind = request.node.callspec.params["kind"]
    model = tiny(kind)
    if kind == "lora":
        model.save_pretrained(tmp_path / "adapter")
        model = tiny("qwen3")
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(tmp_path)
    return str(tmp_path)


def check_same(
    results: list[dict[str, Any]], plain: dict[str, Any], folder: Path, tolerance: float = TOLERANCE
) -> None:
    """Compare what the ranks found with one plain process."""
    speakers = [each for each in results if each["speaks"]]
    assert sorted(row for each in speakers for row in each["rows"]) == list(range(len(PROMPTS)))
    for each in speakers:
        assert each["metrics"]
        for name, expected in plain["inferred"].items():
            for row, found in zip(each["rows"], each["inferred"][name], strict=True):
                torch.testing.assert_close(found[: len(expected[row])], expected[row], rtol=0, atol=tolerance)
    assert sum(each["loss"] for each in speakers) / len(speakers) == pytest.approx(plain["loss"], abs=tolerance)
    gradients: dict[str, Tensor] = {}
    for each in results:
        gradients |= each["gradients"]
        assert each["norm"] == pytest.approx(plain["norm"], rel=tolerance)
    tied = getattr(plain["model"], "all_tied_weights_keys", {})  # the last stage has a copy
    assert {tied.get(name, name) for name in gradients} == plain["gradients"].keys()
    for name, found in gradients.items():
        expected = plain["gradients"][tied.get(name, name)]
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * plain["norm"], msg=name)
    model = plain["model"]
    model = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    for each in results:
        check_weights(each["weights"], model, folder)
    check_pieces(results)


def check_weights(weights: dict[str, Tensor], model: Any, folder: Path) -> None:
    """Load streamed weights into a plain model, as an engine of rollouts does, and compare logits and weights."""
    model.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    loaded, told = type(model).from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    loaded.config._experts_implementation = "eager"
    ids = sequences()[2]["input_ids"][None]
    with torch.no_grad():
        logits = [each.eval()(input_ids=ids).logits for each in (loaded, model)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    for name, each in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], each, rtol=0, atol=1e-5, msg=name)


def check_pieces(results: list[dict[str, Any]]) -> None:
    """Put the pieces of all ranks together, each element once."""
    names = [[piece[0] for piece in each["pieces"]] for each in results]
    assert all(each == names[0] for each in names)
    for index, name in enumerate(names[0]):
        whole = results[0]["weights"][name].bfloat16()
        found, seen = torch.zeros_like(whole), torch.zeros(whole.shape, dtype=torch.int)
        for each in results:
            _, values, place, contributes, shape = each["pieces"][index]
            assert tuple(shape) == tuple(whole.shape)
            if contributes:
                where = tuple(
                    slice(start, start + size)
                    for start, size in zip(place.global_offset, place.local_shape, strict=True)
                )
                found[where] = values.view(place.local_shape)
                seen[where] += 1
        assert bool((seen == 1).all()), name
        assert torch.equal(found, whole), name
    changed = results[0]["before"]
    for each in results:
        for name, places, values in each["changes"]:
            changed[name].view(-1)[places] = values
    for name in names[0]:
        assert torch.equal(changed[name], results[0]["weights"][name].bfloat16()), name


@pytest.mark.parametrize(
    ("kind", "layout", "packs"),
    [
        ("qwen3", "plain", True),
        ("qwen3", "tp2", True),
        ("qwen3", "pp2", True),
        ("qwen3", "pp2", False),
        ("qwen3", "dp2", True),
        ("qwen3", "dp2zero3", True),
        ("qwen3", "dp2offload", True),
        ("qwen3", "cp2", True),
        ("qwen3", "tp2pp2", True),
        ("moe", "pp2ep2", True),
        ("values", "pp2", True),
        ("values", "tp2", True),
        ("lora", "tp2", True),
        ("lora", "pp2", True),
    ],
)
def test_an_update_is_that_of_plain_torch(folder: str, kind: str, layout: str, packs: bool) -> None:
    results = run_on_ranks(RANKS.get(layout, 2), updated, folder, layout, kind, packs)
    check_same(results, plain_update(kind), Path(folder) / "streamed")


@pytest.mark.parametrize(("kind", "layout", "other"), [("qwen3", "tp2", "pp2")])
def test_another_layout_goes_on(folder: str, kind: str, layout: str, other: str) -> None:
    (saved, *_) = {each["saved"] for each in run_on_ranks(2, updated, folder, layout, kind)}
    results = run_on_ranks(2, updated, folder, other, kind, resume=saved)
    check_same(results, plain_update(kind, steps=2), Path(folder) / "streamed", 1e-5)
    assert type(AutoModelForCausalLM.from_pretrained(f"{saved}/huggingface")).__name__ == "Qwen3ForCausalLM"


def worked(folder: str, layout: str) -> dict[str, list[float]] | None:
    """Train two epochs in verl's own worker, as far as that runs without a GPU; return its metrics."""
    from verl.utils import tensordict_utils
    from verl.workers import engine_workers

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "VERL_ENGINE_DEVICE": "cpu"}
    config = worker_config(folder, layout, "qwen3", use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    with (
        mock.patch.dict(os.environ, place),
        mock.patch.object(engine_workers, "get_device_name", return_value="cpu"),
        mock.patch.object(engine_workers, "get_torch_device"),
    ):
        worker = engine_workers.TrainingWorker(config)
        worker.reset()
        worker.set_loss_fn(policy_loss())
        worker.flops_counter = None  # it asks the GPU for its name
        own = slice(worker.engine.get_data_parallel_rank(), None, worker.engine.get_data_parallel_size())
        data = batch_of(sequences()[own], PROMPTS[own], temperature=TEMPERATURE, global_batch_size=len(PROMPTS))
        tensordict_utils.assign_non_tensor(data, mini_batch_size=len(PROMPTS), epochs=2)
        output = worker.train_mini_batch(data)
    if output is None:
        return None
    metrics = tensordict_utils.get(output, "metrics")
    return {name: list(map(float, each)) for name, each in metrics.items() if not name.startswith("perf/")}


@pytest.mark.parametrize("kind", ["qwen3"])
def test_verls_worker_trains(folder: str, kind: str) -> None:
    """Metrics of verl's worker are those of one process, and come from the rank that has them."""
    (plain,) = run_on_ranks(1, worked, folder, "plain")
    assert len(plain["grad_norm"]) == 2 and plain["lr"] == [0.01]
    for layout, speakers in {"pp2": 1, "tp2": 1, "dp2": 2}.items():
        found = [each for each in run_on_ranks(2, worked, folder, layout) if each is not None]
        assert len(found) == speakers
        for each in found:
            for name in plain:
                assert each[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-6), name
