"""How long code is, and where one statement binds several values: the measures behind two rules of `house_rules`.

A **code line** holds code other than a comment, a docstring or an import statement.

An **unrelated binding** is an assignment of several values to as many targets, `a, b = x, y`, where at least one value
has nothing to do with the others. Two values belong together where one reads what the other sets: `a, b = b, a` and
`found, self.found = self.found, []` do at once what two statements would have to do in the right order.
"""

from __future__ import annotations

import ast
import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from tests.syntax import nodes, parsed

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Display = ast.Tuple | ast.List
_Text = ast.Constant | ast.JoinedStr  # over several lines it is one with quotes


@dataclass(frozen=True, slots=True)
class CodeLength:
    """Code lines of a module, and of each function in it by its name: those of functions inside it count too."""

    lines: int
    functions: tuple[tuple[str, int], ...]


def code_length(text: str) -> CodeLength:
    """The length of a module, from its source text."""
    tree = parsed(text)
    code = _code_lines(text, tree)
    functions = ((node.name, _lines_in(code, _span(node))) for node in nodes(tree) if _is_function(node))
    return CodeLength(len(code), tuple(functions))


def _lines_in(code: list[int], span: range) -> int:
    return bisect.bisect_left(code, span.stop) - bisect.bisect_left(code, span.start)


def _code_lines(text: str, tree: ast.Module) -> list[int]:
    """Their numbers, in order."""
    skipped = {line for node in _explanations(tree) for line in _span(node)}
    quoted = {line for node in nodes(tree) if isinstance(node, _Text) for line in _span(node)[1:]}
    return [
        number
        for number, line in enumerate(text.split("\n"), start=1)
        if number not in skipped and line.strip() and (number in quoted or not line.lstrip().startswith("#"))
    ]


def _explanations(tree: ast.Module) -> Iterator[ast.stmt]:
    """Docstrings and imports."""
    for node in nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif (
            isinstance(node, ast.Module | ast.ClassDef | _Function) and ast.get_docstring(node, clean=False) is not None
        ):
            yield node.body[0]


def unrelated_bindings(text: str) -> list[ast.Assign]:
    """The assignments of a module that bind values which have nothing to do with each other."""
    return [node for node in nodes(parsed(text)) if isinstance(node, ast.Assign) and not _belongs_together(node)]


def _belongs_together(node: ast.Assign) -> bool:
    """Whether each value reads what another one sets, or sets what another one reads."""
    pairs = bound_pairs(node)
    joined: set[int] = set()
    for reader, (_, value) in enumerate(pairs):
        for setter, (target, _) in enumerate(pairs):
            if setter != reader and _set_by(target) & _read_by(value):
                joined |= {reader, setter}
    return not pairs or len(joined) == len(pairs)


def bound_pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """The targets of `a, b = x, y`, each with its value; empty for every other assignment."""
    target = node.targets[0]
    value = node.value
    if len(node.targets) > 1 or not (isinstance(target, _Display) and isinstance(value, _Display)):
        return []
    both = [*target.elts, *value.elts]
    if len(target.elts) != len(value.elts) or any(isinstance(one, ast.Starred) for one in both):
        return []
    return list(zip(target.elts, value.elts, strict=True)) if len(target.elts) > 1 else []


def _set_by(target: ast.expr) -> set[str]:
    if isinstance(target, _Display):
        return {name for one in target.elts for name in _set_by(one)}
    return {ast.unparse(target)}


def _read_by(value: ast.expr) -> set[str]:
    return {ast.unparse(one) for one in ast.walk(value) if isinstance(one, ast.expr)}


def _is_function(node: ast.AST) -> TypeGuard[_Function]:
    return isinstance(node, _Function)


def _span(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
