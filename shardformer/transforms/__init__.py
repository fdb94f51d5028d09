"""Model-wide changes that the sharder makes in addition to those of the policy's table."""
