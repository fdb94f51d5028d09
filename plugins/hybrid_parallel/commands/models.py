"""Models that commands are given by name: a directory, a config.json, or a name that transformers has in its cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from booster.errors import ConfigurationError


def model_builder(name: str, head: str | None = None) -> Callable[[], nn.Module]:
    """What makes the model, with values of its own.

    Args:
        head: name of its class; None for the one that its configuration names.

    Raises:
        ConfigurationError: there is no such model, or class.
    """
    import transformers

    config = _config(name)
    chosen = head or next(iter(config.architectures or []), None)
    if chosen is None:
        return lambda: transformers.AutoModel.from_config(config)
    found = getattr(transformers, chosen, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ConfigurationError(
            f"transformers has no model class '{chosen}'; give one with --head, as BertForMaskedLM"
        )
    return lambda: found(config)


def _config(name: str) -> Any:
    from transformers import AutoConfig

    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigurationError(f"{name} has no config.json; give a directory of a model, or a config.json")
    if path.suffix == ".json" and not path.is_file():
        raise ConfigurationError(f"{name} is not a file; give a directory of a model, or a config.json")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigurationError(
            f"no model '{name}' was found ({reason}); give a directory of a model, or a config.json"
        ) from None
