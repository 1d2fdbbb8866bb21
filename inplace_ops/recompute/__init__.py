"""The recompute engine: recomputes cheap tensors in backward instead of saving them.

Read `run.py` first. `operations.py` is the table of the operations that it knows.
"""
