"""`booster init`: copy an example, which then belongs to the user."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

from booster.cli.command_parser import CommandParser

EXAMPLES = Path(__file__).with_name("examples")  # in the repository, a link to its folder of examples
_SCRIPTS = ("train.py", "finetune.py", "first_layout.ipynb")  # what is run, or opened first
_TEXT = (".py", ".md", ".ipynb")
_OF_EXTRA = re.compile(r"""(?P<name>[\w.-]+).*;.*\bextra == ["'](?P<extra>[\w-]+)["']""")


def main(arguments: Sequence[str]) -> int:
    """Copy an example; return the exit code."""
    command = parser()
    options = command.parse_args(arguments)
    found = examples()
    if options.name is None:
        sys.stdout.writelines(f"{name:<18}{title_of(folder)}\n" for name, folder in found.items())
        return 0
    target = options.output or Path(options.name)
    taken = _taken(target)
    if taken is not None:
        command.refuse(f"{taken} exists, and nothing is overwritten; give another folder with --output")
    try:
        files = copy(found[options.name], target)
    except OSError as error:
        command.refuse(f"{target} cannot be written ({error.strerror}); give another folder with --output")
    sys.stdout.write(f"{', '.join(path.name for path in files)} in {target}; a look at it, in seconds:\n")
    extras = missing_extras(files)
    if extras:
        sys.stdout.write(f"  pip install 'hybrid-booster[{','.join(extras)}]'\n")
    script = target / script_of(target)
    command_line = "jupyter lab {}" if script.suffix == ".ipynb" else "booster run --nproc-per-node 2 {} --tiny"
    sys.stdout.write(f"  {command_line.format(script)}\n")
    return 0


def parser() -> CommandParser:
    """Return the parser of the command line."""
    command = CommandParser(
        prog="booster init",
        description="Copy an example into a new folder of the current one. Without a name, list the examples.",
        examples=("booster init", "booster init bert", "booster init sft_lora --output my_job"),
    )
    command.add_argument("name", nargs="?", choices=list(examples()), metavar="NAME", help=", ".join(examples()))
    command.add_argument("--output", type=Path, metavar="DIR", help="the new folder (./NAME)")
    return command


def examples() -> dict[str, Path]:
    """Return the folders of the examples by name."""
    return {path.name: path for path in sorted(EXAMPLES.iterdir()) if any((path / name).is_file() for name in _SCRIPTS)}


def script_of(folder: Path) -> str:
    """Return the name of the script of an example that is to be run."""
    return next(name for name in _SCRIPTS if (folder / name).is_file())


def title_of(folder: Path) -> str:
    """Return the first line of an example's docstring, or of a notebook's metadata."""
    text = (folder / script_of(folder)).read_text(encoding="utf-8")
    if script_of(folder).endswith(".ipynb"):
        return json.loads(text)["metadata"]["title"]
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def copy(source: Path, target: Path) -> list[Path]:
    """Copy the files of an example; commands in them name files of the copy, not of the repository."""
    target.mkdir(parents=True, exist_ok=True)
    files = []
    for path in sorted(each for each in source.iterdir() if each.suffix in _TEXT and each.name != "__init__.py"):
        text = path.read_text(encoding="utf-8")
        files.append(target / path.name)
        files[-1].write_text(text.replace(f"examples/{source.name}/", ""), encoding="utf-8")
    return files


def missing_extras(files: Sequence[Path]) -> list[str]:
    """Return the extras of hybrid-booster that install what scripts import and this Python does not have."""
    nodes = [node for path in files if path.suffix == ".py" for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    modules = {node.module.partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    try:
        needs = requires("hybrid-booster") or ()
    except PackageNotFoundError:  # it runs from a folder
        return []
    found = filter(None, map(_OF_EXTRA.match, reversed(needs)))
    extra_of = {each["name"].replace("-", "_"): each["extra"] for each in found}
    return sorted({extra_of[name] for name in modules & extra_of.keys() if find_spec(name) is None})


def _taken(target: Path) -> Path | None:
    """Return what keeps an example from being copied to `target`: a file, or a folder that is not empty."""
    if target.is_dir():
        return target if any(target.iterdir()) else None
    return target if target.exists() else next((path for path in target.parents if path.is_file()), None)
