"""What tests share: pools of ranks, cases of training, the plain reference, and comparisons."""
