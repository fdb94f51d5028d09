"""Modules of others that hide ours because they have the same name and lie beside a script."""

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
    """Say where a `plugins` that is somebody else's is found before the installed ones."""
    spec = None
    if "plugins.hybrid_parallel" not in sys.modules:
        with suppress(ValueError):  # somebody has put a module there that came from nowhere
            spec = find_spec("plugins")
    if spec is not None and spec.origin is not None:
        _logger.warning("%s", in_words(Path(spec.origin)))


def hidden_beside(script: Path) -> str | None:
    """What a script cannot import because of a module beside it, in one sentence; None for nothing."""
    for name in _NAMES:
        for module in (script.parent / name / "__init__.py", script.parent / f"{name}.py"):
            if module.is_file() and module.resolve().parents[1] != _PLACE:
                return in_words(module)
    return None


def in_words(module: Path) -> str:
    """One sentence on a module that hides ours."""
    name = module.parent.name if module.name == "__init__.py" else module.stem
    return (
        f"{module} hides hybrid-booster's '{name}': write `from hybrid_booster import Booster, HybridParallelPlugin, "
        "shardformer`, or rename it"
    )
