"""Find words that the glossary in docs/architecture.md replaces, in prose and in names.

    .ci/glossary.py [FILE ...]

Checks the given files, or all tracked ones. To add a word, add an entry to `REPLACED`. To allow one
in a line, end the line with a comment that says `glossary: ok`; in a file, add it to `ALLOWED`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# A word's pattern, and what to write instead. Underscores separate words, as spaces do.
REPLACED: Mapping[str, str] = {
    r"form(s|ed|ing)? .{0,20}again": "recompute",
    r"compute[sd]? again": "recompute",
    r"(kept|keeps?|keeping) (it |them )?for backward": "save for backward",
    r"(keeps?|kept) (nothing|only|one|a few|\w+) (bits?|of its own)": "save",
    r"ways? of (keeping|saving)": "save mode",
    r"held": "saved, allocated",
    r"readers?": "consumer",
    r"recipes?": "recompute spec",
    r"(?<!standard.)deviations?": "rstd",
    r"(norm )?maps of (a norm|channels|rows)": "affine",
    r"curves?": "smooth activation",
    r"geometry": "strided layout",
    r"refus(e|es|ed|ing|als?)": "reject",
    r"objections?": "reason",
    r"peers?": "baseline",
    r"stands? (in )?for": "replace, represent",
    r"takes? (its|the|their) place": "replace",
    r"in other words": "equivalent",
    r"(lie|lies|lay|laid|lying)": "memory layout, strides, is at",
    r"(to|could|can) be had": "available",
    r"(?<!there.)(is|are|was|were) no (?!longer|more|less|larger|smaller)\w+": "is not a",
    r"nobody": "nothing",
    r"but for": "except",
    r"beside": "next to, in addition to",
    # One meaning for each of these words.
    r"consumer.?s number": "turn",
    r"(own )?records? of (an? |the )?(operation|node)s?": "value",
    r"(is.copy|copied.bytes|small copies)": "auxiliary tensor",
    r"fuse[sd]? (an )?activations?": "activation after a norm",
    r"activations? (is|are|was|were) fused": "runs with the norm before it",
}

# Names with two meanings, as they are declared: of the package alone.
TWO_MEANINGS: Mapping[str, str] = {
    r"(?<!sequence_)numbers?: (int|float|Tensor)": "turn, constant, ordinal; or sequence_number",
    r"consumers?: (int|Value)": "turn, value: a consumer is a node, or an operation's name",
    r"(copy|copies): (bool|int|float)": "is_auxiliary, auxiliary_bytes",
    r"fuse[sd]?: bool": "merges, is_after_norm: fused is what one kernel computes",
}

ALLOWED: Mapping[str, Sequence[str]] = {
    ".ci/glossary.py": (*REPLACED, *TWO_MEANINGS),
}
PACKAGE = "inplace_ops/"

TEXT = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".md", ".toml", ".sh", ""}


def _pattern(word: str) -> re.Pattern[str]:
    separated = word.replace(" ", r"[\s_]+(?:(?://|#|\*)\s*)?")  # also over the end of a line
    return re.compile(rf"(?<![A-Za-z]){separated}(?![A-Za-z])", re.IGNORECASE)


INSTEAD = {**REPLACED, **TWO_MEANINGS}
_PATTERNS = {word: _pattern(word) for word in REPLACED}
_DECLARED = {word: re.compile(rf"(?<![A-Za-z]){word}") for word in TWO_MEANINGS}


def found(path: Path) -> list[str]:
    """Return a line of text for each replaced word in a file."""
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return []
    lines = text.split("\n")
    messages = []
    patterns = _PATTERNS
    if path.as_posix().startswith(PACKAGE):
        patterns = {**_PATTERNS, **_DECLARED}
    for word, pattern in patterns.items():
        if word in ALLOWED.get(path.as_posix(), ()):
            continue
        for match in pattern.finditer(text):
            number = text.count("\n", 0, match.start())
            if "glossary: ok" not in lines[number]:
                shown = " ".join(match.group().split())
                messages.append(f'{path}:{number + 1}: "{shown}": write {INSTEAD[word]}')
    return messages


def main(arguments: Sequence[str]) -> int:
    """Check files, print what was found, and return the exit status."""
    names = arguments or subprocess.check_output(["git", "ls-files"], text=True).split("\n")
    paths = [Path(name) for name in names if name and Path(name).suffix in TEXT]
    messages = [message for path in paths if path.is_file() for message in found(path)]
    print("\n".join(messages), end="\n" if messages else "")
    return min(len(messages), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
