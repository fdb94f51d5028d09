"""Lightning's Trainer and Fabric on boosted models.

from booster.integrations.lightning import HybridParallelStrategy

strategy = HybridParallelStrategy(plugin=HybridParallelPlugin(tp_size=2, pp_size=2))
trainer = lightning.Trainer(strategy=strategy)  # or lightning.Fabric(strategy=strategy)
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from booster.errors import ConfigurationError

_OLDEST = (2, 6)
_HOW = "pip install 'lightning>=2.6'"


def _installed() -> tuple[int, ...]:
    """Return Lightning's major and minor version; raises ConfigurationError if it is missing or too old."""
    try:
        found = version("lightning")
    except PackageNotFoundError:
        raise ConfigurationError(f"HybridParallelStrategy needs Lightning, which is not installed; {_HOW}") from None
    numbers = tuple(int(each) for each in found.split(".")[:2])
    if numbers < _OLDEST:
        raise ConfigurationError(f"HybridParallelStrategy needs Lightning 2.6, and {found} is installed; {_HOW}")
    return numbers


LIGHTNING_VERSION = _installed()  # before anything imports Lightning

from booster.integrations.lightning.strategy import HybridParallelStrategy  # noqa: E402

__all__ = ["LIGHTNING_VERSION", "HybridParallelStrategy"]
