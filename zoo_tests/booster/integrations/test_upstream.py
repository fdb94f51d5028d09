"""What the integrations override in other libraries is still there, and is called by the same methods.

Each row of `CALLED` says what a release breaks whose methods do not call the override: it fails here first, by name.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import accelerate
import pytest
from transformers import Trainer, trainer

from booster.integrations.accelerate import Accelerator
from booster.integrations.transformers import BoostedTrainer

# Override of Trainer -> (the methods of Trainer that call it, what a release breaks that no longer does).
CALLED: dict[str, tuple[tuple[str, ...], str]] = {
    "create_accelerator_and_postprocess": (("__init__",), "the model is wrapped by accelerate's own Accelerator"),
    "_build_accelerator_args": (("create_accelerator_and_postprocess",), "options of the Accelerator are lost"),
    "_move_model_to_device": (("__init__",), "each GPU gets the whole model before it is sharded"),
    "_wrap_model": (("_prepare_for_training", "evaluation_loop"), "the model is never boosted"),
    "floating_point_ops": (("_run_epoch",), "total_flos counts a replica's batch once a rank"),
    "get_total_train_batch_size": (("set_initial_training_values",), "steps of an epoch are counted by rank"),
    "compute_loss_context_manager": (("training_step", "prediction_step"), "bf16=True runs no autocast"),
    "training_step": (("_run_epoch",), "meters count no batch"),
    "log": (("_maybe_log_save_evaluate",), "meters add no figures"),
    "get_train_dataloader": (("_inner_training_loop",), "checkpoints hold no position in the data"),
    "compute_loss": (("training_step", "prediction_step"), "a mean over uneven replicas is a mean of means"),
    "prediction_step": (("evaluation_loop",), "eval_loss is that of one replica"),
    "evaluation_loop": (("evaluate", "predict"), "metrics count each sample once a replica"),
    "save_model": (("_save_checkpoint",), "a checkpoint has one rank's shard"),
    "_save_optimizer_and_scheduler": (("_save_checkpoint",), "a checkpoint has no state of other ranks"),
    "_load_from_checkpoint": (("train",), "a checkpoint of plain Trainer is loaded into shards"),
    "_load_optimizer_and_scheduler": (("_prepare_for_training",), "a resumed run starts with fresh states"),
    "_load_best_model": (("_finalize_training",), "load_best_model_at_end loads whole weights into shards"),
    "_save_rng_state": (("_save_checkpoint",), "random states are written twice"),
    "_load_rng_state": (("_run_epoch",), "random states of another layout are looked for"),
}
# Users call these themselves.
PUBLIC = ("__init__", "train")


def _overrides(ours: type, theirs: type) -> Iterator[str]:
    """Names of methods that classes of ours replace in a class of another library."""
    library = theirs.__module__.partition(".")[0]
    for base in ours.__mro__:
        if base is object or base.__module__.partition(".")[0] == library:
            continue
        for name, value in vars(base).items():
            replaces = callable(value) and callable(getattr(theirs, name, None))
            if replaces and (not name.startswith("__") or name == "__init__"):
                yield name


def _takes_what_they_give(ours: Any, theirs: Any) -> bool:
    """Whether a call that fits their method, as they declare it, fits ours."""
    own = inspect.signature(ours).parameters
    kinds = {parameter.kind for parameter in own.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return True
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    wanted = [each for each in inspect.signature(theirs).parameters.values() if each.kind not in variable]
    return inspect.Parameter.VAR_KEYWORD in kinds or all(each.name in own for each in wanted)


def test_every_override_of_trainer_has_its_row() -> None:
    assert set(_overrides(BoostedTrainer, Trainer)) == {*CALLED, *PUBLIC}


@pytest.mark.parametrize("name", CALLED)
def test_trainer_calls_what_we_override(name: str) -> None:
    callers, broken = CALLED[name]
    for caller in callers:
        source = inspect.getsource(getattr(Trainer, caller))
        assert f"self.{name}(" in source, f"Trainer.{caller} does not call {name} any more: {broken}"


@pytest.mark.parametrize("name", [*CALLED, "train"])
def test_overrides_take_what_trainer_gives(name: str) -> None:
    assert _takes_what_they_give(getattr(BoostedTrainer, name), getattr(Trainer, name))


def test_trainer_skips_batches_by_the_function_that_we_replace() -> None:
    """Otherwise a resumed epoch would begin again."""
    assert "skip_first_batches(" in inspect.getsource(Trainer)
    assert trainer.skip_first_batches is accelerate.skip_first_batches


def test_trainer_takes_its_functions_from_attributes() -> None:
    """`label_smoother`, `compute_loss_func` and `gather_function` are replaced by ones that know replicas."""
    source = inspect.getsource(Trainer)
    for call in ("self.label_smoother(", "self.compute_loss_func(", "self.gather_function("):
        assert call in source, f"Trainer does not call {call} any more"


@pytest.mark.parametrize("name", sorted(set(_overrides(Accelerator, accelerate.Accelerator)) - {"__init__"}))
def test_overrides_of_accelerator_take_what_loops_give(name: str) -> None:
    assert _takes_what_they_give(getattr(Accelerator, name), getattr(accelerate.Accelerator, name))


def test_a_signature_that_lost_an_argument_is_found() -> None:
    def theirs(self: Any, model: Any, new_argument: bool = False) -> None: ...

    def ours(self: Any, model: Any) -> None: ...

    assert not _takes_what_they_give(ours, theirs)
    assert _takes_what_they_give(theirs, ours)


# ----- TRL -----


def test_trl_replaces_forward_as_we_expect() -> None:
    """`FusedHead.taken_from` recognises the replacement by its name, and reads two variables of its closure."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer import utils

    from booster.integrations.fused_head import FusedHead

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    assert FusedHead.taken_from(model) is None
    utils.add_fused_lm_head(model, temperature=0.5, outputs=("log_probs", "entropy"))
    assert "forward" in vars(model)
    assert FusedHead.taken_from(model) == FusedHead(0.5, ("log_probs", "entropy"))
    assert "forward" not in vars(model)
    fields = utils.FusedCausalLMOutput.__dataclass_fields__
    assert {"loss", "log_probs", "label_mask", "aux_loss", "entropy", "is_top1"} <= set(fields)


@pytest.mark.parametrize(
    ("trainer_class", "name"),
    [
        ("SFTTrainer", "_prepare_dataset"),
        ("KTOTrainer", "_prepare_dataset"),
        ("DPOTrainer", "_precompute_ref_logps"),
        ("KTOTrainer", "_precompute_ref_logps"),
        ("DPOTrainer", "compute_ref_log_probs"),
        ("GRPOTrainer", "_calculate_rewards"),
        ("RLOOTrainer", "_calculate_rewards"),
    ],
)
def test_trl_has_what_we_override(trainer_class: str, name: str) -> None:
    import trl

    from booster.integrations.trl_trainers import BoostedTRLTrainer

    theirs = getattr(getattr(trl, trainer_class), name, None)
    assert theirs is not None, f"{trainer_class} has no {name} any more"
    assert f".{name}(" in inspect.getsource(sys.modules[theirs.__module__]), f"nothing calls {trainer_class}.{name}"
    assert _takes_what_they_give(getattr(BoostedTRLTrainer, name), theirs)


def test_trl_generates_by_what_we_replace() -> None:
    from trl import DistillationTrainer, GRPOTrainer
    from trl.experimental.a2po import A2POTrainer
    from trl.experimental.iw_opd import IWOPDTrainer
    from trl.experimental.online_dpo import OnlineDPOTrainer
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    source = inspect.getsource(VLLMGeneration)
    assert "self._init_vllm()" in source and source.count("if accelerator.is_main_process") == 3
    assert ".update_named_params(self._weight_metadata, " in inspect.getsource(VLLMGeneration.sync_weights)
    assert [*inspect.signature(VLLMClient.update_named_params).parameters] == ["self", "metadata", "named_params"]
    source = inspect.getsource(GRPOTrainer)
    assert "vllm_client.get_server_info()" in source and source.count("self._standalone_tools") == 2
    assert "self.rollout_func(prompts, self)" in source and "apply_coef = self.entropy_coef\n" in source
    redirected = "model, unwrapped_student, self._compute_loss, unwrapped_student, inputs, num_items_in_batch\n"
    assert redirected in inspect.getsource(DistillationTrainer.compute_loss)
    assert inspect.getsource(A2POTrainer).count("self._estimate_optimal_values()") == 2
    source = inspect.getsource(OnlineDPOTrainer)
    assert source.count("self.accelerator.backward(loss, **kwargs)") == 1
    assert "return prompt_ids, prompt_mask, completion_ids, completion_mask, vision_generation_kwargs" in source
    for each, metric in ((A2POTrainer, "implicit_reward"), (IWOPDTrainer, "iw_opd/mean_weight")):
        assert f'self._metrics[mode]["{metric}"].append(' in inspect.getsource(each)


@pytest.mark.parametrize("kind", ["async_grpo", "async_distillation"])
def test_trl_asks_outside_by_what_we_replace(kind: str) -> None:
    from booster.integrations.trl_async import BoostedAsyncTrainer

    module = importlib.import_module(f"trl.experimental.{kind}.{kind}_trainer")
    names = ("VLLMClient", "WeightTransferClient", "AsyncRolloutWorker", "save_lora_adapter")
    assert all(callable(vars(module).get(name)) for name in (*names, "get_peak_flops_per_device"))
    trainer = next(each for name, each in vars(module).items() if name.endswith("Trainer") and name.startswith("Async"))
    for name in ("_streaming_iter", "_sync_weight_merged", "_save_checkpoint", "get_train_dataloader"):
        assert _takes_what_they_give(getattr(BoostedAsyncTrainer, name), getattr(trainer, name)), name
    source = inspect.getsource(trainer)
    assert "self.rollout_queue = self.rollout_worker.rollout_buffer" in source
    assert source.count("self.accelerator.is_main_process") == 13, "all of them run on all ranks"
    packing = importlib.import_module("trl.experimental.async_grpo.packing")
    assert callable(packing.get_target_dtype) and "_flash_attn().flash_attn_varlen_func(" in inspect.getsource(packing)


def test_trl_switches_adapters_as_we_do() -> None:
    from trl.experimental.sdft import SDFTTrainer
    from trl.experimental.sdpo import SDPOTrainer, teacher_sync
    from trl.trainer.utils import use_adapter

    assert list(inspect.signature(use_adapter).parameters) == ["model", "adapter_name"]
    source = inspect.getsource(teacher_sync.PEFTAdapterEMACallback)
    for each in ("if self._initialized:", "self.teacher_adapter_name", "self.sync_steps", "self.update_rate"):
        assert each in source
    for trainer_class in (SDPOTrainer, SDFTTrainer):
        assert inspect.getsource(trainer_class._setup_teacher_model).count("self.teacher_model = self.model") == 3


# ----- Lightning -----


@pytest.mark.slow
def test_overrides_of_lightning_take_what_it_gives() -> None:
    from lightning.fabric.strategies import ParallelStrategy as OfFabric
    from lightning.pytorch.strategies import ParallelStrategy as OfTrainer

    from booster.integrations.lightning.strategy import FabricMethods, TrainerMethods

    for ours, theirs in ((FabricMethods, OfFabric), (TrainerMethods, OfTrainer)):
        names = set(_overrides(ours, theirs)) - {"__init__"}
        assert {"setup_environment", "barrier", "save_checkpoint"} <= names
        for name in names:
            assert _takes_what_they_give(getattr(ours, name), getattr(theirs, name)), f"{theirs.__name__}.{name}"


def test_fabric_keeps_the_module_where_the_boosted_one_is_put() -> None:
    """Otherwise `generate`, state dicts and attributes of Fabric's wrapper would be those of one rank's part."""
    from lightning.fabric.wrappers import _FabricModule

    source = inspect.getsource(_FabricModule.__init__)
    assert "self._original_module = " in source
    assert "self._forward_module != self._original_module" in inspect.getsource(_FabricModule.__getattr__)


def test_lightning_toggles_by_the_methods_that_are_replaced() -> None:
    """Otherwise gradients of the other optimizer's parameters would be left behind."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import LightningOptimizer

    for caller in (LightningOptimizer.toggle_model, LightningModule.toggled_optimizer):
        source = inspect.getsource(caller)
        assert ".toggle_optimizer(" in source and ".untoggle_optimizer(" in source
