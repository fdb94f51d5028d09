"""The scripts, with the arguments that make them small, and what each leaves to compare."""

from __future__ import annotations

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
_TRL = f"{_TRAINER} --eval_strategy steps --eval_steps 3 --bf16 False --gradient_checkpointing False --dtype float32"
_EXAMPLE = f"{_TRAINER} --do_train --do_eval --train_file ROWS/train.json --validation_file ROWS/test.json"
_LOOP = (
    "--output_dir OUT --max_train_steps 5 --per_device_train_batch_size BATCH --per_device_eval_batch_size BATCH "
    "--seed 3 --train_file ROWS/train.json --validation_file ROWS/test.json --learning_rate 1e-3"
)
_S2S = f"{_EXAMPLE} --model_name_or_path t5 --predict_with_generate --max_target_length 8 --val_max_target_length 8"
_NEXT = "--num_beams 2"
# Name of a script's file -> its arguments; ROWS/ is a folder of rows.
ARGUMENTS = {
    "sft.py": f"--model_name_or_path causal --dataset_name texts {_TRL}",
    "dpo.py": f"--model_name_or_path causal --dataset_name pairs {_TRL}",
    "kto.py": f"--model_name_or_path causal --dataset_name marks {_TRL}",
    "reward.py": f"--model_name_or_path reward --dataset_name answers {_TRL}",
    "run_clm.py": f"--model_name_or_path causal --block_size 16 {_EXAMPLE}".replace("ROWS", "texts"),
    "run_mlm.py": f"--model_name_or_path bert --max_seq_length 16 {_EXAMPLE}".replace("ROWS", "texts"),
    "run_glue.py": f"--model_name_or_path bert --max_seq_length 32 {_EXAMPLE}".replace("ROWS", "classes"),
    "run_ner.py": f"--model_name_or_path bert {_EXAMPLE}".replace("ROWS", "tags"),
    "run_qa.py": f"--model_name_or_path bert --max_seq_length 32 --doc_stride 8 {_EXAMPLE}".replace(
        "ROWS", "questions"
    ),
    "run_summarization.py": f"{_S2S} {_NEXT} --text_column text --summary_column summary".replace("ROWS", "summaries"),
    "run_translation.py": f"{_S2S} --source_lang en --target_lang de".replace("ROWS", "translations"),
    "run_clm_no_trainer.py": f"--model_name_or_path causal --block_size 16 {_LOOP}".replace("ROWS", "texts"),
    "run_glue_no_trainer.py": f"--model_name_or_path bert --max_length 32 {_LOOP}".replace("ROWS", "classes"),
    "run_ner_no_trainer.py": f"--model_name_or_path bert {_LOOP}".replace("ROWS", "tags"),
    **dict.fromkeys(
        (
            *("nlp_example.py", "complete_nlp_example.py", "gradient_accumulation.py", "early_stopping.py"),
            *("local_sgd.py", "memory.py", "multi_process_metrics.py", "profiler.py", "ddp_comm_hook.py"),
            *("automatic_gradient_accumulation.py", "cross_validation.py"),
        ),
        "--cpu",
    ),
    **dict.fromkeys(
        ("test_script.py", "test_sync.py", "test_ops.py", "test_distributed_data_loop.py", "test_metrics.py"), ""
    ),
}
_INSTALLED = {
    "trl": ("scripts/sft.py", "scripts/dpo.py", "scripts/kto.py", "scripts/reward.py"),
    "accelerate": tuple(
        f"test_utils/scripts/{name}.py"
        for name in ("test_script", "test_sync", "test_ops", "test_distributed_data_loop", "external_deps/test_metrics")
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
    known = [Job(path, ARGUMENTS[path.name]) for path in paths if path.name in ARGUMENTS]
    return known, [path for path in paths if path.name not in ARGUMENTS]
