"""The scripts, with the arguments that make them small, and what each leaves to compare."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# Name -> ranks, layout, and the replicas that share the batch of one process.
LAYOUTS = {
    "tp2": (2, "tp=2", 1),
    "pp2": (2, "pp=2,num_microbatches=2", 1),
    "dp2": (2, "dp=2", 2),
    "tp2pp2": (4, "tp=2,pp=2,num_microbatches=2", 1),
    "zero3": (2, "zero_stage=3", 2),
}
_TRAINER = (
    "--output_dir OUT --max_steps 5 --logging_steps 1 --report_to none --use_cpu --seed 3 --disable_tqdm True "
    "--per_device_train_batch_size BATCH --per_device_eval_batch_size BATCH --save_strategy no --learning_rate 1e-3"
)
_TRL = f"{_TRAINER} --bf16 False --gradient_checkpointing False --dtype float32"
_EVALUATED = f"{_TRL} --eval_strategy steps --eval_steps 3"
_GENERATED = f"{_TRL} --max_completion_length 4 --dataset_name prompts --model_name_or_path causal"
_EXAMPLE = f"{_TRAINER} --do_train --do_eval"
_ADAPTERS = (
    "--base_model causal --data_path tasks --output_dir OUT --batch_size BATCH --dtype float32 --device_map cpu "
    "--seed 3 --val_set_size 6 --eval_step 3 --save_step 99 --lora_dropout 0 --lora_r 4 --learning_rate 1e-2"
)
# accelerate steps a schedule once for each process, which some scripts do not know.
_LOOP = (
    "--output_dir OUT --max_train_steps 5 --per_device_train_batch_size BATCH --per_device_eval_batch_size BATCH "
    "--seed 3 --learning_rate 1e-3 --lr_scheduler_type constant"
)
_S2S = "--predict_with_generate --max_target_length 8 --val_max_target_length 8"
_SUMMARY = "--text_column text --summary_column summary --num_beams 2"
_LANGUAGES = "--source_lang en --target_lang de"
_BLOCKS, _PIECES = "--block_size 16", "--max_seq_length 32 --doc_stride 8"
_FOLDERS = "--train_dir images/train --validation_dir images/test --image_column_name image --label_column_name label"
_MASKED = "--dataset_name imagefolder --train_dir images/train/** --image_column_name image --train_val_split"
_PATCHES = "--mask_patch_size 8"
_SOUNDS = "--dataset_name sounds --audio_column_name audio --eval_split_name validation"
_BOXES, _INSTANCES = "--dataset_name boxes --image_square_size 16 --ignore_mismatched_sizes", "--dataset_name masks"
_INSTANCES += " --image_height 64 --image_width 64 --adam_epsilon 1e-4"
# Scripts of transformers, without `run_`: kind of model, kind of rows, arguments, of the loops without a Trainer too.
_EXAMPLES = {
    "clm": ("causal", "texts", _BLOCKS, ""),
    "mlm": ("bert", "texts", "--max_seq_length 16", ""),
    "fim": ("causal", "texts", f"{_BLOCKS} --fim_rate 0.5 --attn_implementation eager", f"{_BLOCKS} --fim_rate 0.5"),
    "plm": ("xlnet", "texts", "--max_seq_length 16 --max_span_length 3", None),
    "glue": ("bert", "classes", "--max_seq_length 32", "--max_length 32"),
    "classification": ("bert", "classes", "--text_column_names sentence1,sentence2 --metric_name accuracy", None),
    "ner": ("bert", "tags", "", ""),
    # Their softmax is over padding too, of which a replica's share of a batch may have less.
    "qa": ("bert", "questions", _PIECES, f"{_PIECES} --pad_to_max_length"),
    "qa_beam_search": (
        "xlnet",
        "questions",
        f"{_PIECES} --n_best_size 4",
        f"{_PIECES} --n_best_size 4 --pad_to_max_length",
    ),
    "seq2seq_qa": ("t5", "questions", "--predict_with_generate --max_seq_length 32 --max_answer_length 8", None),
    "swag": ("bert", "choices", "", ""),
    "summarization": ("t5", "summaries", f"{_S2S} {_SUMMARY}", f"{_SUMMARY} --max_target_length 8"),
    "translation": ("t5", "translations", f"{_S2S} {_LANGUAGES}", f"{_LANGUAGES} --max_target_length 8"),
    "clip": ("clip", "captions", "--remove_unused_columns False --adam_epsilon 1e-4", None),
    "image_classification": ("vit", None, f"{_FOLDERS} --remove_unused_columns False", _FOLDERS),
    "mae": ("mae", None, f"{_MASKED} 0 --remove_unused_columns False --base_learning_rate 0.1", None),
    "mim": ("vit", None, f"{_MASKED} 0 {_PATCHES} --remove_unused_columns False", f"{_MASKED} 0.2 {_PATCHES}"),
    "xnli": ("bert", None, "--language en --max_seq_length 32", None),
    "audio_classification": (
        "wav2vec2",
        None,
        f"{_SOUNDS} --label_column_name label --remove_unused_columns False",
        None,
    ),
    "speech_recognition_ctc": ("wav2vec2", None, f"{_SOUNDS} --mask_time_prob 0 --eval_metrics wer", None),
    "wav2vec2_pretraining": (
        "wav2vec2",
        None,
        "",
        "--dataset_config_names default --validation_split_percentage 20"
        " --dataset_split_names train --dataset_name sounds",
    ),
    "object_detection": (
        "yolos",
        None,
        f"{_BOXES} --eval_do_concat_batches False --remove_unused_columns False",
        _BOXES,
    ),
    "instance_segmentation": ("maskformer", None, _INSTANCES, _INSTANCES),
    "semantic_segmentation": (
        "segformer",
        None,
        "--dataset_name segments --remove_unused_columns False",
        "--dataset_name segments",
    ),
}
# Whose samples, or dropout, draw random numbers, so that they depend on how many processes there are.
_DRAWN = ("mlm", "plm", "image_classification", "mae", "mim", "transformer", "train", "grpo", "rloo", "distillation")
# accelerate reads a batch ahead, which draws for it before an evaluation: these end with an epoch.
_STEPS, _WHOLE_EPOCHS = re.compile(r"--max(_train)?_steps 5"), "--num_train_epochs 2"


def _examples() -> dict[str, str]:
    found = {}
    for name, (model, rows, arguments, of_loop) in _EXAMPLES.items():
        files = f" --train_file {rows}/train.json --validation_file {rows}/test.json" if rows is not None else ""
        start = f"--model_name_or_path {model}{files}"
        of_loop = of_loop if of_loop != "" else arguments
        for file, rest in ((f"run_{name}.py", f"{arguments} {_EXAMPLE}"), (f"run_{name}_no_trainer.py", of_loop)):
            if rest is not None:
                rest = rest if rest is not of_loop else f"{rest} {_LOOP}"
                rest = _STEPS.sub(_WHOLE_EPOCHS, rest) if name in _DRAWN else rest
                # Trainers of images without labels split off what they evaluate, without a seed.
                found[file] = f"{start} {rest.replace('--do_eval', '') if f'{_MASKED} 0 ' in rest else rest}"
    return found


# Name of a script's file, or of its folder and file -> its arguments.
ARGUMENTS = {
    **_examples(),
    "sft.py": f"--model_name_or_path causal --dataset_name texts {_EVALUATED}",
    "dpo.py": f"--model_name_or_path causal --dataset_name pairs {_EVALUATED}",
    "kto.py": f"--model_name_or_path causal --dataset_name marks {_EVALUATED}",
    "reward.py": f"--model_name_or_path reward --dataset_name answers {_EVALUATED}",
    "distillation.py": f"{_GENERATED} --teacher_model_name_or_path teacher",
    "grpo.py": f"{_GENERATED} --num_generations 2 --reward_model_name_or_path reward",
    "rloo.py": f"{_GENERATED} --num_generations 2 --reward_model_name_or_path reward",
    **dict.fromkeys(
        (
            *("nlp_example.py", "complete_nlp_example.py", "gradient_accumulation.py", "early_stopping.py"),
            *("local_sgd.py", "memory.py", "multi_process_metrics.py", "profiler.py", "ddp_comm_hook.py"),
            *("automatic_gradient_accumulation.py", "cross_validation.py", "tracking.py", "checkpointing.py"),
        ),
        "--cpu",
    ),
    "olora_finetuning.py": _ADAPTERS,
    "peft_no_lora_accelerate.py": "--model_name_or_path bert --output_dir OUT --seed 3 --num_train_epochs 1 "
    "--per_device_train_batch_size 5",
    "miss_finetuning.py": f"--base_model_name_or_path causal --bits fp32 --data_path marks --dataset_split train "
    f"--dataset_field prompt completion --bf16 False {_TRAINER}",
    "test_checkpointing.py": "--model_name_or_path bert-base-cased --output_dir OUT --num_epochs 2",
    "test_performance.py": "--model_name_or_path bert-base-cased --output_dir OUT --num_epochs 2",
    **dict.fromkeys(
        ("test_script.py", "test_sync.py", "test_ops.py", "test_distributed_data_loop.py", "test_metrics.py"), ""
    ),
    "bug_report/bug_report_model.py": "",
    "basics/transformer.py": "",
    "language_model/train.py": "",
}
_ACCELERATE = ("test_script", "test_sync", "test_ops", "test_distributed_data_loop")
_DEPENDING = ("test_metrics", "test_checkpointing", "test_performance")
_INSTALLED = {
    "trl": tuple(f"scripts/{name}.py" for name in ("sft", "dpo", "kto", "reward", "distillation", "grpo", "rloo")),
    "accelerate": tuple(
        f"test_utils/scripts/{name}.py" for name in (*_ACCELERATE, *(f"external_deps/{name}" for name in _DEPENDING))
    ),
}


@dataclass(frozen=True)
class Job:
    """One script.

    Attributes:
        path: its file.
        arguments: of its command line; OUT is the folder that it may write to, BATCH its batch size.
    """

    path: Path
    arguments: str

    @property
    def name(self) -> str:
        """As the table calls it: its file, with the folder where that tells what it is."""
        longer = f"{self.path.parent.name}/{self.path.name}"
        return longer if longer in ARGUMENTS else self.path.name

    @property
    def draws(self) -> bool:
        """Whether its samples draw random numbers, of which each of several replicas has its own."""
        return self.path.stem.removeprefix("run_").removesuffix("_no_trainer") in _DRAWN

    @property
    def has_batch(self) -> bool:
        """Whether replicas can share the batch of one process; else they are compared with as many processes."""
        return "BATCH" in self.arguments

    def command(self, out: Path, batch: int) -> list[str]:
        return [str(self.path), *self.arguments.replace("OUT", str(out)).replace("BATCH", str(batch)).split()]


def jobs(folders: list[Path]) -> tuple[list[Job], list[Path]]:
    """The scripts of installed packages and of folders, and those of folders that have no arguments here."""
    paths = []
    for package, files in _INSTALLED.items():
        spec = find_spec(package)
        paths += [Path(spec.origin).parent / file for file in files] if spec is not None and spec.origin else []
    paths += [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    of_path = {path: ARGUMENTS.get(f"{path.parent.name}/{path.name}", ARGUMENTS.get(path.name)) for path in paths}
    known = [Job(path, arguments) for path, arguments in of_path.items() if arguments is not None]
    return known, [path for path, arguments in of_path.items() if arguments is None]
