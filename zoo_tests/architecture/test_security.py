"""The library runs no code that it finds in a file or is sent by a peer: its source is read for what could do so.

What fails here first is a convenient `torch.load` or an object collective. Use safetensors and JSON, between ranks
`plugins.hybrid_parallel.distributed.agreement`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from zoo_tests.architecture.sources import REPOSITORY, tree_of

SCANNED = ("shardformer", "booster", "plugins", "examples", "benchmarks")
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "pickle5",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "jsonpickle",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
# By its last name, of whatever object: collectives and files that carry pickles.
CALLS = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "FileSystemReader",
    "FileSystemWriter",
    "read_pickle",
    "unsafe_load",
    "full_load",
    "unsafe_load_all",
}


def offences(tree: ast.Module) -> list[str]:
    """What in a module could run foreign code, in order of lines."""
    return [f"line {node.lineno}: {what}" for node in ast.walk(tree) for what in _offences_of(node)]


def _offences_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {alias.name}" for alias in node.names if MODULES & set(alias.name.split(".")))
    elif isinstance(node, ast.ImportFrom):
        imported = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        yield from sorted(imported & (MODULES | CALLS))
        if node.module in ("torch", "torch.serialization", "numpy", "yaml") and "load" in imported:
            yield f"from {node.module} import load, which hides what load is"
    elif isinstance(node, ast.Call):
        yield from _offences_of_call(node)
    elif isinstance(node, ast.Attribute) and node.attr in MODULES | CALLS:
        yield node.attr  # without a call, too: it may be called under another name


def _offences_of_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    options = {option.arg: ast.unparse(option.value) for option in call.keywords}
    if isinstance(call.func, ast.Name) and name in BUILTINS:
        yield f"{name}()"
    if name in ("builtins.eval", "builtins.exec"):
        yield f"{name}()"
    if name in ("torch.load", "torch.serialization.load") and options.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False":
        yield "numpy.load with allow_pickle"
    if name == "yaml.load" and options.get("Loader") not in ("yaml.SafeLoader", "yaml.CSafeLoader"):
        yield "yaml.load without SafeLoader"
    if name in ("dcp.save", "dcp.load", "dcp.async_save") and options.get("no_dist") != "True":
        yield f"{name} without no_dist=True sends pickled plans between ranks"
    if name.rpartition(".")[2] == "import_module" and MODULES & {getattr(each, "value", None) for each in call.args}:
        yield f"{name} of a module that unpickles"


def _files() -> list[Path]:
    return sorted(path for package in SCANNED for path in (REPOSITORY / package).rglob("*.py"))


def test_the_source_is_found() -> None:
    names = {str(path.relative_to(REPOSITORY)) for path in _files()}
    assert {"booster/booster.py", "shardformer/shardformer.py", "plugins/hybrid_parallel/plugin.py"} <= names


@pytest.mark.parametrize("package", SCANNED)
def test_nothing_in_the_source_runs_foreign_code(package: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)} {offence}"
        for path in _files()
        if path.is_relative_to(REPOSITORY / package)
        for offence in offences(tree_of(path))
    ]
    assert not found, "\n".join(found)


BAD = [
    "import pickle",
    "import _pickle as p",
    "import torch.multiprocessing, pickle",
    "from pickle import loads",
    "from six.moves import cPickle",
    "import cloudpickle, dill",
    "import joblib",
    "import shelve",
    "def f():\n    import marshal",
    "import json; json.marshal.loads(b'')",
    "eval('1')",
    "class A:\n    def f(self, x):\n        exec(x)",
    "__import__('os')",
    "import builtins; builtins.eval('1')",
    "importlib.import_module('pickle')",
    "torch.load(path)",
    "torch.load(path, weights_only=False)",
    "torch.load(path, weights_only=flag)",
    "torch.serialization.load(path)",
    "from torch import load",
    "np.load(path, allow_pickle=True)",
    "yaml.load(text)",
    "yaml.load(text, Loader=yaml.Loader)",
    "yaml.unsafe_load(text)",
    "dist.all_gather_object(out, value)",
    "torch.distributed.gather_object(value)",
    "dist.broadcast_object_list(values, src=0)",
    "dist.scatter_object_list(out, values)",
    "dist.send_object_list(values, dst=1)",
    "send = dist.recv_object_list",
    "from torch.distributed import broadcast_object_list",
    "from torch.distributed.checkpoint import FileSystemReader",
    "dcp.FileSystemWriter(path)",
    "dcp.save(state, storage_writer=writer)",
    "pandas.read_pickle(path)",
]
GOOD = [
    "model.eval()",
    "torch.compile(model)",
    "re.compile('x')",
    "torch.load(path, weights_only=True)",
    "np.load(path)",
    "yaml.safe_load(text)",
    "yaml.load(text, Loader=yaml.SafeLoader)",
    "dist.all_gather(out, value)",
    "dcp.save(state, storage_writer=writer, no_dist=True)",
    "'''No pickle: import pickle, eval()'''",
]


@pytest.mark.parametrize("source", BAD)
def test_what_runs_foreign_code_is_found(source: str) -> None:
    assert offences(ast.parse(source))


@pytest.mark.parametrize("source", GOOD)
def test_what_does_not_is_left_alone(source: str) -> None:
    assert not offences(ast.parse(source))
