"""Find models by name: a directory, a config.json, or a name in the cache of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from booster.errors import ConfigurationError


def model_builder(name: str, head: str | None = None) -> Callable[[], nn.Module]:
    """Return a function that builds the model with newly initialized weights.

    Args:
        name: a directory, a config.json, or a name in the cache.
        head: name of the model's class, or its task; None for the class that the configuration names.

    Raises:
        ConfigurationError: there is no such model or class.
    """
    import transformers

    config, model_class = model_of(name, head)
    if model_class is None:
        return partial(transformers.AutoModel.from_config, config)
    return partial(model_class, config)


def model_of(name: str, head: str | None = None, trust_remote_code: bool = False) -> tuple[Any, type[nn.Module] | None]:
    """Return the configuration and the class of a model; the class is None if neither input names one.

    Args:
        name, head: see `model_builder`.
        trust_remote_code: whether code in the model's directory may run.
    """
    import transformers

    config = _config(name, trust_remote_code)
    chosen = head or next(iter(config.architectures or []), None)
    if chosen is None:
        return config, None
    found = getattr(transformers, chosen, None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return config, found
    if trust_remote_code and (remote := _remote_class(name, config, chosen)) is not None:
        return config, remote
    auto = getattr(transformers, f"AutoModelFor{chosen}", None)
    if auto is not None and type(config) in auto._model_mapping:
        return config, auto._model_mapping[type(config)]
    raise ConfigurationError(f"transformers has no model class '{chosen}'; give one with --head, as BertForMaskedLM")


def adapter_config(name: str) -> Any:
    """Return the configuration of an adapter of peft, from its directory or its adapter_config.json."""
    try:
        from peft import PeftConfig
    except ImportError:
        raise ConfigurationError(f"--adapter {name} needs peft, which is not installed; pip install peft") from None
    path = Path(name)
    path = path.parent if path.is_file() else path
    if not (path / "adapter_config.json").is_file():
        raise ConfigurationError(f"{name} has no adapter_config.json; give the directory of an adapter that peft saved")
    return PeftConfig.from_pretrained(str(path))


def _remote_class(name: str, config: Any, chosen: str) -> type[nn.Module] | None:
    """Return the class in the model's directory that is called `chosen` or is for that task; None if there is none."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    classes = {auto: place for auto, place in (getattr(config, "auto_map", None) or {}).items() if "Model" in auto}
    found = [
        place for auto, place in classes.items() if place.endswith(f".{chosen}") or auto == f"AutoModelFor{chosen}"
    ]
    folder = Path(name).parent if Path(name).is_file() else name
    return get_class_from_dynamic_module(found[0], str(folder)) if found else None


def _config(name: str, trust_remote_code: bool = False) -> Any:
    from transformers import AutoConfig

    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigurationError(f"{name} has no config.json; give a directory of a model, or a config.json")
    if path.suffix == ".json" and not path.is_file():
        raise ConfigurationError(f"{name} is not a file; give a directory of a model, or a config.json")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        if "custom code" in reason:
            raise ConfigurationError(
                f"{name} has code of its own, which is not run unasked; read it, and use booster verify "
                f"{name} --trust-remote-code"
            ) from None
        raise ConfigurationError(
            f"no model '{name}' was found ({reason}); give a directory of a model, or a config.json"
        ) from None
