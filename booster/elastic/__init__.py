"""`booster run --elastic`: agents that keep a job running with the ranks that are left.

An agent runs on each machine. It starts ranks by a fork server, which has imported what they need, watches them, and
owns the memory in which they leave snapshots of the training state. One agent, the leader, forms rounds: who takes
part, with which ranks. When a rank or a machine is lost, all ranks of the round end, and the next round goes on from
the newest snapshot that is complete.
"""
