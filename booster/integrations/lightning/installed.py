"""The installed Lightning, found before anything else of this package imports it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from booster.errors import ConfigurationError

_OLDEST = (2, 6)
_HOW = "pip install 'lightning>=2.6'"


def _installed() -> tuple[int, ...]:
    """Return the version of Lightning, as major and minor number.

    Raises:
        ConfigurationError: if it is not installed or too old.
    """
    try:
        found = version("lightning")
    except PackageNotFoundError:
        raise ConfigurationError(f"HybridParallelStrategy needs Lightning, which is not installed; {_HOW}") from None
    numbers = tuple(int(each) for each in found.split(".")[:2])
    if numbers < _OLDEST:
        raise ConfigurationError(f"HybridParallelStrategy needs Lightning 2.6, and {found} is installed; {_HOW}")
    return numbers


LIGHTNING_VERSION = _installed()
