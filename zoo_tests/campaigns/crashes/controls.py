"""Faults put into the library on purpose: a campaign that does not find them proves nothing."""

from __future__ import annotations

import os
from typing import Any

from plugins.hybrid_parallel.checkpoint import io
from plugins.hybrid_parallel.checkpoint.atomic_save import PendingSave, Staging
from plugins.hybrid_parallel.checkpoint.tensor_file import Manifest

_publish, _data_file = PendingSave.publish, io.data_file


def _manifest_first(self: PendingSave, manifest: Manifest) -> None:
    for name in ("manifest.json", *manifest.files):
        os.replace(self.directory / name, self.path / name)


def _old_removed_first(self: PendingSave, manifest: Manifest) -> None:
    if self.path.exists():
        for file in self.path.iterdir():
            file.unlink()
    _publish(self, manifest)


# Name -> object, attribute and what takes its place, for `mock.patch.object`.
CONTROLS: dict[str, tuple[Any, str, Any]] = {
    "manifest first": (PendingSave, "_replace_content", _manifest_first),
    "old removed first": (PendingSave, "publish", _old_removed_first),
    "same names for all saves": (io, "data_file", lambda sequence, rank: _data_file(1, rank)),
    "live memory": (Staging, "copy", lambda self, snapshot: snapshot),
    "no verification": (Manifest, "verify_file", lambda self, directory, name: None),
}
