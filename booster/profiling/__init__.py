"""`booster run --profile N`: a trace of N training steps of all ranks, and what their memory holds.

The launcher sets two variables; `Booster.boost` then starts a `StepProfile` on each rank, which writes its own files.
When the job has ended, the launcher merges them. Ranks do not communicate for it.
"""
