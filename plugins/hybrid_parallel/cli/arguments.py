"""What the commands share: options that describe a layout, their checks, and models by name or directory."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options for the sizes of the mesh."""
    parser.add_argument("--tp", type=count, default=1, help="tensor-parallel ranks (1)")
    parser.add_argument("--pp", type=count, default=1, help="ranks of the pipeline (1)")
    parser.add_argument("--dp", type=count, help="data-parallel ranks")


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the options for the mesh sizes and for expert, sequence and pipeline parallelism."""
    add_sizes(parser)
    parser.add_argument("--ep", type=count, default=1, help="of the data-parallel ranks, those that share experts (1)")
    parser.add_argument("--cp", type=count, default=1, help="ranks that share each sequence, as by ring attention (1)")
    parser.add_argument(
        "--sp",
        nargs="?",
        const="split_gather",
        choices=["split_gather", "all_to_all"],
        help="cut activations along the sequence (split_gather), or let the --cp ranks exchange heads (all_to_all)",
    )
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="of the pipeline (1f1b)")
    parser.add_argument("--chunks", type=count, help="stages a rank holds, where the schedule lets one choose (2)")
    parser.add_argument("--microbatches", type=count, help="micro-batches of a step (one a pipeline stage)")


def layout_options(options: argparse.Namespace) -> dict[str, Any]:
    """Convert parsed arguments to options of `HybridParallelPlugin`."""
    chosen: dict[str, Any] = {
        "tp_size": options.tp,
        "pp_size": options.pp,
        "dp_size": options.dp or options.ep,
        "ep_size": options.ep,
        "pp_style": options.schedule,
        "num_model_chunks": options.chunks,
        "num_microbatches": options.microbatches,
    }
    if options.cp > 1:
        chosen["cp_size"] = options.cp
    if options.sp is not None:
        exchanges = options.cp > 1 and options.sp == "all_to_all"
        chosen |= {"enable_sequence_parallelism": not exchanges, "sequence_parallelism_mode": options.sp}
    return chosen


def count(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive integer, such as 4")
    return int(text)


def given(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Return the names of the options that differ from their defaults."""
    return [name for name, value in vars(options).items() if value != parser.get_default(name)]


def refuse_unused(found: Collection[str], used: Collection[str], what: str) -> None:
    """Refuse an option that has no effect on the requested output `what`; `used`: those that have one."""
    unused = next((name for name in found if name not in used), None)
    if unused is not None:
        allowed = ", ".join(_spelled(name) for name in used)
        raise ConfigurationError(f"{_spelled(unused)} has no effect on {what}; what is used there: {allowed}")


def refuse_bad_places(*paths: Path | None) -> None:
    """Refuse output files that cannot be written, before the work starts."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ConfigurationError(f"{path} cannot be written, {path.parent} is no directory; use one that exists")
        if path is not None and path.is_dir():
            raise ConfigurationError(f"{path} cannot be written, it is a directory; give the name of a file")


def refuse_without_pipeline(ranks: int, schedule: str | None, chunks: int | None) -> None:
    """Refuse pipeline options if the pipeline has only one rank."""
    if ranks == 1 and (schedule not in (None, "1f1b") or chunks is not None):
        option = f"--schedule {schedule}" if schedule not in (None, "1f1b") else f"--chunks {chunks}"
        raise ConfigurationError(f"{option} has no effect without a pipeline; add --pp 2, or more")


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


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
    """Return a model's configuration, and its class or None; `name`, `head`: see `model_builder`."""
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
