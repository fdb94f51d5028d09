"""What installed plugins add: entry points, `auto_accelerate` and `verify`; a warning of modules that hide them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from booster.errors import ConfigurationError
from booster.logging import get_logger
from booster.plugin import Plugin


def load_extension(group: str, name: str | None = None, wanted: str | None = None) -> Any:
    """Load an object that an installed package registered in an entry point group.

    Args:
        group: entry point group, such as "booster.extensions".
        name: entry point name; None for the first of the group.
        wanted: what a user asked for, for messages; None for the name.

    Raises:
        ConfigurationError: no installed package registers it.
    """
    found = next(iter(entry_points(group=group) if name is None else entry_points(group=group, name=name)), None)
    if found is None:
        wanted = wanted or name or group.rpartition(".")[2]
        raise ConfigurationError(f"no installed package provides {wanted}; pip install hybrid-booster")
    return found.load()


def auto_accelerate(model: Any, *args: Any, **options: Any) -> tuple[bool, Any, Any]:
    """Boost a model with a strategy, or find the fastest layout that fits; see the plugin's documentation.

    Returns:
        (whether a strategy was found, the result, the strategy); the last two are None if none was found.

    Raises:
        ConfigurationError: no installed plugin registers it, or the plugin raised it.
    """
    return load_extension("booster.extensions")(model, *args, **options)


def verify(
    model_fn: Callable[[], nn.Module],
    batch: Mapping[str, Any],
    plugin: Plugin,
    *,
    criterion: Callable[[Any, Any], Any] | None = None,
    steps: int = 2,
    precision: str = "fp64",
    timeout_s: float = 300.0,
) -> Any:
    """Train a model unsharded and under a plugin's layout, and compare every loss, gradient and weight.

    In a job, all ranks call it with the same arguments, and train on CPUs. Outside of a job, it starts as many ranks on
    this machine as the layout needs; then `model_fn` and `criterion` must be functions of an importable module. Dropout
    is off in both runs.

    Args:
        model_fn: creates the model, which must be small enough to train on a CPU.
        batch: a global batch: tensors [samples, ...] keyed by argument name of the model's forward.
        plugin: the parallel training strategy; its precision is ignored.
        criterion: (outputs, batch) -> mean over the samples, or (sum, count); None for the model's own loss.
        steps: number of plain SGD steps.
        precision: "fp64" or "fp32", for both runs.
        timeout_s: time limit in seconds for the ranks that are started.

    Returns:
        A report whose `str` says what was compared.

    Raises:
        VerificationError: the runs differ; the message is the report, with the first module or parameter that differs.
        ConfigurationError: the model cannot be sharded like this, or has no loss.
    """
    return plugin.verify(model_fn, batch, criterion=criterion, steps=steps, precision=precision, timeout_s=timeout_s)


_logger = get_logger(__name__)
_PLACE = Path(__file__).resolve().parents[1]


def warn_of_hidden_plugins() -> None:
    """Log a warning if a foreign `plugins` module comes before ours on the import path."""
    spec = None
    if "plugins.hybrid_parallel" not in sys.modules:
        with suppress(ValueError):  # a module without a spec is in sys.modules
            spec = find_spec("plugins")
    if spec is not None and spec.origin is not None:
        _logger.warning("%s", describe_shadow(Path(spec.origin)))


def hidden_beside(script: Path) -> str | None:
    """Return one sentence about a module next to `script` that shadows one of ours; None if there is none."""
    for name in ("booster", "plugins", "shardformer"):
        for module in (script.parent / name / "__init__.py", script.parent / f"{name}.py"):
            if module.is_file() and module.resolve().parents[1] != _PLACE:
                return describe_shadow(module)
    return None


def describe_shadow(module: Path) -> str:
    """Return one sentence about a module that shadows ours."""
    name = module.parent.name if module.name == "__init__.py" else module.stem
    return (
        f"{module} hides hybrid-booster's '{name}': write `from hybrid_booster import Booster, HybridParallelPlugin, "
        "shardformer`, or rename it"
    )
