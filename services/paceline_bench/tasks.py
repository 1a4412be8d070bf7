"""Task groups in the manner of Spec-Bench, made from the held-out files by what a model is asked to write next.

    headers     imports, and what else stands before the first definition of a module
    comments    docstrings and comments
    tables      literals over several lines: lists, dictionaries
    repetition  lines that are made like their neighbours
    classes     short methods and attributes of classes
    functions   the bodies of long functions

A prompt is a window of whole lines; its group is that of the lines that come after it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

GROUPS = ("headers", "comments", "tables", "repetition", "classes", "functions")
LONG_LINES = 24
"""Minimum lines of a long function."""
_AHEAD_LINES = 4
"""Lines after a prompt that tell its group: three of them have to be of it."""
_ALIKE_LINES = 3
_TABLE_LINES = 4
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NAMES, _STRINGS = re.compile(r"\w+"), re.compile(r"'[^']*'|\"[^\"]*\"")


def group_lines(text: str) -> list[str]:
    """The group of each line of a module; empty: none of them."""
    lines = text.splitlines()
    groups = [""] * len(lines)
    tree = ast.parse(text)
    definitions = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    first = min((_begin(node) for node in definitions), default=len(lines))
    _paint(groups, 0, first, "headers")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            _paint(groups, _begin(node), node.end_lineno or 0, "classes")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            end = node.end_lineno or 0
            if end - node.lineno + 1 >= LONG_LINES:
                _paint(groups, _begin(node), end, "functions")
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple | ast.Dict | ast.Set):
            end = node.end_lineno or 0
            if end - node.lineno + 1 >= _TABLE_LINES:
                _paint(groups, node.lineno - 1, end, "tables")
    for start, end in _alike(lines):
        _paint(groups, start, end, "repetition")
    for start, end in _comments(tree, lines):
        _paint(groups, start, end, "comments")
    return groups


def group_after(groups: list[str], line: int) -> str:
    """The group of a prompt that ends before ``line``; empty: the lines ahead are of several."""
    ahead = groups[line : line + _AHEAD_LINES]
    return next((g for g in GROUPS if len(ahead) == _AHEAD_LINES and ahead.count(g) >= _AHEAD_LINES - 1), "")


def _begin(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1


def _paint(groups: list[str], start: int, end: int, group: str) -> None:
    groups[start:end] = [group] * len(groups[start:end])


def _alike(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Runs of lines that are the same once names, numbers and strings are left out: half-open ranges."""
    shapes = [
        re.sub(r"\w+", "x", re.sub(r"'[^']*'|\"[^\"]*\"", "x", line.partition("#")[0])).rstrip() for line in lines
    ]
    start = 0
    for i in range(1, len(shapes) + 1):
        if i == len(shapes) or shapes[i] != shapes[start] or len(shapes[start].strip()) < 3:
            if i - start >= _ALIKE_LINES:
                yield start, i
            start = i


def _comments(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno - 1, node.end_lineno or node.lineno
    for i, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            yield i, i + 1
