"""The list of private names of transformers, torch and Lightning is complete, and true of the installed releases.

What fails here first: a new use of a private name, and a release that has renamed one or given it other arguments.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from zoo_tests.architecture import transformers_names
from zoo_tests.architecture.transformers_names import names_of, read_list, state_of, version_of

_PACKAGE = Path(transformers.__file__).parent
_PACKAGES = [pytest.param(_PACKAGE.with_name(name), id=name) for name in read_list()]
_WRITE = "python -m zoo_tests.architecture.transformers_names writes the list"


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    package = request.node.callspec.params.get("package") if hasattr(request.node, "callspec") else None
    if package is not None and not package.is_dir():
        pytest.skip(f"{package.name} is not installed next to transformers")


@pytest.mark.parametrize("package", _PACKAGES)
def test_every_private_use_is_listed_and_no_other(package: Path) -> None:
    used, listed = names_of(package), read_list()[package.name]["names"].keys()
    new = {name: sorted(files) for name, files in used.items() if name not in listed}
    assert not new and not listed - used.keys(), f"not listed: {new}; not used: {listed - used.keys()}; {_WRITE}"


@pytest.mark.parametrize("package", _PACKAGES)
def test_the_installed_release_has_them_as_listed(package: Path) -> None:
    """Of a release that the list knows, sources have to be equal too; of any other, signatures."""
    found, version = read_list()[package.name], version_of(package)
    is_known = version in found["releases"]
    until = found["releases"].index(version) if is_known else len(found["releases"])
    changed = {}
    for name, states in found["names"].items():
        *_, last = (state for state in states if found["releases"].index(state["release"]) <= until)
        now = state_of(name, package) or {"text": None, "digest": None}
        if any(now[key] != last[key] for key in (("text", "digest") if is_known else ("text",))):
            changed[name] = f"{last['text']} since {last['release']}, {now['text']} in {version}"
    assert not changed, f"{changed}; read what changed, then {_WRITE}"


def test_private_uses_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "booster").mkdir()
    (tmp_path / "booster" / "uses.py").write_text(
        "from transformers import Trainer, masking_utils, trainer\n"
        "from transformers.cache_utils import DynamicLayer\n"
        "class Ours(Trainer):\n"
        "    def _wrap_model(self): self._mine = self.model._supports_sdpa\n"
        "trainer.skip_first_batches = None\n"
        "patch.object(masking_utils, 'find_packed_sequence_indices', None)\n"
        "getattr(model, '_weight_conversions', None)\n"
        "import_module('transformers.pytorch_utils')\n"
        "model._parameters, Trainer.train\n"
    )
    monkeypatch.setattr(transformers_names, "REPOSITORY", tmp_path)
    assert sorted(name.removeprefix("transformers.") for name in names_of(_PACKAGE)) == [
        "cache_utils.DynamicLayer",
        "core_model_loading._weight_conversions",
        "masking_utils.find_packed_sequence_indices",
        "modeling_utils.PreTrainedModel._supports_sdpa",
        "pytorch_utils",
        "trainer.Trainer._wrap_model",
        "trainer.skip_first_batches",
    ]


def test_private_uses_of_torch_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "booster").mkdir()
    (tmp_path / "booster" / "uses.py").write_text(
        "import torch\n"
        "import torch._dynamo.config\n"
        "from torch.nn.modules.batchnorm import _BatchNorm as Norm\n"
        "from torch.utils import _pytree as trees\n"
        "class Ours(torch.nn.Module):\n"
        "    def _apply(self, fn): return self._rank, fn._parameters\n"
        "torch._foreach_norm([]), trees.tree_leaves(1), torch._dynamo.config.recompile_limit\n"
        "torch.nn.Linear, torch.distributed.barrier()\n"
    )
    monkeypatch.setattr(transformers_names, "REPOSITORY", tmp_path)
    assert sorted(name.removeprefix("torch.") for name in names_of(_PACKAGE.with_name("torch"))) == [
        "_C._VariableFunctions._foreach_norm",
        "_dynamo",
        "_dynamo.config",
        "_dynamo.config.recompile_limit",
        "nn.modules.batchnorm._BatchNorm",
        "nn.modules.module.Module._apply",
        "nn.modules.module.Module._parameters",
        "utils._pytree",
        "utils._pytree.tree_leaves",
    ]


def test_changes_of_a_release_are_told(tmp_path: Path) -> None:
    """A body, a signature and a name that went, each in the release that did it; comments do not count."""
    sources = {
        "5.1.0": "def f(a):\n    return a\ndef g(): ...\n",
        "5.2.0": "def f(a):\n    'Say so.'\n    return a  # why\ndef g(): ...\n",
        "5.10.0": "def f(a, b):\n    return a\n",
    }
    names = []
    for version, source in sources.items():
        package = tmp_path / version / "transformers"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
        (package / "loads.py").write_text(source)
        names.append([state_of(f"transformers.loads.{name}", package) for name in "fg"])
    assert names[0] == names[1] and names[2][1] is None
    assert names[0][0]["text"] == "(a)" and names[2][0]["text"] == "(a, b)"
