"""The census of other releases of transformers, each installed into a folder of its own, and what differs.

A folder is found first by a subprocess, so that all else of the environment stays as it is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from zoo_tests.campaigns.census.page import outcome_rows
from zoo_tests.campaigns.census.verdict import Verdict, read_log
from zoo_tests.docs.pages import REPOSITORY

_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "hybrid-booster" / "transformers"
_IMPORTS = "import transformers.modeling_utils; print(transformers.__version__)"


def compare_releases(asked: list[str], layouts: list[str], arguments: argparse.Namespace) -> int:
    """Train the classes of each release, and write a page of what differs.

    Args:
        asked: releases, as "5.21" (its last patch) or "5.21.0".
        layouts: as of `--layouts`.
        arguments: of the command; `only`, `every`, `jobs`, `limit` and `output` count.

    Returns:
        Exit status: 1 if a release cannot be had.
    """
    found: dict[str, dict[str, Verdict]] = {}
    for release in asked:
        folder = _installed(release)
        version = folder and _version(folder)
        if not version:
            sys.stderr.write(f"transformers {release} cannot be installed; give one that the package index has\n")
            continue
        log = _CACHE / f"census-{version}{_of_state()}.jsonl"
        options = ["--resume", str(log), "--layouts", ",".join(layouts), "--only", arguments.only]
        options += ["--jobs", str(arguments.jobs), "--limit", str(arguments.limit), "--every", str(arguments.every)]
        sys.stdout.write(f"----- transformers {version}: {log}\n")
        sys.stdout.flush()
        command = [sys.executable, "-m", "zoo_tests.campaigns.census", *options]
        subprocess.run(command, env=_environment(folder), cwd=REPOSITORY, check=True)
        found[version] = read_log(log)
    lines = difference(found, layouts, arguments.every)
    text = "\n".join(lines) + "\n"
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        arguments.output.write_text(text, encoding="utf-8")
    return int(len(found) < len(asked))


def difference(found: dict[str, dict[str, Verdict]], layouts: list[str], every: int = 1) -> list[str]:
    """The page: outcomes under the first layout of each release, and what changed from one to the next.

    Args:
        found: version -> family/class -> verdict.
        layouts: those that were trained.
        every: one class in how many was.
    """
    asked = ",".join(version.rpartition(".")[0] for version in found) + (f" --every {every}" if every > 1 else "")
    sample = f" One class in {every} was trained, the same ones of each release." if every > 1 else ""
    lines = [
        "# Between releases of transformers",
        "",
        f"Written by `python -m zoo_tests.campaigns.census --against {asked} --output docs/results/releases.md`; do",
        f"not edit. The same census as of [the release in use](coverage.md), with other releases installed.{sample}",
    ]
    for version, verdicts in found.items():
        lines += ["", f"transformers {version}, {len(verdicts)} classes:", "", *outcome_rows(verdicts, layouts)]
    for (old, before), (new, after) in pairwise(found.items()):
        rows = [f"| `{name}` | new | {_told(after[name], layouts)} |" for name in sorted(after.keys() - before.keys())]
        rows += [f"| `{name}` | {_told(before[name], layouts)} | gone |" for name in sorted(before.keys() - after)]
        for name in sorted(before.keys() & after.keys()):
            then, now = _told(before[name], layouts), _told(after[name], layouts)
            rows += [f"| `{name}` | {then} | {now} |"] if then != now else []
        lines += ["", f"## From {old} to {new}", ""]
        lines += [f"| Family/class | {old} | {new} |", "|---|---|---|", *rows] if rows else ["Nothing changed."]
    return lines


def _told(verdict: Verdict, layouts: list[str]) -> str:
    """The outcomes in short: one word if they are equal."""
    outcomes = {layout: outcome for layout in layouts if (outcome := verdict.outcome(layout)) is not None}
    if len(set(outcomes.values())) == 1:
        return next(iter(outcomes.values()))
    return ", ".join(f"{layout} {outcome}" for layout, outcome in outcomes.items())


def _installed(release: str) -> Path | None:
    """The folder with a release, empty for the one of this environment; None if it cannot be had."""
    own = importlib.metadata.version("transformers")
    if own == release or own.startswith(f"{release}."):
        return Path()
    folder = _CACHE / release
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    if not (folder / "transformers").exists():
        pattern = release if release.count(".") > 1 else f"{release}.*"
        if subprocess.run([*pip, f"transformers=={pattern}"]).returncode:
            return None
    if unmet := _unmet(folder):  # each without what it needs itself, which this environment has: pip would seek long
        subprocess.run([*pip, "--upgrade", *unmet])
    return folder


def _unmet(folder: Path) -> list[str]:
    """What the release in a folder needs in another version than this environment or the folder has."""
    own = {canonicalize_name(each.name): each for each in importlib.metadata.distributions(path=[str(folder)])}
    found = []
    for needed in map(Requirement, own["transformers"].requires or ()):
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            held = own.get(canonicalize_name(needed.name))
            version = held.version if held is not None else _own_version(needed.name)
            if version is None or not needed.specifier.contains(version, prereleases=True):
                found.append(f"{needed.name}{needed.specifier}")
    return found


def _own_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(folder: Path) -> str | None:
    """The version of transformers that a process with the folder imports; None if it does not import."""
    command = [sys.executable, "-c", _IMPORTS]
    done = subprocess.run(command, env=_environment(folder), capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _environment(folder: Path) -> dict[str, str]:
    """Environment variables of a process that imports what is in the folder."""
    folders = [str(folder)] if folder.name else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, str(REPOSITORY)]), "OMP_NUM_THREADS": "1"}


def _of_state() -> str:
    """Commit of the repository, since a log of another one tells of other code; empty without git."""
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"-{done.stdout.strip()}" if done.returncode == 0 else ""
