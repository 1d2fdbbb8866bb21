"""The recompute engine: recomputes cheap tensors in backward instead of saving them.

Begin with the notes in `engine.py`. `operations.py` is the table of the operations that it knows.
"""
