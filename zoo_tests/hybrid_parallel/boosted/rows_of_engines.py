"""Rows of `docs/boosted_model.md`: gradients, hooks, and what other engines do to a model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.tensorboard import SummaryWriter

from booster.errors import ConfigurationError
from zoo_tests.hybrid_parallel.boosted.sides import CLOSE, RECIPE, Sides

# ----- gradients and hooks -----


def _zero_grad(sides: Sides) -> None:
    sides.backward()
    for model in sides.models:
        model.zero_grad()
    sides.backward()
    sides.check_gradients()


def _clip_norm(sides: Sides) -> None:
    sides.backward()
    sides.refused(r"use .*model.clip_grad_norm_\(max_norm\)", clip_grad_norm_, sides.model.parameters(), 0.1)
    found, expected = sides.model.clip_grad_norm_(0.1), clip_grad_norm_(sides.plain.parameters(), 0.1)
    torch.testing.assert_close(found, expected, **CLOSE)
    sides.check_gradients()


def _clip_value(sides: Sides) -> None:
    sides.backward()
    sides.refused(r"optimizer.clip_grad_value_\(value\)", clip_grad_value_, sides.model.parameters(), 1e-3)
    sides.optimizer.clip_grad_value_(1e-3)
    clip_grad_value_(sides.plain.parameters(), 1e-3)
    sides.check_gradients()


def _gradients(sides: Sides) -> None:
    sides.backward()
    for param in sides.model.parameters():
        sides.refused(r"to look optimizer.full_gradients\(\)", lambda param=param: param.grad)
    sides.check_gradients()


def _parameter_hooks(sides: Sides) -> None:
    for _, param in sides.model.named_parameters():
        sides.refused("call register_hook before boost", param.register_hook, torch.zeros_like)
    clamped = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"

    def before(model: nn.Module) -> None:
        for name in clamped:
            model.get_parameter(name).register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    other = Sides(sides.layout, str(sides.folder), before)
    other.backward()
    other.check_gradients()
    assert other.plain.get_parameter(clamped[0]).grad.abs().max() == 1e-3


def _accumulated_hooks(sides: Sides) -> None:
    for _, param in sides.model.named_parameters():
        sides.refused("call register_hook before boost", param.register_post_accumulate_grad_hook, print)
    model = RECIPE.model()
    model.model.norm.weight.register_post_accumulate_grad_hook(print)
    sides.refused("model.norm.weight has a hook .* use register_hook", sides.booster.boost, model)


def _forward_hooks(sides: Sides) -> None:
    """One that changes what a layer returns, and one that watches."""
    rows = [0, 0]
    for index, model in enumerate(sides.models):
        named = dict(model.named_modules())
        for path in {"model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"}.intersection(named):
            named[path].register_forward_hook(lambda module, inputs, output: output * 0.5)

        def count(module: nn.Module, inputs: Any, output: Any, index: int = index) -> None:
            rows[index] += len(output[0] if isinstance(output, tuple) else output)

        named[f"model.layers.{sides.booster.plugin.stage_index}"].register_forward_hook(count)
    sides.backward()
    sides.check_gradients()
    assert rows == [len(sides.share["input_ids"]), len(sides.batch["input_ids"])]


def _hooks_on_the_model(sides: Sides) -> None:
    for model in sides.models:
        model.register_forward_hook(lambda module, inputs, output: output.loss * 2)
    with torch.no_grad():
        found, expected = sides.model(**sides.share), sides.plain(**sides.batch)
    torch.testing.assert_close(found, expected, **CLOSE, check_dtype=False)
    evaluate = sides.booster.execute_pipeline
    sides.refused("does not call a hook .* register it on model.unwrap", evaluate, iter([sides.share]), sides.model)


def _backward_hooks(sides: Sides) -> None:
    """Of a layer whose outputs are whole on every rank: parts of the gradients of the whole batch."""
    seen: list[list[Tensor]] = [[], []]
    path = f"model.layers.{sides.booster.plugin.stage_index}.mlp"
    for index, model in enumerate(sides.models):
        module = dict(model.named_modules())[path]
        module.register_full_backward_hook(lambda _, __, got, index=index: seen[index].append(got[0]))
    sides.backward()
    found, (expected,) = torch.cat(seen[0][::-1]), seen[1]
    start = len(expected) * sides.booster.plugin.dp_rank // sides.booster.plugin.dp_size
    torch.testing.assert_close(found, expected[start : start + len(found)], **CLOSE)
    sides.check_gradients()


# ----- other engines -----


def _loss_backward(sides: Sides) -> None:
    with pytest.raises((RuntimeError, ConfigurationError), match=r"call booster.backward\(loss, optimizer\)"):
        sides.model(**sides.share).loss.backward()


def _autograd_grad(sides: Sides) -> None:
    embedded = [
        sides.plain.get_input_embeddings()(each["input_ids"]).detach().requires_grad_()
        for each in (sides.share, sides.batch)
    ]
    batches = [
        {"inputs_embeds": value} | {name: each[name] for name in ("attention_mask", "labels")}
        for value, each in zip(embedded, (sides.share, sides.batch), strict=True)
    ]
    params = list(sides.model.parameters())[:2]
    if sides.layout == "pp2":
        with pytest.raises(RuntimeError, match="to not have been used in the graph"):
            torch.autograd.grad(sides.model(**sides.share).loss, params)
        return
    sides.refused(r"read optimizer.full_gradients", torch.autograd.grad, sides.model(**sides.share).loss, params)
    sides.refused(r"optimizer.full_gradients", torch.autograd.grad, sides.model(**sides.share).logits.sum(), params)
    (found,) = torch.autograd.grad(sides.model(**batches[0]).loss, embedded[0])
    (expected,) = torch.autograd.grad(sides.plain(**batches[1]).loss, embedded[1])
    start = len(expected) * sides.booster.plugin.dp_rank // sides.booster.plugin.dp_size
    torch.testing.assert_close(found, expected[start : start + len(found)], **CLOSE)


def _functional_call(sides: Sides) -> None:
    other = {name: param.detach() * 0.9 for name, param in sides.model.named_parameters()}
    refused = r"boost\(\) has shared out .* use copy.deepcopy\(model\)"
    sides.refused(refused, torch.func.functional_call, sides.model, other, (), sides.share)
    sides.check_step()


def _penalty(sides: Sides) -> None:
    def penalised(model: Any, loss: Tensor) -> Tensor:
        return loss + 0.01 * sum(param.square().sum() for param in model.parameters())

    ours, plain = map(penalised, sides.models, sides.losses())
    if sides.is_cut:
        sides.refused("not from model.parameters.* weight_decay", sides.booster.backward, ours, sides.optimizer)
        return
    sides.booster.backward(ours, sides.optimizer)
    plain.backward()
    sides.check_gradients()


def _histogram(sides: Sides) -> None:
    with SummaryWriter(str(sides.folder / str(dist.get_rank()))) as writer:
        for name, param in sides.model.named_parameters():
            writer.add_histogram(name, param, 0)


def _traced(sides: Sides) -> None:
    refused = "cannot be traced or exported; write it with booster.save_model"
    batch = {name: sides.share[name] for name in ("input_ids", "attention_mask")}
    with SummaryWriter(str(sides.folder / str(dist.get_rank()))) as writer:
        sides.refused(refused, writer.add_graph, sides.model, batch["input_ids"], use_strict_trace=False)
    sides.refused(refused, torch.jit.trace, sides.model, example_kwarg_inputs=batch, strict=False)
    sides.refused(refused, torch.jit.script, sides.model)
    sides.refused(refused, torch.export.export, sides.model, (), batch)


def _compile(sides: Sides) -> None:
    sides.refused("compile_layers=True", torch.compile, sides.model, backend="eager")
    sides.refused("compile_layers=True", sides.model.compile)


def _as_ddp(sides: Sides) -> None:
    """Accumulation by its names; every other name of it is answered, or refused in words."""
    model = sides.model
    assert model.module is model.unwrap() and model.require_backward_grad_sync and not model.static_graph
    with model.no_sync():
        with model.no_sync():
            pass
        sides.backward()
        assert not model.require_backward_grad_sync and sides.optimizer.reducer.pending
        if not sides.is_cut:
            sides.refused("each replica by its own gradients, as LocalSGD does", sides.optimizer.step)
    model.require_backward_grad_sync = False
    model.require_backward_grad_sync = True
    with model.join():
        sides.backward()
    assert not sides.optimizer.reducer.pending
    sides.check_gradients(passes=2)
    sides.refused("leave it out, and use", model.register_comm_hook, None, print)
    model.static_graph = True
    assert model.static_graph and dist.get_world_size(model.process_group) == (1 if sides.is_cut else 2)
    own = set(dir(DistributedDataParallel)) - set(dir(nn.Module))
    made = re.findall(r"self\.([a-z]\w*)(?: *:.*)? = ", inspect.getsource(DistributedDataParallel.__init__))
    unanswered = set()
    for name in {name for name in (*own, *made) if not name.startswith("__")}:
        try:
            getattr(model, name)
        except AttributeError as error:
            assert "is of DistributedDataParallel, which does not wrap a boosted model; leave it out" in str(error)
            unanswered.add(name)
    assert {"scatter", "join_hook", "logger"} <= unanswered
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = model.no_such_name


def _data_parallel(sides: Sides) -> None:
    sides.refused("DistributedDataParallel cannot take", DistributedDataParallel, sides.model)
    assert DataParallel(sides.model).module is sides.model  # without GPUs it replicates nothing
    sides.refused("DataParallel cannot take", sides.model._replicate_for_data_parallel)


ROWS_OF_ENGINES: Mapping[str, Callable[[Sides], None]] = {
    "zero_grad": _zero_grad,
    "clip_grad_norm_": _clip_norm,
    "clip_grad_value_": _clip_value,
    "param.grad": _gradients,
    "register_hook": _parameter_hooks,
    "register_post_accumulate_grad_hook": _accumulated_hooks,
    "register_forward_hook": _forward_hooks,
    "hooks on the model": _hooks_on_the_model,
    "register_full_backward_hook": _backward_hooks,
    "loss.backward": _loss_backward,
    "autograd.grad": _autograd_grad,
    "functional_call": _functional_call,
    "penalty": _penalty,
    "add_histogram": _histogram,
    "tracing": _traced,
    "compile": _compile,
    "as DistributedDataParallel": _as_ddp,
    "DataParallel": _data_parallel,
}
