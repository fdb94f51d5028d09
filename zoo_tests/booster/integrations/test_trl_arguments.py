"""TRL's trainers, options and versions that hold under no layout: each is refused in one sentence, on all ranks.

What breaks here first: an option that TRL has renamed. The list of `docs/trainer.md` has them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import pkgutil
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
import trl

from booster.errors import ConfigurationError
from booster.integrations.arguments import check_callbacks, check_trainer_class
from booster.integrations.transformers import boosted
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.booster.integrations.trl_jobs import (
    Job,
    as_a_new_process,
    classes_of,
    model_of,
    of_letters,
    rows_of,
    tokenizer,
)
from zoo_tests.docs.pages import REPOSITORY
from zoo_tests.docs.pages import rows_of as table_of
from zoo_tests.harness.ranks import run_on_ranks

_MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 36}
_EXPERTS = Job("sft", family="mixtral", sizes=_MIXTURE)
_PARTS = {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
_SUMS = "a loss over the router scores of all tokens of a batch, which "
_PAIRS = "compute_metrics of a BoostedRewardTrainer gets the two answers of each pair in rows that dp_size=2 orders "
# What is asked for: job, arguments, layout -> the sentence.
OPTIONS: dict[str, tuple[Job, dict[str, Any], dict[str, Any], str]] = {
    "activation_offloading": (
        Job("sft"),
        {"activation_offloading": True},
        {"tp_size": 2},
        "SFTConfig(activation_offloading=True) hooks modules that a layout replaces; use gradient_checkpointing=True",
    ),
    "aot": (
        Job("dpo"),
        {"loss_type": ["aot"]},
        {},
        "DPOConfig(loss_type=['aot']): 'aot' sorts the pairs of a batch, which dp_size=2 shares out; use dp_size=1, or "
        "another loss",
    ),
    "aot_unpaired": (
        Job("dpo"),
        {"loss_type": ["sigmoid", "aot_unpaired"]},
        {},
        "DPOConfig(loss_type=['sigmoid', 'aot_unpaired']): 'aot_unpaired' sorts the answers of a batch, which "
        "dp_size=2 shares out; use dp_size=1, or another loss",
    ),
    "sft in dpo": (
        Job("dpo"),
        {"loss_type": ["sigmoid", "sft"]},
        {},
        "DPOConfig(loss_type=['sigmoid', 'sft']): 'sft' is a mean over the tokens of a batch, which dp_size=2 shares "
        "out; use dp_size=1, or another loss",
    ),
    "routers, replicas": (
        _EXPERTS,
        {"router_aux_loss_coef": 0.3},
        {},
        f"router_aux_loss_coef=0.3 weights {_SUMS}dp_size=2 spreads over replicas; use dp_size=1, a pipeline such as "
        "pp_size=2, or router_aux_loss_coef=0.0",
    ),
    "routers, cp_size": (
        _EXPERTS,
        {"router_aux_loss_coef": 0.3},
        {"cp_size": 2},
        f"router_aux_loss_coef=0.3 weights {_SUMS}cp_size=2 spreads over ranks; use cp_size=1, or "
        "router_aux_loss_coef=0.0",
    ),
    "routers, all_to_all": (
        _EXPERTS,
        {"router_aux_loss_coef": 0.3},
        _PARTS,
        f"router_aux_loss_coef=0.3 weights {_SUMS}sequence_parallelism_mode='all_to_all' spreads over ranks; use "
        "'split_gather', or router_aux_loss_coef=0.0",
    ),
    "metrics of pairs": (
        Job("reward"),
        {"compute_metrics": len},
        {},
        f"{_PAIRS}otherwise; use dp_size=1, or the metrics that the trainer logs",
    ),
    "an option of Trainer": (
        Job("sft"),
        {"torch_compile": True},
        {"tp_size": 2},
        "TrainingArguments(torch_compile=True): torch.compile cannot trace the communication of a boosted model; use "
        "HybridParallelPlugin(compile_layers=True)",
    ),
    "means over tokens": (
        Job("tpo"),
        {},
        {},
        "TPOTrainer adds means over the tokens and over the pairs of a batch, which dp_size=2 shares out; use "
        "dp_size=1, as with tp_size or pp_size for all ranks",
    ),
    "vllm": (
        Job("grpo"),
        {"use_vllm": True, "vllm_tensor_parallel_size": 2},
        {},
        "GRPOConfig(vllm_tensor_parallel_size=2) makes an engine of 2 ranks one after the other, which must be of one "
        "replica; use 1, or vllm_mode='server'",
    ),
    "engines of a trainer's own": (
        Job("online_dpo"),
        {"use_vllm": True, "vllm_mode": "colocate"},
        {"tp_size": 2},
        "OnlineDPOConfig(vllm_mode='colocate') starts an engine by itself, which knows nothing of the ranks of a "
        "replica; use vllm_mode='server'",
    ),
    "groups that do not divide": (
        Job("grpo"),
        {"per_device_train_batch_size": 3, "num_generations": 2},
        {"tp_size": 2},
        "GRPOConfig(num_generations=2) does not divide the 3 completions of a generation: per_device_train_batch_size="
        "3, times steps_per_generation=1, times 1 replica; use a divisor, or a larger batch",
    ),
    "means over tokens and completions": (
        Job("sdpo"),
        {"distillation_weight": 0.5, "loss_type": "bnpo"},
        {},
        "SDPOConfig(distillation_weight=0.5) adds means over the tokens and over the completions of a batch, which "
        "dp_size=2 shares out; use dp_size=1, or loss_type='grpo'",
    ),
    "entropy bonus": (
        Job("grpo"),
        {"entropy_coef": 0.1, "top_entropy_quantile": 0.5},
        {},
        "the entropy bonus of GRPOConfig is a mean over the tokens of a batch, which dp_size=2 shares out; use "
        "dp_size=1, or entropy_coef with top_entropy_quantile=1.0, without use_adaptive_entropy",
    ),
    "no plugin": (
        Job("sft"),
        {},
        {"plugin": None},
        "BoostedSFTTrainer got no plugin; give the layout, as in plugin=HybridParallelPlugin(tp_size=2)",
    ),
}
_INSTEAD = (
    "which generates, or takes means over processes, as no layout does; use SFTTrainer, DPOTrainer, RewardTrainer, "
    "KTOTrainer, GRPOTrainer, RLOOTrainer, GMPOTrainer, GKDTrainer, CPOTrainer, ORPOTrainer, TPOTrainer, "
    "OnlineDPOTrainer, SDPOTrainer, SDFTTrainer, A2POTrainer, IWOPDTrainer, GOLDTrainer, DistillationTrainer or "
    "ServerDistillationTrainer, or run {name} without boosted()"
)


def _make(job: Job, given: dict[str, Any], layout: dict[str, Any], folder: str) -> None:
    """Make a trainer with what is to be refused."""
    from datasets import Dataset

    trainer, config = classes_of(job.kind)
    options: dict[str, Any] = {"model": model_of(job), "processing_class": tokenizer()}
    if "compute_metrics" in given:
        options["compute_metrics"], given = given["compute_metrics"], {}
    plugin = layout["plugin"] if "plugin" in layout else HybridParallelPlugin(**layout)
    args = config(folder, bf16=False, use_cpu=True, report_to="none", **given)
    data = Dataset.from_list(rows_of(job, 8))
    if job.kind in ("grpo", "online_dpo", "sdpo"):
        options["reward_funcs"] = of_letters
    boosted(trainer)(args=args, train_dataset=data, plugin=plugin, **options)


def _said_by(action: Callable[[], Any]) -> str:
    try:
        action()
    except ConfigurationError as refusal:
        return str(refusal)
    return "nothing was refused"


def _say_all(folder: str) -> dict[str, str]:
    as_a_new_process()
    said = {}
    for name, (job, given, layout, _) in OPTIONS.items():
        said[name] = _said_by(functools.partial(_make, job, given, layout, folder))
    return said


@functools.cache
def _said_on_two_ranks() -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_on_ranks(2, _say_all, folder, timeout_s=300.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_hold_is_refused_on_all_ranks(name: str) -> None:
    assert [said[name] for said in _said_on_two_ranks()] == [OPTIONS[name][3]] * 2


def _trainers_of_trl() -> dict[str, type]:
    """Every trainer that TRL defines, by the module and the name of its class; later ones with extras are left out."""
    found = {}
    for each in pkgutil.walk_packages(trl.__path__, "trl."):
        if each.name.endswith("_trainer"):
            with contextlib.suppress(ImportError, RuntimeError):  # an extra is missing
                module = importlib.import_module(each.name)
                found |= {value.__name__: value for value in vars(module).values() if _is_defined_in(value, module)}
    return found


def _is_defined_in(value: Any, module: Any) -> bool:
    is_trainer = isinstance(value, type) and issubclass(value, transformers.Trainer)
    return is_trainer and value.__module__ == module.__name__ and not value.__name__.startswith("_")


def test_a_trainer_that_cannot_hold_is_refused() -> None:
    """The table of `docs/trainer.md` has every trainer of TRL."""
    said = {name: _said_by(functools.partial(boosted, each)) for name, each in _trainers_of_trl().items()}
    rows = {row[0].strip("`"): row[1] for row in table_of(REPOSITORY / "docs" / "trainer.md", "Trainer of TRL")}
    assert {"GKDTrainer", "GOLDTrainer", "GRPOTrainer", "TPOTrainer"} <= said.keys() <= rows.keys()
    for name, sentence in said.items():
        refusal = f"boosted() got TRL's {name}, {_INSTEAD.format(name=name)}"
        assert sentence == (refusal if rows[name].startswith("refused") else "nothing was refused"), name


def test_a_callback_that_copies_a_whole_model_is_refused() -> None:
    from trl.experimental.bema_for_ref_model import BEMACallback

    reasons = {
        "of which tp_size=2 leaves it a part": SimpleNamespace(
            config=SimpleNamespace(parallel=SimpleNamespace(tp_size=2), zero=None)
        ),
        "whose weights precision='bf16' rounds": SimpleNamespace(precision="bf16"),
    }
    for reason, plugin in reasons.items():
        for made in (BEMACallback(), trl.BEMACallback()):
            assert _said_by(lambda made=made, plugin=plugin: check_callbacks([made], plugin)) == (
                f"BEMACallback averages a whole model on each rank, {reason}; use replicas alone (dp_size) in fp32, or "
                "ShardedEMA in a callback of your own"
            )


def test_a_class_of_ones_own_is_known_by_its_bases() -> None:
    class Mine(trl.SFTTrainer):
        pass

    assert issubclass(boosted(Mine), trl.SFTTrainer)
    assert "Mine" in boosted(Mine).__name__


def _version(monkeypatch: pytest.MonkeyPatch, found: str | Exception) -> None:
    def version(name: str) -> str:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("booster.integrations.arguments.version", version)


def test_an_old_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _version(monkeypatch, "1.15.3")
    assert _said_by(lambda: check_trainer_class(["SFTTrainer"])) == (
        "TRL 1.15.3 is installed, and boosted() needs the fused head of TRL 1.16; pip install 'trl>=1.16'"
    )
    _version(monkeypatch, "1.16.0")
    check_trainer_class(["SFTTrainer"])


def test_a_trl_that_is_no_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _version(monkeypatch, importlib.metadata.PackageNotFoundError("trl"))
    assert _said_by(lambda: check_trainer_class(["SFTTrainer"])) == (
        "boosted() got TRL's SFTTrainer, and TRL is not installed as a package that has a version; "
        "pip install 'trl>=1.16'"
    )
