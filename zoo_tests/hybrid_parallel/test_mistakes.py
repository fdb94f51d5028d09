"""Typical mistakes of a script: each is answered in one sentence that holds the fix, on all ranks.

What breaks here first: a check that comes after a call of torch, whose own message then reaches the user.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from booster import Booster, ConfigurationError, launch_from_torch
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Recipe
from zoo_tests.harness.ranks import run_on_ranks

RECIPE = Recipe(family="llama", head="causal_lm", precision="fp32", steps=1)
BOOST = "model, optimizer = booster.boost(model, optimizer)\n"
BOTH = "write model, optimizer = booster.boost(model, optimizer)"
# Layout, the user's lines, and what the sentence must hold. `… ` begins lines after `BOOST`.
MISTAKES = [
    # ----- boost -----
    ("tp2", "model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer)", BOTH),
    (
        "tp2",
        "model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, dataloader=loader)",
        "write model, optimizer, dataloader = booster.boost(model, optimizer, dataloader)",
    ),
    ("tp2", "model, optimizer = booster.boost(model)", "write model = booster.boost(model)"),
    ("tp2", "model = booster.boost(model, optimizer)", BOTH),
    ("tp2", "booster.boost()", BOTH),
    ("tp2", "… booster.relayout(HybridParallelPlugin())", "model, optimizer = booster.relayout(plugin, model, o"),
    ("tp2", "optimizer, model = booster.boost(model, optimizer)", BOTH),
    ("dp2", "self.optimizer, self.model = booster.boost(model, optimizer)", BOTH),
    ("tp2", "booster.boost(model, optimizer); model(**batch).loss.backward()", BOTH.removeprefix("write ")),
    ("dp2", "booster.boost(model, optimizer); booster.execute_pipeline(batch, model)", "booster.boost(model, optim"),
    ("tp2", "booster.initialize(model, optimizer)", "booster.boost(model, optim"),
    ("tp2", "model, optimizer, loader, _ = booster.prepare(model, optimizer)", "booster.boost(model, optim"),
    ("tp2", "optimizer = booster.boost(optimizer)", BOTH.removeprefix("write ")),
    ("tp2", "other = booster.boost(model, SGD(plain.parameters(), lr=0.1))", "make the optimizer from this model's"),
    ("tp2", "all = booster.boost([model, optimizer])", "give a module, optimizers, learning-rate schedulers"),
    ("tp2", "all = booster.boost(model, train_dataloader=loader)", "use model, optimizer, criterion, dataloader"),
    ("dp2", "model = booster.boost(DistributedDataParallel(model))", "leave that out"),
    ("tp2", "both = booster.boost(model, SGD)", "make an object of it: SGD(…)"),
    ("tp2", "both = booster.boost(model, loader.dataset)", "a list of samples goes in DataLoader(…, batch_size=8)"),
    ("dp2", "… booster.boost(model, optimizer)", "boost a model once"),
    # ----- the layout -----
    ("tp2", "Booster(tp_size=2)", "write Booster(plugin=HybridParallelPlugin(tp_size=2))"),
    ("tp2", "from booster.plugin import HybridParallelPlugin", "write from plugins.hybrid_parallel import"),
    ("tp2", "from booster import HybridParallelPlugin", "write from plugins.hybrid_parallel import"),
    ("tp2", "Booster(HybridParallelPlugin)", "write Booster(plugin=HybridParallelPlugin(tp_size=2))"),
    ("tp2", "launch_from_torch(seed='42')", "use seed=42"),
    ("tp2", "launch_from_torch(config={})", "write booster.launch_from_torch(seed=42"),
    ("tp2", "HybridParallelPlugin(2)", "write HybridParallelPlugin(tp_size=2, pp_size=2)"),
    ("tp2", "HybridParallelPlugin(tp_size=3)", "`booster run --nproc-per-node 3 script.py`"),
    ("tp2", "HybridParallelPlugin(tensor_parallel_size=2)", "use tp_size=2"),
    ("tp2", "HybridParallelPlugin(precision='float16')", "use 'fp32' or 'bf16' or 'fp16' or 'fp8'"),
    # ----- a step -----
    ("tp2", "… booster.execute_pipeline(batch, model, return_output=True)", "use return_outputs"),
    ("dp2", "… booster.execute_pipeline(loader, model, optimizer=optimizer)", "give it iter(dataloader)"),
    ("tp2", "… booster.execute_pipeline(model, batch, optimizer=optimizer)", "execute_pipeline(data_iter, model, …)"),
    ("tp2", "… booster.execute_pipeline(batch, model, lambda o, _: o.loss, optimizer)", "leave the criterion out"),
    ("tp2", "… booster.execute_pipeline(batch, model, optimizer)", "write optimizer=optimizer"),
    (
        "dp2",
        "… batches = booster.boost(DataLoader([{'input_ids': [1, 2]}] * 8, 2)); "
        "booster.execute_pipeline(iter(batches), model)",
        "give a tensor of integers",
    ),
    ("dp2", "len(booster.boost(DataLoader(Stream(), 2)))", "write for batch in dataloader: booster.execute_pipeline("),
    ("dp2", "… booster.execute_pipeline(batch, model, lambda o, _: o.loss * 2, optimizer)", "outputs.loss is None"),
    ("dp2", "… booster.execute_pipeline({'input_ids': [[1, 2]] * 2}, model)", "give a tensor of integers, as torch."),
    ("pp2", "… model(batch)", "write model(**batch)"),
    ("tp2", "… booster.generate(batch)", "model.generate("),
    ("tp2", "… booster.load_lr_scheduler('x', optimizer)", "booster.load_lr_scheduler(lr_scheduler, path)"),
    ("tp2", "… booster.execute_pipeline({'input_ids': torch.zeros(2, 3)}, model)", "give a tensor of integers"),
    ("dp2", "… booster.execute_pipeline(batch, model, torch.nn.CrossEntropyLoss(), optimizer)", "lambda outputs,"),
    ("tp2", "… booster.execute_pipeline(batch, model, lambda o: o.loss, optimizer)", "write criterion=lambda"),
    ("pp2", "… booster.execute_pipeline(batch, optimizer=optimizer)", "write booster.execute_pipeline(batches, model"),
    ("pp2", "… booster.execute_pipeline(batch, model, optimizer=optimizer).loss.backward()", "call optimizer.step()"),
    ("tp2", "… booster.backward(booster.execute_pipeline(batch, model).loss, optimizer)", "call optimizer.step(), or"),
    ("tp2", "… booster.meter(model, log_every=10)", "booster.meter has no option 'log_every'; use every"),
    ("tp2", "… booster.meter(100)", "write booster.meter(model, total_steps=100)"),
    ("tp2", "booster.plugin.tp_group", "plugin.mesh.get_group('tp') is a process group"),
    ("dp2", "… optimizer.clip_grad_by_norm(1.0)", "use model.clip_grad_norm_(1.0), or max_norm=1.0"),
    ("tp2", "booster.plugin.prepare_dataloader([1], 0)", "write plugin.prepare_dataloader(dataset, batch_size=8"),
    ("tp2", "HybridParallelPlugin.from_config(2)", "give one of HybridParallelPlugin options, or text such as tp=2"),
    ("tp2", "… booster.accumulate(model)", "with booster.no_sync(model, optimizer):"),
    ("tp2", "… booster.gather(batch)", "use result.loss, the mean of all ranks"),
    ("tp2", "… booster.execute_pipeline(batch, model, optimizer=optimizer)[0]", "has .loss and .outputs"),
    ("tp2", "… loss, _ = booster.execute_pipeline(batch, model, optimizer=optimizer)", "has .loss and .outputs"),
    ("pp2", "… booster.execute_pipeline(batch, model, optimizer=optimizer).backward()", "call optimizer.step()"),
    ("pp2", "… del batch['labels']; booster.execute_pipeline(batch, model, None, optimizer)", "pass a criterion"),
    ("tp2", "… model(**batch).loss.backward()", "call booster.backward(loss, optimizer)"),
    ("pp2", "… model(**batch).loss.backward()", "call booster.backward(loss, optimizer)"),
    ("tp2", "… model.backward(model(**batch).loss)", "use booster.backward(loss, optimizer)"),
    ("tp2", "… booster.backward(model(**batch).loss)", "write booster.backward(loss, optimizer"),
    ("dp2", "… booster.backward(model(**batch), optimizer)", "compute a mean or (sum, count) from its outputs"),
    ("tp2", "… booster.backward(model(**batch).logits, optimizer)", "give one number, as loss.mean() or (sum, count)"),
    ("tp2", "… booster.backward(optimizer, model(**batch).loss)", "the order is booster.backward(loss, optimizer)"),
    ("dp2", "… booster.execute_pipeline(iter(DataLoader([])), model)", "make iter(dataloader) once an epoch"),
    ("tp2", "… torch.compile(model, backend='eager')", "use compile_layers=True"),
    # ----- weights and files -----
    ("pp2", "… model.lm_head.weight.sum() + model.model.embed_tokens.weight.sum()", "on pipeline stage {other}; read"),
    ("pp2", "… [each.mlp.up_proj.weight for each in model.model.layers]", "on pipeline stage {other}; read it there"),
    ("dp2", "… model.resize_token_embeddings(100)", "call it before boost()"),
    ("dp2", "… booster.clip_grad_norm_(model.parameters(), 1.0)", "use model.clip_grad_norm_(1.0)"),
    ("dp2", "… booster.unwrap_model(model)", "use model.unwrap()"),
    ("dp2", "… booster.wait_for_everyone()", "use torch.distributed.barrier()"),
    ("dp2", "… booster.print('x') if booster.is_main_process else None", "if torch.distributed.get_rank() == 0"),
    ("dp2", "… booster.save(model, 'x')", "booster.save_model(model, directory)"),
    ("tp2", "… torch.save(model, BytesIO())", "use booster.save_model(model, directory)"),
    ("dp2", "… booster.save_model('x', model)", "booster.save_model(model, directory)"),
    ("dp2", "… booster.save_checkpoint('x', model, optimizer)", "write booster.save_checkpoint(directory, *,"),
    ("dp2", "… booster.save_model(model, '')", "got directory=''; give a name, as in directory='runs/model'"),
    ("dp2", "… booster.load_model(model, None)", "got directory=None; give a name"),
    ("dp2", "booster.latest_checkpoint('')", "got folder=''; give a name"),
    ("dp2", "… booster.save_lr_scheduler(optimizer, 'x')", "write booster.save_lr_scheduler(lr_scheduler, path)"),
    ("dp2", "… booster.load_lr_scheduler('x', optimizer)", "write booster.save_lr_scheduler(lr_scheduler, path)"),
    ("dp2", "… booster.save_checkpoint('x', lr_scheduler=optimizer)", "stands where the learning-rate scheduler"),
    ("dp2", "… booster.load_checkpoint('x', dataloader=optimizer)", "pass the one that boost() returned"),
]


class _Stream(IterableDataset):
    """A data set without a length."""

    def __iter__(self) -> Any:
        return iter(range(9))


class _Counted(_Stream):
    def __len__(self) -> int:
        return 9


class _Script:
    """A holder of what a script assigns."""


def _answers(mistakes: list[tuple[str, str, str]]) -> list[str]:
    """Make each mistake, and return what is answered on this rank."""
    options = {"dp2": {}, "tp2": {"tp_size": 2}, "pp2": {"pp_size": 2, "num_microbatches": 2}}
    boosters = {name: Booster(HybridParallelPlugin(**given)) for name, given in options.items()}
    answers = []
    for layout, lines, _ in mistakes:
        model, booster = RECIPE.model(), boosters[layout]
        names: dict[str, Any] = {
            "model": model,
            "plain": RECIPE.model(),
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "batch": RECIPE.batch(0),
            "loader": DataLoader([{"input_ids": row} for row in RECIPE.batch(0)["input_ids"]], batch_size=2),
            "booster": booster,
            "self": _Script(),
            "torch": torch,
            "BytesIO": BytesIO,
            "Stream": _Stream,
            "SGD": torch.optim.SGD,
            "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
            **{each.__name__: each for each in (Booster, HybridParallelPlugin, DataLoader, launch_from_torch)},
        }
        try:
            exec(compile(lines.replace("… ", BOOST), "train.py", "exec"), names)
            answers.append("nothing")
        except (ConfigurationError, AttributeError, ImportError, RuntimeError, StopIteration, TypeError) as error:
            answers.append(str(error))
    return answers


def unanswered() -> list[str]:
    """Make each mistake on two ranks, and return the answers without the fix, or in more than one sentence."""
    answers = run_on_ranks(2, _answers, MISTAKES)
    return [
        f"{lines!r} on rank {rank}: {answer}"
        for rank in range(2)
        for (_, lines, fix), answer in zip(MISTAKES, answers[rank], strict=True)
        if fix.format(other=1 - rank) not in answer or not re.fullmatch(r"[^\n]{1,400}", answer)
    ]


def test_mistakes_are_answered_by_the_fix() -> None:
    wrong = unanswered()
    assert not wrong, "\n".join([f"{len(wrong)} of {2 * len(MISTAKES)} answers", *wrong])


def test_a_job_that_was_not_joined_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(ConfigurationError, match=r"call launch_from_torch\(\) first"):
        Booster(HybridParallelPlugin()).boost(RECIPE.model())


def _good_lines() -> None:
    """Lines that look like the mistakes above, and are right."""
    booster = Booster(HybridParallelPlugin())

    def made() -> tuple[Any, Any]:
        model = RECIPE.model()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    objects = booster.boost(*made())
    assert len(objects) == 2
    script = _Script()
    script.model, script.optimizer = booster.boost(*made())
    model, *optimizers = booster.boost(*made())
    net, _ = booster.boost(*made())
    model = booster.boost(*made())[0]
    assert model is not net and len(optimizers) == 1
    result = booster.execute_pipeline(RECIPE.batch(0), script.model, optimizer=script.optimizer)
    assert result["loss"] is result.loss
    counted = booster.boost(DataLoader(_Counted(), 2))
    assert len(counted) == len(list(counted)) == 3
    file = BytesIO()
    torch.save(result.loss, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == result.loss


def test_right_lines_are_not_refused() -> None:
    run_on_ranks(2, _good_lines)


@pytest.mark.parametrize("lines", ["raise ConfigurationError('tp_size=3; use 2')", "Booster(nothing=1)"])
def test_the_line_of_the_script_is_named(lines: str, tmp_path: Any) -> None:
    from booster.failure.diagnosis import Failure

    script = tmp_path / "train.py"
    script.write_text(f"from booster import Booster, ConfigurationError\n\n\n{lines}\n")
    with pytest.raises(ConfigurationError) as caught:
        exec(compile(script.read_text(), str(script), "exec"), {})
    line = Failure.of(caught.value, "", 0).line()
    assert line.startswith("error: ") and line.endswith(f" ({script}, line 4)")
