"""Installs `hybrid_booster.pth` next to the packages, so that `BOOSTER_LAYOUT` works under any launcher."""

from __future__ import annotations

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithStart(build_py):
    """Copies the file to where Python's `site` reads it; an editable install has no other copied file."""

    def run(self) -> None:
        """Copy the packages, and the file."""
        super().run()
        into = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        self.copy_file("hybrid_booster/site/hybrid_booster.pth", into)


setup(cmdclass={"build_py": BuildWithStart})
