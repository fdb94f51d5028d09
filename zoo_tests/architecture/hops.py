"""How far a reader has to go: what a step, `boost` and an import enter, counted; and the size of the library.

    python -m zoo_tests.architecture.hops [--files]

prints the counts as JSON, from a process of its own; with `--files`, also the files that a step and `boost` enter,
those with the fewest functions first. Two ranks train a small Llama under tensor parallelism. A file is entered when
one of its functions is called; what runs while a module is imported does not count.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from zoo_tests.architecture.sources import REPOSITORY, tree_of

_LIBRARY = ("shardformer", "booster", "plugins", "hybrid_booster")
_CHECK = re.compile(r"_?(check|refuse)(_\w+)?|\w*problems?")


def sizes() -> dict[str, int]:
    """Files, lines, lines of import statements, and files with functions that check or refuse something."""
    files = [path for package in _LIBRARY for path in (REPOSITORY / package).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    trees = [[*ast.walk(tree_of(path))] for path in files]
    imports = [node for tree in trees for node in tree if isinstance(node, ast.Import | ast.ImportFrom)]
    return {
        "files": len(files),
        "lines": sum(text.count("\n") for text in texts),
        "import lines": sum(node.end_lineno - node.lineno + 1 for node in imports),
        "files with checks": sum(any(map(_checks, tree)) for tree in trees),
    }


def _checks(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and _CHECK.fullmatch(node.name) is not None


class Hops:
    """Context that counts the library's files and functions that this thread enters, and how deep they call each other.

    Attributes:
        files, functions: entered.
        depth: most functions of the library on the stack at once.
        calls: of functions of the library.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.files: set[str] = set()
        self.functions: set[tuple[str, int, str]] = set()
        self.depth = 0
        self._here, self._importing = 0, 0

    def __enter__(self) -> Hops:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        code, step = frame.f_code, 1 if event == "call" else -1
        if code.co_name == "<module>":
            self._importing += step
        elif not self._importing and _is_ours(code.co_filename):
            self._here += step
            self.depth = max(self.depth, self._here)
            self.calls += event == "call"
            self.files.add(code.co_filename)
            self.functions.add((code.co_filename, code.co_firstlineno, code.co_qualname))

    def by_file(self) -> list[str]:
        """Return a line for each file: its number of functions, its path, and their names."""
        names = {file: sorted(name for each, _, name in self.functions if each == file) for file in self.files}
        found = sorted(names.items(), key=lambda item: (len(item[1]), item[0]))
        return [f"{len(each)} {Path(file).relative_to(REPOSITORY)}: {', '.join(each)}" for file, each in found]


def _is_ours(file: str) -> bool:
    return file.startswith(_FOLDERS)


_FOLDERS = tuple(f"{REPOSITORY / package}{os.sep}" for package in _LIBRARY)


def counted() -> dict[str, Any]:
    """The counts of this process, which has imported nothing yet, and lists of files by name."""
    import plugins.hybrid_parallel  # noqa: F401

    found = {"modules at import": sum(name.partition(".")[0] in _LIBRARY for name in sys.modules)}
    from transformers import LlamaForCausalLM  # noqa: F401  # once, for both ranks

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, context) as ranks:
        os.environ["XDG_CACHE_HOME"] = folder  # `boost` checks the layout, as in a first job
        return found | next(iter(ranks.map(_of_rank, range(2), [folder] * 2)))


def _of_rank(rank: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    from booster import Booster
    from plugins.hybrid_parallel import HybridParallelPlugin

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    optimizer = torch.optim.AdamW(model.parameters())
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2))
    ids = torch.arange(24).view(2, 12)
    with Hops() as boost:
        model, optimizer, *_ = booster.boost(model, optimizer)
    steps = []
    for _ in range(2):
        with Hops() as step:
            booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(step)
    dist.destroy_process_group()
    first, later = steps
    return {
        "files of boost": len(boost.files),
        "files of a first step": len(first.files),
        "files of a step": len(later.files),
        "functions of a step": len(later.functions),
        "depth of a step": later.depth,
        "calls of a step": later.calls,
        "entered by a step": later.by_file(),
        "entered by boost": boost.by_file(),
    }


if __name__ == "__main__":
    found = sizes() | counted()
    shown = {name: each for name, each in found.items() if "--files" in sys.argv or not isinstance(each, list)}
    sys.stdout.write(f"{json.dumps(shown, indent=1)}\n")
