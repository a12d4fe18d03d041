"""Values of emitted programs that are read after they are freed: `del x`, or `xs[0] = None`."""

import ast
from collections.abc import Iterator


def reads_of_freed(text: str) -> list[str]:
    """Return each such read, with its line. A loop is followed twice."""
    found: dict[str, None] = {}
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef):
            freed: set[str] = set()
            for statement in _run(function.body):
                found |= dict.fromkeys(_reads(statement, freed))
                _write(statement, freed)
    return list(found)


def _run(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.For):
            yield from _run(statement.body)
            yield from _run(statement.body)
        else:
            yield statement


def _name(node: ast.expr) -> str | None:
    """The name of a variable, or of an element of a list with a number."""
    constant = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    return ast.unparse(node) if isinstance(node, ast.Name) or constant else None


def _reads(statement: ast.stmt, freed: set[str]) -> Iterator[str]:
    for node in ast.walk(statement):
        if not isinstance(node, ast.Name | ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        if (name := _name(node)) in freed:
            yield f"{name} in line {node.lineno}"


def _write(statement: ast.stmt, freed: set[str]) -> None:
    if isinstance(statement, ast.Delete):
        freed.update(filter(None, map(_name, statement.targets)))
    if not isinstance(statement, ast.Assign):
        return
    is_none = isinstance(statement.value, ast.Constant) and statement.value.value is None
    for target in statement.targets:
        for node in target.elts if isinstance(target, ast.Tuple) else [target]:
            name = _name(node)
            if name is None:
                continue
            freed.discard(name)
            freed.difference_update({n for n in freed if n.startswith(f"{name}[")})
            if is_none:
                freed.add(name)
