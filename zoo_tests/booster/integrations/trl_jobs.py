"""Jobs of TRL's trainers, run by one plain process and, boosted, by the ranks of a layout.

A job is the same script for both: `run` makes model, data and arguments. Texts of all lengths, a vocabulary and layers
of odd sizes, and a short last batch that replicas share unevenly are the point: a mean of means would show.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "dp2": {},
    "tp2pp2": {"tp_size": 2, "pp_size": 2},
    "pp2dp2": {"pp_size": 2, "dp_size": 2},
    "pp2ep2": {"pp_size": 2, "ep_size": 2},  # two replicas, which share experts
}
_CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
    "gemma2": Gemma2Config,
}
_SIZES: dict[str, Any] = {
    "vocab_size": 271,  # more than the tokenizer has, and padded over ranks
    "hidden_size": 24,
    "intermediate_size": 34,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # so that no prediction is uniform
}
# Roles and turns, with the marks by which TRL finds what an assistant says.
_CHAT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}A{% generation %}"
    "{{ message['content'] }}{{ message['tool_calls'] or '' }}</s>{% endgeneration %}"
    "{% else %}U{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One training script.

    Attributes:
        kind: folder of TRL's trainer: "sft", "dpo", "grpo", "online_dpo", ...
        arguments: of the trainer's configuration; batch sizes are those of all replicas together.
        data: kind of texts: "prompts", "chats", or "texts".
        family: architecture of the model.
        reference: the reference model of DPO: "model", or "none".
        adapters: options of a `LoraConfig`, or of the configuration of another `peft_type`; None for none.
        trained_adapters: whether the adapter is part of the model that is given, and has been trained before.
        sizes: of the model, over those of this module.
        samples: how many of them to train on.
        plugin: more options of the layout.
        dtype: of the weights.
        outside: tools, environments and rollouts: more arguments of the trainer.
    """

    kind: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: str = "prompts"
    family: str = "llama"
    reference: str = "model"
    adapters: dict[str, Any] | None = None
    trained_adapters: bool = False
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: int = 29
    plugin: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    outside: dict[str, Any] = dataclasses.field(default_factory=dict)


GENERATING = ("grpo", "rloo", "gmpo", "sdpo")
_REWARDED = (*GENERATING, "online_dpo", "a2po")
_TAUGHT = ("gkd", "iw_opd", "gold", "distillation")
_PROMPTED = (*_REWARDED, "sdft", "distillation", "server_distillation")
_NAMES = {"reward": "Reward", "distillation": "Distillation", "online_dpo": "OnlineDPO", "iw_opd": "IWOPD"}
_NAMES["server_distillation"] = "ServerDistillation"
_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(GENERATING, {"num_generations": 4, "max_completion_length": 9}),
    "online_dpo": {"max_new_tokens": 9},
    "a2po": {"max_completion_length": 9, "num_value_samples": 3, "filter_all_incorrect": False},
    "sdft": {"num_generations": 2, "max_completion_length": 9},
    "iw_opd": {"max_completion_length": 9},
    **dict.fromkeys(("distillation", "server_distillation"), {"max_completion_length": 9}),
    "gold": {"max_completion_length": 9, "use_uld_loss": False},
}


def of_letters(completions: list[str], **further: Any) -> list[float]:
    """A reward that differs for nearly all completions."""
    return [sum(map(ord, text)) % 17 / 7 for text in completions]


def of_success(completions: list[str], **further: Any) -> list[float]:
    """A reward of 0 or 1."""
    return [float(sum(map(ord, text)) % 3 == 0) for text in completions]


def of_length(completion_ids: list[list[int]], log_metric: Any = None, **further: Any) -> list[float | None]:
    """A reward of some completions alone."""
    return [None if len(ids) % 4 == 0 else len(ids) / 10 for ids in completion_ids]


def ranks_of(layout: str) -> int:
    return 2 * (len(layout) // 3)


# ----- model and data -----


def model_of(job: Job, seed: int = 3) -> PreTrainedModel:
    """A model of the job's family with weights of its own."""
    torch.manual_seed(seed)
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if job.kind == "reward":
        special["num_labels"] = 1
    if job.kind in (*_PROMPTED, *_TAUGHT):
        special["eos_token_id"] = list(range(1, 40))  # so that completions end early
    config = _CONFIGS[job.family](**{**_SIZES, **special, **job.sizes})
    kind = AutoModelForSequenceClassification if job.kind == "reward" else AutoModelForCausalLM
    return kind.from_config(config).to(getattr(torch, job.dtype))


def with_trained_adapters(model: PreTrainedModel, options: dict[str, Any]) -> Any:
    """The model with a LoRA adapter that is not zero."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(**options))
    torch.manual_seed(9)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data = 0.3 * torch.randn_like(param)
    return model


def tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of bytes, which needs no files."""
    letters = ("<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()))
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", chat_template=_CHAT)


def rows_of(job: Job, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of different lengths, of the kind that the trainer reads."""
    rows = []
    for index in range(seed, seed + count):
        prompt = f"{index} + {index * index % 7}{' +' * (index % 4)} ="
        good, bad = " " + "ok" * (1 + index * 5 % 6), " no" * (1 + index * 3 % 5)
        if job.data == "texts":
            rows.append({"text": prompt + good})
        elif job.data == "chats":
            user, assistant = {"role": "user", "content": prompt}, {"role": "assistant", "content": good}
            again = [user, assistant] if index % 3 == 0 else []
            rows.append({"messages": [*again, user, assistant]})
        elif job.kind in _PROMPTED:
            prompt = [{"role": "user", "content": prompt}] if job.outside else prompt
            rows.append({"prompt": prompt} | ({"privileged_context": good} if job.kind == "sdft" else {}))
        elif job.kind == "sft":
            rows.append({"prompt": prompt, "completion": good})
        elif job.kind == "kto":
            rows.append({"prompt": prompt, "completion": good if index % 3 else bad, "label": index % 3 > 0})
        else:
            rows.append({"prompt": prompt, "chosen": good, "rejected": bad})
            if job.kind == "tpo":
                rows[-1]["reference"] = f"{good} so"
    return rows


# ----- jobs -----


def classes_of(kind: str) -> tuple[Any, Any]:
    """TRL's trainer and its configuration."""
    name = _NAMES.get(kind, kind.upper())
    place = (
        "trl" if kind in ("sft", "dpo", "reward", "kto", "grpo", "rloo", "distillation") else f"trl.experimental.{kind}"
    )
    module = importlib.import_module(place)
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def trainer_of(job: Job, folder: str, layout: str | None) -> Any:
    """Make the job's trainer: TRL's own one without a layout."""
    from peft import get_peft_config

    from booster.integrations.transformers import boosted
    from plugins.hybrid_parallel import HybridParallelPlugin

    base, config = classes_of(job.kind)
    model = model_of(job)
    options: dict[str, Any] = {"model": model, "processing_class": tokenizer()}
    options["train_dataset"] = datasets.Dataset.from_list(rows_of(job, job.samples))
    options["eval_dataset"] = datasets.Dataset.from_list(rows_of(job, 11, seed=100))
    if job.kind in (*GENERATING, "sdft"):  # accelerate cuts values of the last batch as if no prompt were repeated
        options["eval_dataset"] = datasets.Dataset.from_list(rows_of(job, 8, seed=100))
    if job.trained_adapters:
        options["model"] = with_trained_adapters(model, job.adapters)
    elif job.adapters is not None:
        options["peft_config"] = get_peft_config({"peft_type": "LORA", **job.adapters})
    if job.kind in ("dpo", "kto") and job.reference == "model":
        options["ref_model"] = model_of(job, seed=4)
    if job.kind in _TAUGHT:
        options["teacher_model"] = model_of(job, seed=4)
    if job.kind == "iw_opd":  # it loads the teacher's tokenizer from where the teacher says that it comes from
        tokenizer().save_pretrained(f"{folder}/tokenizer")
        options["teacher_model"].config._name_or_path = f"{folder}/tokenizer"
        options["teacher_model"].config.save_pretrained(f"{folder}/tokenizer")
    if job.kind in _REWARDED:
        options["reward_funcs"] = {"a2po": [of_success], "online_dpo": [of_letters]}.get(
            job.kind, [of_letters, of_length]
        )
    if job.kind == "a2po":  # it takes the tokenizer's side, and what is generated behind padding depends on its length
        options["processing_class"].padding_side = "left"
    if job.kind == "rloo":
        options["reward_funcs"].append(model_of(dataclasses.replace(job, kind="reward"), seed=5))
        options["reward_processing_classes"] = [None, None, tokenizer()]
    if job.outside:
        options |= job.outside | {"reward_funcs": of_length}
        options["processing_class"].response_schema = {}  # `parse_response` is a test's own
    if job.kind in (*GENERATING, "sdft") or job.arguments.get("vllm_mode") == "colocate":
        # TRL loads the reference, or an engine's model, from where the model says that it comes from.
        # The plain run comes first.
        reference = Path(folder).parent / "reference"
        if layout is None and not reference.exists():
            model_of(job, seed=4).save_pretrained(reference)
        model.name_or_path = model.config._name_or_path = str(reference)
    args = config(folder, **_arguments(job, replicas=2 if layout and layout.endswith(("dp2", "ep2")) else 1))
    if layout is None:
        return base(args=args, **options)
    return boosted(base)(args=args, plugin=HybridParallelPlugin(**LAYOUTS[layout], **job.plugin), **options)


def _arguments(job: Job, replicas: int) -> dict[str, Any]:
    given = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "max_steps": 5,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **_DEFAULTS.get(job.kind, {}),
        **job.arguments,
    }
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "precompute_ref_batch_size"):
        if given.get(name):
            given[name] = given[name] // replicas
    return given


def run(
    job: Job, folder: str, layout: str | None = None, resume: str | None = None, before: Any = None
) -> list[dict[str, Any]]:
    """Run a job on this rank, or in this process; save its model in `folder`. Return `log_history`.

    Args:
        resume: checkpoint to go on from.
        before: called with the trainer before it trains.
    """
    as_a_new_process()
    trainer = trainer_of(job, folder, layout)
    if before is not None:
        before(trainer)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(Path(folder) / "saved"))
    return trainer.state.log_history


def as_a_new_process() -> None:
    """Forget what accelerate keeps for a process, and set torchrun's variables if this is a rank."""
    from accelerate.state import AcceleratorState, GradientState

    datasets.disable_progress_bars()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


# ----- comparison -----

_OF_TIME = ("runtime", "step_time", "per_second", "total_flos", "model_preparation_time")


def differences(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, float]:
    """Worst difference of each logged quantity, relative where a value is above 1.

    Raises:
        AssertionError: one of the two logged what the other did not.
    """
    assert [sorted(_kept(each)) for each in found] == [sorted(_kept(each)) for each in expected]
    worst: dict[str, float] = {}
    for one, other in zip(found, expected, strict=True):
        for name in _kept(other):
            gap = abs(one[name] - other[name]) / max(abs(other[name]), 1.0)
            assert gap == gap, f"{name} is {one[name]} instead of {other[name]}"
            worst[name] = max(worst.get(name, 0.0), gap)
    return worst


def _kept(entry: dict[str, Any]) -> list[str]:
    return [name for name, value in entry.items() if value is not None and not name.endswith(_OF_TIME)]


def logits_of(model: Any, ids: list[list[int]]) -> Tensor:
    """Logits of sequences that are padded at their end."""
    longest = max(map(len, ids))
    padded = torch.tensor([[*each, *[0] * (longest - len(each))] for each in ids])
    mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in ids])
    with torch.no_grad():
        return model.eval()(input_ids=padded, attention_mask=mask).logits
