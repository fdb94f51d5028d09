"""Pipeline stages: partitioning of a model, and placeholders for modules of other stages."""
