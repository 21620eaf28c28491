"""Find the final answer in a response."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_QUANTITY = re.compile(rf"(?:[A-Za-z]+ ?= ?)?({_NUMBER.pattern})(?: [A-Za-z ]+)?")
"""A number with its name or its unit: `x = 33`, `33 apples`."""
_ANSWER_MARK = re.compile(r"answer\s*(?:\*\*)?\s*(?:is\b|:|=)\s*(?:\*\*)?|####", re.IGNORECASE)
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Spacing and grouping that LaTeX writes inside numbers, and signs of currency and per cent around them.
_NOISE = re.compile(r"\\[,;:! ]|(?<=\d)\{,\}(?=\d)|\\?[$%]|[€£]|\*\*")


def final_answer(text: str) -> str | None:
    r"""The final answer: in the last balanced `\boxed{...}` or after the last answer mark, whichever comes later.

    Without either, the last number. A box that is cut off by the length limit does not count. Examples:
    `"so \boxed{\text{E}}."` gives `"E"`; `"16 + 2 = 18. The answer is 18 apples."` gives `"18"`.
    """
    boxed, box_end = _last_boxed(text)
    marks = list(_ANSWER_MARK.finditer(text))
    if marks and marks[-1].end() > box_end:
        line = _clean(text[marks[-1].end() :].lstrip().split("\n", 1)[0])
        if "\\" in line:
            return line or None
        found = _NUMBER.search(line.rpartition("=")[2])
        # Words alone are an answer too: a letter of a choice, a name.
        return found.group() if found else (line.strip("().") or None)
    if boxed is not None:
        quantity = _QUANTITY.fullmatch(boxed)
        return quantity.group(1) if quantity else (boxed or None)
    numbers = _NUMBER.findall(_clean(text))
    return numbers[-1] if numbers else None


def as_number(answer: str) -> Decimal | None:
    """The value of a plain number, thousands separated or not; None for anything else."""
    text = _clean(answer)
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


def _last_boxed(text: str) -> tuple[str | None, int]:
    """Content of the last balanced box, cleaned, and where the box ends; (None, -1) without one."""
    for start in reversed([match.end() for match in _BOXED.finditer(text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                content = _clean(text[start:end])
                # A box inside a box: the outer one is found last.
                return (_last_boxed(content)[0] if _BOXED.search(content) else content), end + 1
    return None, -1


def _clean(text: str) -> str:
    """Unwrap text commands, drop spacing, grouping and currency, use the plain minus sign."""
    text = text.replace("\N{MINUS SIGN}", "-")
    while _WRAPPED.search(text):
        text = _WRAPPED.sub(r" \1 ", text)
    return " ".join(_NOISE.sub("", text).split()).rstrip(".").rstrip()
