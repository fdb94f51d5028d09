"""Rows of `docs/boosted_model.md`: what a model answers, what is set in it, its state and its files."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import GenerationConfig

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.shard_spec import spec_of
from zoo_tests.hybrid_parallel.boosted.sides import CLOSE, RECIPE, Sides, options_of

# ----- what it answers -----


def _signature(sides: Sides) -> None:
    assert inspect.signature(sides.model.forward) == inspect.signature(sides.plain.forward)


def _config(sides: Sides) -> None:
    ours, plain = ((each.config.to_dict(), each.generation_config.to_dict()) for each in sides.models)
    assert ours == plain


def _device(sides: Sides) -> None:
    for name in ("device", "dtype", "main_input_name", "base_model_prefix"):
        assert getattr(sides.model, name) == getattr(sides.plain, name)


def _generate(sides: Sides) -> None:
    prompt = {"input_ids": torch.arange(2, 8).view(2, 3), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    ours, plain = (
        each.eval().generate(**prompt, max_new_tokens=3, do_sample=False, pad_token_id=0) for each in sides.models
    )
    assert torch.equal(ours, plain)


def _embeddings(sides: Sides) -> None:
    for get in ("get_input_embeddings", "get_output_embeddings"):
        ours, plain = (getattr(each, get)() for each in sides.models)
        if sides.holds({"get_input_embeddings": "model.embed_tokens.weight"}.get(get, "lm_head.weight")):
            torch.testing.assert_close(ours.weight, spec_of(ours.weight).shard(plain.weight))
        else:
            with pytest.raises(AttributeError, match="lies on another pipeline stage"):
                _ = ours.weight


def _num_parameters(sides: Sides) -> None:
    assert sides.model.num_parameters() == sides.plain.num_parameters()
    ours, plain = (parameters_to_vector(each.parameters()).numel() for each in sides.models)
    assert ours < plain if sides.is_cut else ours == plain


def _memory_footprint(sides: Sides) -> None:
    buffers = sum(each.nbytes for each in sides.model.buffers())
    assert sides.model.get_memory_footprint() == buffers + sum(each.nbytes for each in sides.model.parameters())
    ours, plain = (each.get_memory_footprint() for each in sides.models)
    assert ours < plain if sides.is_cut else ours == plain


def _isinstance(sides: Sides) -> None:
    assert isinstance(sides.model, nn.Module) and not isinstance(sides.model, type(sides.plain))
    assert isinstance(sides.model.unwrap(), type(sides.plain))


def _submodules(sides: Sides) -> None:
    for number in (0, 1):
        path = f"model.layers.{number}"
        layer = sides.model.get_submodule(path)
        if sides.holds(f"{path}.input_layernorm.weight"):
            assert isinstance(layer, type(sides.plain.get_submodule(path)))
        else:
            with pytest.raises(AttributeError, match="is part of a module on pipeline stage [01]; read it there"):
                _ = layer.self_attn.q_proj.weight


def _named_parameters(sides: Sides) -> None:
    plain = dict(sides.plain.named_parameters())
    names: list[Any] = [None] * 2
    for name, param in sides.model.named_parameters():
        torch.testing.assert_close(param, spec_of(param).shard(plain[name]), rtol=0, atol=0)
    dist.all_gather_object(names, [name for name, _ in sides.model.named_parameters()])
    assert set(names[0]) | set(names[1]) == set(plain)


def _named_modules(sides: Sides) -> None:
    names, inside = ([name for name, _ in each.named_modules()] for each in (sides.model, sides.model.unwrap()))
    assert names == ["", *inside]
    assert inside == [name for name, _ in sides.plain.named_modules()] or sides.layout == "pp2"
    assert "model.layers.0" in dict(sides.model.named_modules())
    around = nn.ModuleDict({"policy": sides.model})
    assert all(name.startswith(("policy.model.", "policy.lm_head.")) for name, _ in around.named_parameters())


def _printed(sides: Sides) -> None:
    assert "LlamaForCausalLM" in str(sides.model)


# ----- what is set and changed -----


def _assignments(sides: Sides) -> None:
    config = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0)
    for model in sides.models:
        model.generation_config = config
        assert model.eval().generate(torch.ones(1, 3, dtype=torch.long)).shape == (1, 5)
        model.loss_function = _mean_square
    batch = {name: value[:8] for name, value in sides.batch.items()} | {"labels": torch.ones(8, 13, dtype=torch.long)}
    del batch["attention_mask"]
    sides.batch, sides.share = batch, {name: value[_rows(sides)] for name, value in batch.items()}
    sides.check_losses()
    ours = sides.booster.execute_pipeline(iter([sides.share]), sides.model).loss
    torch.testing.assert_close(ours, sides.plain(**batch).loss.detach(), **CLOSE, check_dtype=False)


def _mean_square(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return logits.square().mean()


def _rows(sides: Sides) -> slice:
    size = 8 // sides.booster.plugin.dp_size
    return slice(size * sides.booster.plugin.dp_rank, size * (sides.booster.plugin.dp_rank + 1))


def _new_modules(sides: Sides) -> None:
    for name, value in {"lm_head": nn.Linear(3, 3), "head": nn.Linear(3, 3), "forward": sides.model.forward}.items():
        sides.refused(rf"model.{name} = … after boost\(\).* do it before boost\(\)", setattr, sides.model, name, value)
    sides.refused("do it before boost", sides.model.add_module, "head", nn.Linear(3, 3))
    sides.refused("do it before boost", sides.model.register_parameter, "bias", nn.Parameter(torch.zeros(3)))
    sides.refused("do it before boost", sides.model.register_buffer, "count", torch.zeros(3))


def _replaced(*names: str) -> Callable[[Sides], None]:
    def check(sides: Sides) -> None:
        for name in names:
            sides.refused(rf"model.{name}\(\) changes weights .* call it before boost", getattr(sides.model, name), 7)

    return check


def _recompute(sides: Sides) -> None:
    for kwargs in ({"use_reentrant": False}, {"use_reentrant": True}):
        for model in sides.models:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
            model.enable_input_require_grads()
            assert model.is_gradient_checkpointing
        sides.backward()
        sides.check_gradients()
        for model in sides.models:
            model.zero_grad()
            model.gradient_checkpointing_disable()
            assert not model.is_gradient_checkpointing


def _modes(sides: Sides) -> None:
    for mode in (False, True):
        assert sides.model.train(mode) is sides.model
        assert all(module.training == mode for module in sides.model.modules())
    sides.model.eval()
    sides.check_losses()


def _freeze(sides: Sides) -> None:
    for model in sides.models:
        model.requires_grad_(False)
        for name, param in model.named_parameters():
            param.requires_grad_(".mlp." in name)
    sides.backward()
    sides.check_gradients()


def _convert(sides: Sides) -> None:
    for convert in (sides.model.half, sides.model.bfloat16, lambda: sides.model.to(torch.float32)):
        sides.refused("convert the model before boost", convert)
    assert sides.model.to("cpu") is sides.model
    # For evaluation alone, without an optimizer, it is converted as any other.
    ours = Booster(HybridParallelPlugin(**options_of(sides.layout))).boost(RECIPE.model())
    with torch.no_grad():
        sides.check_losses(ours, sides.plain)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-3), (torch.float64, 1e-6)):
            found, expected = sides.losses(ours.to(dtype), sides.plain.to(dtype))
            torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=0)
            assert ours(**sides.share).logits.dtype == dtype


# ----- state and files -----


def _state_dict(sides: Sides) -> None:
    state = copy.deepcopy(sides.model.state_dict())
    with torch.no_grad():
        for param in sides.model.parameters():
            param.zero_()
    sides.model.load_state_dict(state)
    sides.check_losses()
    around = nn.ModuleDict({"policy": sides.model})
    if sides.is_cut:
        sides.refused(r"booster.save_model\(model, directory\) on all ranks", safetensors.torch.save, state)
    for each in (state, around.state_dict(), copy.deepcopy(around.state_dict())):
        if sides.is_cut:
            sides.refused(r"booster.save_model\(model, directory\) on all ranks", torch.save, each, io.BytesIO())
        else:
            torch.save(each, io.BytesIO())


def _load_state_dict(sides: Sides) -> None:
    ours, plain = ({name: value * 0.5 for name, value in each.state_dict().items()} for each in sides.models)
    sides.refused("leave assign out", sides.model.load_state_dict, ours, assign=True)
    if sides.is_cut:
        other = plain | {name: value.reshape(-1)[:1] for name, value in plain.items()}
        sides.refused("this rank's part .*, or the whole model's state .*neither", sides.model.load_state_dict, other)
    sides.plain.load_state_dict(plain)
    sides.model.load_state_dict(ours)
    sides.check_losses()
    with torch.no_grad():
        for param in sides.model.parameters():
            param.zero_()
    sides.model.load_state_dict(plain)
    sides.check_step()


def _save_pretrained(sides: Sides) -> None:
    """Of the boosted model, of what it wraps, with more options, and of a model inside; by rank 0 alone under dp."""
    calls: list[tuple[Callable[[Any], Any], dict[str, Any]]] = [
        (lambda model: model, {}),
        (lambda model: getattr(model, "module", model), {"save_function": torch.save, "max_shard_size": "40KB"}),
        (lambda model: model, {"variant": "own"}),
        (lambda model: model.model, {}),
    ]
    for number, (chosen, options) in enumerate(calls):
        ours, plain = (chosen(model) for model in sides.models)
        if sides.is_cut or dist.get_rank() == 0:
            # Folders of each rank's own, as of tempfile: that of rank 0 is written.
            ours.save_pretrained(
                sides.folder / f"{number}-of-{dist.get_rank()}", is_main_process=dist.get_rank() == 0, **options
            )
        dist.barrier()
        given = {name: value for name, value in options.items() if name == "variant"}
        opened, report = type(plain).from_pretrained(sides.folder / f"{number}-of-0", output_loading_info=True, **given)
        assert not any(report.values()), report
        saved = opened.state_dict()
        assert all(torch.equal(saved[name], value) for name, value in plain.state_dict().items())
    if sides.is_cut:
        part = {name: each.clone() for name, each in sides.model.named_parameters()}
        sides.refused(
            "is this rank's part of the model alone", sides.model.save_pretrained, sides.folder, state_dict=part
        )


def _push_to_hub(sides: Sides) -> None:
    """Rank 0 uploads the folder of the whole model."""
    seen = []

    def push(model: Any, repo_id: str) -> None:
        model.save_pretrained(sides.folder)
        saved = type(sides.plain).from_pretrained(sides.folder).state_dict()
        seen.extend(torch.equal(saved[name], value) for name, value in sides.plain.state_dict().items())

    with mock.patch.object(type(sides.plain), "push_to_hub", push):
        sides.model.push_to_hub("somebody/model")
    assert all(seen) and bool(seen) == (dist.get_rank() == 0)


def _pickle(sides: Sides) -> None:
    for write in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        sides.refused("cannot be pickled; .* use booster.save_model", write, sides.model)


def _deepcopy(sides: Sides) -> None:
    copies = [copy.deepcopy(model).eval() for model in sides.models]
    sides.check_step()
    with torch.no_grad():
        sides.check_losses(*copies)
        before, after = copies[0](**sides.share).loss, sides.model(**sides.share).loss
    assert abs(after - before) > 1e-3, "the copy keeps the weights of before"


def _average(sides: Sides) -> None:
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.4)) for model in sides.models]
    for _ in range(2):
        sides.check_step()
        for average, model in zip(averages, sides.models, strict=True):
            average.update_parameters(model)
            model.zero_grad()
    with torch.no_grad():
        sides.check_losses(*averages)
        found = sides.booster.execute_pipeline(iter([sides.share]), averages[0].module).loss
        torch.testing.assert_close(found, averages[1](**sides.batch).loss, **CLOSE, check_dtype=False)
    sides.booster.save_model(averages[0].module, sides.folder)
    saved = type(sides.plain).from_pretrained(sides.folder).state_dict()
    for name, value in averages[1].module.state_dict().items():
        torch.testing.assert_close(saved[name], value, **CLOSE)


ROWS_OF_MODELS: Mapping[str, Callable[[Sides], None]] = {
    "signature": _signature,
    "config": _config,
    "device": _device,
    "generate": _generate,
    "embeddings": _embeddings,
    "num_parameters": _num_parameters,
    "get_memory_footprint": _memory_footprint,
    "named_parameters": _named_parameters,
    "named_modules": _named_modules,
    "get_submodule": _submodules,
    "isinstance": _isinstance,
    "print": _printed,
    "attributes": _assignments,
    "new modules": _new_modules,
    "set_input_embeddings": _replaced("set_input_embeddings", "set_output_embeddings"),
    "resize_token_embeddings": _replaced("resize_token_embeddings"),
    "tie_weights": _replaced("tie_weights", "init_weights"),
    "gradient_checkpointing_enable": _recompute,
    "train, eval": _modes,
    "requires_grad_": _freeze,
    "to": _convert,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    "save_pretrained": _save_pretrained,
    "push_to_hub": _push_to_hub,
    "pickle": _pickle,
    "deepcopy": _deepcopy,
    "AveragedModel": _average,
}
