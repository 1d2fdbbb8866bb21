"""The recompute engine: tensors that are cheap to compute again are not saved for backward.

`engine.py` has the idea and the rules; `operations.py` is the table of what it knows.
"""
