"""What a long conversion says meanwhile."""

from __future__ import annotations

import sys
import time


class Progress:
    """Says on standard error, where that is a terminal, which run of the model is under way.

    Once they have lasted for two seconds.
    """

    def __init__(self, what: str, count: int) -> None:
        self.what = what
        self.count = count
        self.done = 0
        self.start = time.monotonic()

    def next(self, run: str) -> None:
        """The next run begins."""
        self.done += 1
        seconds = time.monotonic() - self.start
        if seconds > 2 and sys.stderr.isatty():
            line = f"{self.what}: run {self.done} of {self.count} ({run}), {seconds:.0f} s so far"
            print(line, file=sys.stderr)
