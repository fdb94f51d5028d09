"""How families are sharded: one short table a family. Nothing here imports transformers."""
