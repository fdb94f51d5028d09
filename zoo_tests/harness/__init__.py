"""What tests share: pools of ranks, cases of training, the plain reference, and comparisons."""

from zoo_tests.harness.torchvision_operators import declare_operators

declare_operators()  # before transformers is imported
