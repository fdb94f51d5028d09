"""What other code does to a model before and after `boost`: the numbers of the plain script, or one sentence.

What breaks here first: an engine of another library that asks a model for another name before it wraps it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from booster import Booster, ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin, guards
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.train_sharded import Boosted, boost

RECIPE = Recipe(family="llama", head="causal_lm", precision="fp32", steps=1)


def _boosted(layout: str, **options: Any) -> Boosted:
    return boost(Case(recipe=RECIPE, layout=layout, options=tuple(options.items())))


def _refuses(words: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ConfigurationError, match=words):
        call(*args, **kwargs)


# ----- wrapped after boost -----


class _AroundIt(nn.Module):
    """As Lightning's modules hold a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def _wrap(layout: str) -> None:
    boosted = _boosted(layout)
    model, optimizer = boosted.model, boosted.optimizer
    mesh = init_device_mesh("cpu", (2,))
    _refuses("DistributedDataParallel cannot take", DistributedDataParallel, model)
    _refuses("DataParallel cannot take", model._replicate_for_data_parallel)  # of each replica, on GPUs alone
    _refuses("torch.compile cannot trace", torch.compile, model, backend="eager")
    _refuses("torch.compile cannot trace", model.compile)
    _refuses("boost a model once", boosted.booster.boost, model)
    plain = model.unwrap()
    _refuses("that was boosted before; boost a model once", boosted.booster.boost, plain)
    _refuses(r"boosted before \(at model\)", boosted.booster.boost, _AroundIt(plain))
    for copied in (copy.deepcopy, pickle.dumps):
        _refuses(r"cannot be copied or pickled; use booster.save_optimizer", copied, optimizer)
    with torch.device("meta"):
        _refuses("default device of torch is 'meta'", boosted.booster.boost, nn.Linear(2, 2))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    _refuses("precision='fp16'", scaler.step, optimizer)
    if layout == "dp2":
        around = DistributedDataParallel(_AroundIt(model))
        _refuses("DistributedDataParallel cannot take", around, **boosted.share(RECIPE.batch(0)))
    _refuses("FSDP cannot take", fully_shard, model, mesh=mesh)  # the last: it has cut the weights by then


@pytest.mark.parametrize("layout", ["dp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_engines_around_a_boosted_model_are_refused(layout: str) -> None:
    run_on_ranks(2, _wrap, layout)


def _train_by_others(directory: str) -> None:
    from accelerate import Accelerator, PartialState
    from transformers import Trainer, TrainingArguments

    boosted = _boosted("dp2")
    options = TrainingArguments(output_dir=directory, use_cpu=True, report_to=[])
    for device in ("cpu:0", "cpu"):  # by what has been launched before
        PartialState().device = torch.device(device)
        _refuses("Trainer cannot take", Trainer, model=boosted.model, args=options)
    accelerator = Accelerator(cpu=True)
    _refuses("Accelerator.prepare cannot take", accelerator.prepare, boosted.model)
    _refuses("Accelerator.prepare cannot take", accelerator.prepare, boosted.optimizer)
    model = RECIPE.model()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    _refuses("give the one inside, optimizer.optimizer", boosted.booster.boost, model, optimizer)


@pytest.mark.slow
def test_trainers_of_other_libraries_are_refused(tmp_path: Path) -> None:
    run_on_ranks(2, _train_by_others, str(tmp_path))


# ----- changed and saved after boost -----


def _change_and_save(layout: str, directory: str) -> None:
    boosted = _boosted(layout)
    model, plain = boosted.model, RECIPE.model()
    changes = ("resize_token_embeddings", "init_weights", "tie_weights", "set_input_embeddings")
    for name in (*changes, "set_attn_implementation"):
        _refuses(f"{name}.* call it before boost", getattr(model, name), 7)
    _refuses("convert the model before boost", model.half)
    _refuses("convert the model before boost", model.to, torch.float64)
    places = [weight.data_ptr() for weight in model.parameters()]
    for device in ("cpu", "cpu:0"):  # as accelerate calls it, depending on what has been launched
        assert model.to(device).dtype == torch.float32, "nothing to convert"
    assert places == [weight.data_ptr() for weight in model.parameters()]
    _refuses("convert the model before boost", model.to_empty, device="cpu")
    _refuses("cannot be pickled", pickle.dumps, model)
    if layout != "dp2":
        _refuses("leave it out, on all ranks", model.save_pretrained, directory, state_dict=model.module.state_dict())
        state = copy.deepcopy(model.state_dict())  # of the best epoch, say
        model.load_state_dict(state)
        _refuses("booster.save_model.*on all ranks", torch.save, state, f"{directory}/model.pt")
        _refuses("booster.save_model.*on all ranks", torch.save, model.module.state_dict(), f"{directory}/model.pt")
        _refuses("booster.save_model.*on all ranks", save_file, state, f"{directory}/model.safetensors")
        assert not Path(directory, "model.safetensors").exists()
        with mock.patch.object(guards._log, "warning") as warned:
            guards._warn_of_local_state.cache_clear()
            for _ in range(2):
                model.load_state_dict(model.state_dict())
                assert not warned.called, "torch reads it to load it"
            for _ in range(2):
                assert len({name: value.clone() for name, value in model.state_dict().items()}) == len(state)
            assert warned.call_count == 1 and "booster.save_model" in str(warned.call_args)
        model.load_state_dict(plain.state_dict())  # the whole model's, of which each rank takes its part
        return
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    state = {name: value * 2 for name, value in plain.state_dict().items()}
    model.load_state_dict(state)
    boosted.optimizer.step()  # without gradients: the optimizer's own copies are the loaded values
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    if boosted.plugin.dp_rank == 0:  # as scripts do; no other rank has to take part
        model.save_pretrained(directory)
        saved = type(plain).from_pretrained(directory).state_dict()
        assert all(torch.equal(saved[name], value) for name, value in state.items())


@pytest.mark.parametrize("layout", ["dp2", "tp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_changing_and_saving_a_boosted_model(layout: str, tmp_path: Path) -> None:
    run_on_ranks(2, _change_and_save, layout, str(tmp_path))


def _recompute_later(layout: str) -> None:
    boosted, plain = _boosted(layout), RECIPE.model()
    boosted.model.gradient_checkpointing_enable()
    loss = boosted.pipeline_backward(boosted.share(RECIPE.batch(0)))
    expected = plain(**RECIPE.batch(0)).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    _check_gradients(boosted, plain, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
def test_recomputation_that_is_turned_on_after_boost(layout: str) -> None:
    run_on_ranks(2, _recompute_later, layout)


# ----- wrapped before boost -----


def _boost_wrapped() -> None:
    mesh = init_device_mesh("cpu", (2,))
    booster = Booster(HybridParallelPlugin(tp_size=2))
    whole = Recipe(family="bert", head="sequence").model
    _refuses("a model in DistributedDataParallel", booster.boost, DistributedDataParallel(whole()))
    _refuses("a model in DataParallel", booster.boost, DataParallel(whole()))
    _refuses("a DTensor", booster.boost, fully_shard(whole(), mesh=mesh))
    spread = whole()
    spread.hf_device_map = {"bert": 0, "classifier": "cpu"}
    _refuses("device_map has spread the model over 0, cpu", booster.boost, spread)


@distributed(2)
def test_models_that_another_engine_holds_are_refused() -> None:
    _boost_wrapped()


def _boost_compiled(how: str, directory: str) -> None:
    model = RECIPE.model()
    names = list(model.state_dict())
    if how == "children":
        model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    given = torch.compile(model, backend="eager") if how == "whole" else model
    booster = Booster(HybridParallelPlugin(tp_size=2))
    boosted, optimizer = booster.boost(given, torch.optim.SGD(given.parameters(), lr=0.3))
    loss = booster.execute_pipeline(iter([RECIPE.batch(0)]), boosted, optimizer=optimizer).loss
    torch.testing.assert_close(loss, RECIPE.model()(**RECIPE.batch(0)).loss.detach())
    assert not boosted.is_whole and set(optimizer.full_gradients()) == set(names)
    assert boosted.unwrap()._compiled_call_impl is None
    booster.save_model(boosted, directory)
    assert set(type(RECIPE.model()).from_pretrained(directory).state_dict()) == set(names)


@pytest.mark.parametrize(
    "how", ["whole", *(pytest.param(how, marks=pytest.mark.slow) for how in ("children", "in place"))]
)
def test_compiled_models_are_sharded_as_they_were(how: str, tmp_path: Path) -> None:
    run_on_ranks(2, _boost_compiled, how, str(tmp_path))


def _call_in_compiled_functions(layout: str) -> None:
    boosted = _boosted(layout)
    model, booster, optimizer, batch = boosted.model, boosted.booster, boosted.optimizer, RECIPE.batch(0)
    words = "torch.compile cannot trace .*compile_layers=True"
    with torch._dynamo.config.patch(disable=False):
        call = torch.compile(lambda given: model(**given).loss, backend="eager")
        step = torch.compile(
            lambda given: booster.execute_pipeline(iter([given]), model, optimizer=optimizer).loss, backend="eager"
        )
        _refuses(words, call, batch)
        _refuses(words, step, batch)
    booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)


@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_a_compiled_function_that_calls_the_model_is_refused(layout: str) -> None:
    run_on_ranks(2, _call_in_compiled_functions, layout)


# ----- autocast -----


def _check_gradients(boosted: Boosted, plain: nn.Module, tolerance: float) -> None:
    """By the norm of each difference: single entries of sums in bf16 say little."""
    found = boosted.optimizer.full_gradients()
    assert found
    for name, gradient in found.items():
        expected = plain.get_parameter(name).grad
        error = torch.linalg.vector_norm(gradient - expected) / torch.linalg.vector_norm(expected)
        assert error < tolerance, f"{name}: {error:.2e}"


def _autocast(layout: str, options: dict[str, Any], loop: str) -> None:
    boosted, plain, batch = _boosted(layout, **options), RECIPE.model(), RECIPE.batch(0)
    products: set[torch.dtype] = set()
    for name, module in boosted.model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            module.register_forward_hook(lambda _, __, output: products.add(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(**batch).loss
        if loop == "pipeline":
            loss = boosted.pipeline_backward(boosted.share(batch))
        else:
            loss = boosted.model(**boosted.share(batch)).loss
    expected.backward()
    if loop == "ordinary":
        boosted.booster.backward(loss, boosted.optimizer)
    assert products == {torch.bfloat16}
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=2e-4, atol=0)
    _check_gradients(boosted, plain, 3e-2)
    boosted.finish_step()
    # Off again: messages between stages are of another precision.
    after = boosted.booster.execute_pipeline(iter([boosted.share(batch)]), boosted.model).loss
    with torch.no_grad():
        for param in plain.parameters():
            param -= 0.3 * (0.5 if param.dim() <= 1 else 1.0) * param.grad
    torch.testing.assert_close(after, plain(**batch).loss.detach(), rtol=1e-3, atol=0)


_AUTOCAST = [
    ("dp2", {}, "ordinary"),
    ("tp2", {}, "ordinary"),
    ("pp2", {}, "pipeline"),
    ("cp2", {}, "pipeline"),
    ("tp2", {"enable_sequence_parallelism": True, "enable_sequence_overlap": True}, "pipeline"),
    ("tp2", {"enable_all_optimization": True}, "pipeline"),
    ("pp2", {"pp_style": "zero_bubble"}, "pipeline"),
]


@pytest.mark.parametrize(
    ("layout", "options", "loop"),
    [pytest.param(*each, marks=[] if number < 3 else pytest.mark.slow) for number, each in enumerate(_AUTOCAST)],
)
def test_autocast_is_honoured(layout: str, options: dict[str, Any], loop: str) -> None:
    run_on_ranks(LAYOUTS[layout].world_size, _autocast, layout, options, loop)
