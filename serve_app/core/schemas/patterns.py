r"""Which regular expressions the grammar enforces.

The grammar builder matches a `pattern` with the whole text, which is narrower than JSON Schema's search in it. Some
constructs it ignores, with a warning in a log. A text of JSON has quotes, backslashes and control characters only in
escapes, which a pattern does not know: a class such as `[^a]` or `\S` leaves them out, and one that names them would
come as it is, and end the text.
"""

from __future__ import annotations

import re

# A pattern from left to right: a class of characters, an escape, what may be ignored, a character that JSON escapes.
_PART = re.compile(
    r"(?P<others>\[\^(?:\\.|[^\]\\])*\])"
    r"|\\(?P<escape>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|c[A-Za-z]|.)"
    r"|(?P<group>\(\?(?!:|P?<[A-Za-z_]))"
    r"|(?P<anchor>[\^$])"
    r"|(?P<class>\[)"
    r"|(?P<end>\])"
    r'|(?P<raw>["\x00-\x1f])',
    re.DOTALL,
)
# An escape, a class of characters, the end of a group that need not be there.
_OPTIONAL_GROUP = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<end>\)\?\??)", re.DOTALL)
_UNKNOWN = frozenset("bBAZzGkpPXKQE123456789")
_NAMED = frozenset('"\\nrtfv0')  # escapes of characters that JSON escapes
_ESCAPED_IN_JSON = frozenset((*range(0x20), ord('"'), ord("\\")))


def as_enforced(pattern: str) -> str:
    """The same pattern with `{0,1}` for the `?` of a group. With `?`, the grammar of `x(yz+)?` accepts `xz`, too: of a
    group that begins or ends with a repetition, this repetition by itself."""
    return _OPTIONAL_GROUP.sub(lambda part: "){0,1}" if part["end"] else part[0], pattern)


def why_ignored(pattern: str) -> str | None:
    """What of a pattern the grammar ignores, or does not know; None: nothing."""
    if not pattern.isascii() and re.search(r"\.|\\[SDW]|\[\^", pattern):
        return "beside characters that are not ASCII, `.`, `[^...]`, `\\S`, `\\D` and `\\W` would accept a quote"
    in_class = False
    for part in _PART.finditer(pattern):
        if part["class"] or part["end"]:
            in_class = bool(part["class"]) or (in_class and not part["end"])
        elif part["escape"]:
            if part["escape"][0] in _UNKNOWN and not in_class:
                return f"`{part[0]}` is not known to the grammar"
            if _is_escaped_in_json(part["escape"]):
                return f"`{part[0]}` matches a character that comes only escaped in JSON"
        elif part["raw"]:
            return f"{part[0]!r} comes only escaped in JSON"
        elif part["group"] and not in_class:
            return "the grammar ignores lookaround and flags, such as `(?=`, `(?!`, `(?<=`, `(?i)`"
        elif part["anchor"] and not in_class and _is_inside(pattern, part):
            return f"`{part[0]}` inside the pattern is ignored by the grammar: anchor the whole, `^(?:...)$`"
    if in_class:
        return "its last `[` is not closed"
    return "its parentheses do not match" if _depth(pattern, len(pattern)) else None


def _is_escaped_in_json(escape: str) -> bool:
    if escape[0] in "xu" and len(escape) > 1:
        return int(escape[1:], 16) in _ESCAPED_IN_JSON
    return escape[0] in _NAMED or (escape[0] == "c" and len(escape) > 1)


def _is_inside(pattern: str, anchor: re.Match[str]) -> bool:
    """Whether an anchor is neither at the beginning or end of the pattern, nor of an alternative of all of it."""
    if anchor[0] == "^":
        return anchor.start() != 0 and not (pattern[anchor.start() - 1] == "|" and _depth(pattern, anchor.start()) == 0)
    after = pattern[anchor.end() : anchor.end() + 1]
    return after != "" and not (after == "|" and _depth(pattern, anchor.start()) == 0)


def _depth(pattern: str, at: int) -> int:
    """How many groups are open at a place."""
    before = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern[:at], flags=re.DOTALL)
    return before.count("(") - before.count(")")
