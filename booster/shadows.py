"""Detection of foreign modules next to a script that shadow ours because they have the same name."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from booster.logging import get_logger

_logger = get_logger(__name__)
_NAMES = ("booster", "plugins", "shardformer")
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
    for name in _NAMES:
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
