"""Options of `Accelerator` that cannot hold under a layout, and other bad input: one sentence each, on all ranks.

What breaks here first: an option that accelerate adds. Look in `booster/integrations/arguments.py`.
"""

from __future__ import annotations

import inspect
import os
import re
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    MSAMPRecipeKwargs,
    ParallelismConfig,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from torch.optim import SGD
from torch.utils.data import DataLoader

import booster.integrations.accelerate as ours
from booster.errors import ConfigurationError
from booster.integrations.accelerate import Accelerator, variables_of_this_rank
from booster.integrations.arguments import OLDEST
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.booster.integrations.accelerate_loop import bert, collate, fresh_accelerate, samples
from zoo_tests.docs.pages import REPOSITORY, rows_of
from zoo_tests.harness.ranks import distributed

_OPTIONS: dict[str, tuple[Any, str]] = {
    "deepspeed_plugin": (
        object.__new__(DeepSpeedPlugin),
        r"DeepSpeed is another engine; leave it out, and give Hybrid",
    ),
    "fsdp_plugin": (object.__new__(FullyShardedDataParallelPlugin), "FSDP is another engine; leave it out, and give"),
    "parallelism_config": (object.__new__(ParallelismConfig), "accelerate's parallelism is another engine; leave it"),
    "dynamo_backend": ("inductor", r"dynamo_backend='inductor': torch.compile cannot trace .*compile_layers=True"),
    "dynamo_plugin": (TorchDynamoPlugin(backend="eager"), "dynamo_backend='eager': torch.compile cannot trace"),
    "mixed_precision": ("bf16", r"mixed_precision='bf16' is not the plugin's precision 'fp32'; use Hybrid.*'bf16'\)"),
    "rng_types": (["torch"], r"rng_types=\['torch'\]\) would give all ranks the same random numbers; leave it out"),
}
_HANDLERS = [
    (
        DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16),
        r"\[DistributedDataParallelKwargs\(...\)\]\): boost\(\) sends .* without the hook 'fp16'; leave comm_hook out",
    ),
    (GradScalerKwargs(), "the plugin scales the loss; leave it out, and give HybridParallelPlugin"),
    (MSAMPRecipeKwargs(), "the plugin's precision 'fp32' holds everywhere; leave it out"),
]
_VARIABLES = {
    "ACCELERATE_USE_FSDP": ("true", "ACCELERATE_USE_FSDP=true asks for fsdp_plugin: FSDP is another engine"),
    "ACCELERATE_USE_DEEPSPEED": ("true", "asks for deepspeed_plugin"),
    "ACCELERATE_MIXED_PRECISION": ("fp16", "mixed_precision='fp16' is not the plugin's precision 'fp32'"),
    "ACCELERATE_DYNAMO_BACKEND": ("INDUCTOR", "dynamo_backend='inductor'"),
}


@distributed(2)
def test_options_for_other_engines_are_refused() -> None:
    with fresh_accelerate():
        plugin = HybridParallelPlugin(tp_size=2)
        for name, (value, message) in _OPTIONS.items():
            with pytest.raises(ConfigurationError, match=message):
                Accelerator(plugin=plugin, **{name: value})
        for handler, message in _HANDLERS:
            with pytest.raises(ConfigurationError, match=message):
                Accelerator(plugin=plugin, kwargs_handlers=[handler])
        for name, (value, message) in _VARIABLES.items():
            with mock.patch.dict(os.environ, {name: value}), pytest.raises(ConfigurationError, match=message):
                Accelerator(plugin=plugin)
        with mock.patch("torch.cuda.is_available", lambda: True), pytest.raises(ConfigurationError, match="hide them"):
            Accelerator(plugin=plugin, cpu=True)
        with pytest.raises(ConfigurationError, match=r"AutocastKwargs\(...\)\]\): the plugin's precision 'bf16' holds"):
            Accelerator(plugin=HybridParallelPlugin(precision="bf16"), kwargs_handlers=[AutocastKwargs(enabled=False)])


@distributed(2)
def test_options_that_agree_with_the_plugin_are_taken() -> None:
    handlers = [ProfileKwargs(), DistributedDataParallelKwargs(find_unused_parameters=True), InitProcessGroupKwargs()]
    given = {"cpu": True, "mixed_precision": "bf16", "kwargs_handlers": handlers, "dynamo_backend": "no"}
    given |= {"rng_types": ["generator"], "device_placement": True, "step_scheduler_with_optimizer": False}
    with fresh_accelerate():
        accelerator = Accelerator(plugin=HybridParallelPlugin(tp_size=2, precision="bf16"), **given)
        assert accelerator.mixed_precision == "bf16" and accelerator.device.type == "cpu"
        accelerator.dataloader_config = DataLoaderConfiguration(even_batches=False, non_blocking=True)
        assert Accelerator(plugin=HybridParallelPlugin(precision="bf16")).num_processes == 2, "a second one"


def test_every_option_of_accelerate_is_known() -> None:
    """A new one is to be honoured, or refused where it cannot hold."""
    known = {
        *("device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps", "cpu", "log_with"),
        *("dataloader_config", "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "torch_tp_plugin", "rng_types"),
        *("megatron_lm_plugin", "project_dir", "project_config", "gradient_accumulation_plugin", "parallelism_config"),
        *("step_scheduler_with_optimizer", "kwargs_handlers", "dynamo_backend", "dynamo_plugin"),
    }
    assert set(inspect.signature(accelerate.Accelerator.__init__).parameters) - {"self"} == known


@distributed(2)
def test_every_name_of_accelerate_is_answered() -> None:
    """Each is in the page; those that it does not refuse can be read, and what the module exports is found in ours."""
    rows = rows_of(REPOSITORY / "docs" / "accelerate.md", "Names")
    answers = {name: answer for names, answer in rows for name in re.findall(r"`(\w+)`", names)}
    assert all(getattr(ours, name) for name in dir(accelerate) if not name.startswith("_") and name != "Accelerator")
    with fresh_accelerate():
        accelerator = Accelerator(plugin=HybridParallelPlugin(tp_size=2))
        theirs = {*dir(accelerate.Accelerator), *vars(accelerator)} - {"booster", "replicas"}
        assert set(answers) == {name for name in theirs if not name.startswith("_")}
        assert (accelerator.tensor_parallel_rank, accelerator.data_parallel_rank) == (dist.get_rank(), 0)
        for name, answer in answers.items():
            if answer.startswith("refused"):
                with pytest.raises(ConfigurationError, match="use|call"):
                    getattr(accelerator, name)(None, *[1.0] * (name == "lomo_backward"))
            else:
                assert not (getattr(accelerator, name) and answer.startswith("none"))
        model = bert()
        model, optimizer, loader = accelerator.prepare(
            model, SGD(model.parameters(), lr=0.1), DataLoader(samples(8), batch_size=2, collate_fn=collate)
        )
        with accelerator.no_sync(model):
            with accelerator.trigger_sync_in_backward(model):
                assert model.require_backward_grad_sync
            assert not model.require_backward_grad_sync
        assert ours.skip_first_batches(loader, 1) is loader and len(list(loader)) == 3
        accelerator.free_memory()


@distributed(2)
def test_bad_input_is_named() -> None:
    with fresh_accelerate():
        with pytest.raises(ConfigurationError, match=r"Accelerator\(\) got no plugin; give the layout, as in plugin="):
            Accelerator()
        with pytest.raises(ConfigurationError, match="plugin='tp2' is not installed; use one of .*hybrid_parallel"):
            Accelerator(plugin="tp2")
        with pytest.raises(ConfigurationError, match="plugin=2 is no parallel training strategy; give one"):
            Accelerator(plugin=2)
        old = (
            r"accelerate 0.34.2 is too old for booster.integrations.accelerate; install accelerate>="
            + OLDEST["accelerate"]
        )
        with mock.patch("accelerate.__version__", "0.34.2"), pytest.raises(ConfigurationError, match=old):
            Accelerator(plugin=HybridParallelPlugin())
        accelerator = Accelerator(plugin=HybridParallelPlugin(tp_size=2))
        model = bert()
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        loss = model(**collate(samples(2))).loss
        for call, message in [
            (lambda: accelerator.backward(loss, retain_graph=True), r"cannot take \['retain_graph'\] under a layout"),
            (lambda: accelerator.backward(None), "got a NoneType for the loss"),
            (lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=0), "norm_type=0; use a number"),
            (
                lambda: accelerator.clip_grad_norm_([*model.parameters()][:2], 1.0),
                "clip_grad_norm_ got other parameters",
            ),
            (lambda: accelerator.clip_grad_value_(torch.ones(1), 1.0), "clip_grad_value_ got other parameters than"),
        ]:
            with pytest.raises(ConfigurationError, match=message):
                call()


@distributed(2)
def test_a_process_group_that_the_user_made_is_counted() -> None:
    """Variables of torchrun that are missing are set while accelerate reads them."""
    missing = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    with fresh_accelerate(), mock.patch.dict(os.environ, missing, clear=True):
        accelerator = Accelerator(plugin=HybridParallelPlugin(tp_size=2))
        assert accelerator.is_main_process == (dist.get_rank() == 0)
        assert accelerator.local_process_index == dist.get_rank()
        assert "RANK" not in os.environ
        with variables_of_this_rank():
            assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == (str(dist.get_rank()), "2")
    with fresh_accelerate(), mock.patch.dict(os.environ, missing, clear=True):
        accelerate.PartialState(cpu=True)
        with pytest.raises(
            ConfigurationError, match="accelerate counts 1 process, and the process group 2 ranks; make"
        ):
            Accelerator(plugin=HybridParallelPlugin(tp_size=2))
