"""Syntax trees of sources. The rules that look at sources ask for each file several times: a process parses it once,
and walks it once.

Invariant: nobody changes a tree.
"""

from __future__ import annotations

import ast
import functools


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a module. Raises SyntaxError."""
    return ast.parse(source)


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree, in the order of `ast.walk`, which takes twice as long."""
    found: list[ast.AST] = [tree]
    for node in found:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                found.append(value)
            elif isinstance(value, list):
                found += [one for one in value if isinstance(one, ast.AST)]
    return tuple(found)
