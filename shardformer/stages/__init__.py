"""Pipeline stages: how a model is partitioned, and placeholders for modules of other stages."""
