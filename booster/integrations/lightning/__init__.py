"""Lightning's Trainer and Fabric on boosted models.

from booster.integrations.lightning import HybridParallelStrategy

strategy = HybridParallelStrategy(plugin=HybridParallelPlugin(tp_size=2, pp_size=2))
trainer = lightning.Trainer(strategy=strategy)  # or lightning.Fabric(strategy=strategy)
"""

from booster.integrations.lightning.installed import LIGHTNING_VERSION
from booster.integrations.lightning.strategy import HybridParallelStrategy

__all__ = ["LIGHTNING_VERSION", "HybridParallelStrategy"]
