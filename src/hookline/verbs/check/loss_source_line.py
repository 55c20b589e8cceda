"""Find the line of the function that calls `backward()` in which an operation of the loss ran.

Autograd keeps no lines. But nodes of the graph are numbered, and the function's variables still
hold the loss and what it was computed from. An operation ran in the statement that stored the first
variable computed from it, if nothing that ran after an earlier value could have run it instead.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

from hookline.engine import node_number
from hookline.verbs.check.finding import SourceLine, source_line

_WORKS = (ast.Call, ast.BinOp, ast.UnaryOp, ast.AugAssign, ast.Subscript, ast.Compare)


class CalledAt(NamedTuple):
    """Name the line that called a model."""

    code: CodeType  # the code of the calling function
    lineno: int  # the number of the line


def line_of_loss(
    frame: FrameType, node: Any, called_at: CalledAt | None, reaches: Callable[[Any], bool]
) -> SourceLine | None:
    """Return the line of a function in which an operation of the loss ran; None if not known.

    `called_at` is the line that called the last run of the model before the operation. `reaches`
    tells whether the value of a node was computed from the operation's.
    """
    if called_at == CalledAt(frame.f_code, frame.f_lineno):
        return source_line(frame, frame.f_lineno)  # the model, the loss and its backward
    statements = list(_simple_statements(frame.f_code))
    variables, number = _variables_in_graph(frame, statements), node_number(node)
    later = [
        variable for variable in variables if variable.number >= number and reaches(variable.node)
    ]
    earlier = [variable for variable in variables if variable.number < number]
    statement = later[0].statement if later else _statement_at(statements, frame.f_lineno)
    before = [earlier[-1].statement] if earlier else []
    if called_at is not None and called_at.code is frame.f_code:
        call = _statement_at(statements, called_at.lineno)
        before += [] if call is None else [call]
    last = max(before, key=lambda place: place.lineno, default=None)
    if statement is None or last is None or not _is_next_computation(statements, last, statement):
        return None
    return source_line(frame, statement.lineno)


class _Variable(NamedTuple):
    """Hold a variable that one statement stores."""

    number: int  # the number of the node that made its value
    node: Any  # the node
    statement: ast.stmt  # the statement


def _variables_in_graph(frame: FrameType, statements: list[ast.stmt]) -> list[_Variable]:
    """Return the variables that hold tensors of a graph, by the numbers of their nodes."""
    stored, variables = _statements_by_variable(statements), []
    for name, value in frame.f_locals.items():
        places = stored.get(name, [])
        if isinstance(value, Tensor) and value.grad_fn is not None and len(places) == 1:
            variables.append(_Variable(node_number(value.grad_fn), value.grad_fn, places[0]))
    return sorted(variables, key=lambda variable: variable.number)


def _simple_statements(code: CodeType) -> Iterator[ast.stmt]:
    """Yield the statements of a function that hold no others."""
    source = "".join(linecache.getlines(code.co_filename))
    try:
        tree: ast.AST = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    functions = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name
        and code.co_firstlineno in {node.lineno, *(part.lineno for part in node.decorator_list)}
    ]  # fmt: skip
    if functions or code.co_name == "<module>":
        yield from _walk_simple_statements(functions[0] if functions else tree)


def _walk_simple_statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(child, ast.stmt) and not hasattr(child, "body"):
            yield child
        else:
            yield from _walk_simple_statements(child)


def _statements_by_variable(statements: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Return the statements that store each variable."""
    stored: dict[str, list[ast.stmt]] = {}
    for statement in statements:
        for part in ast.walk(statement):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                stored.setdefault(part.id, []).append(statement)
    return stored


def _statement_at(statements: list[ast.stmt], lineno: int) -> ast.stmt | None:
    """Return the statement at a line; None if there are several."""
    begun = [statement for statement in statements if statement.lineno <= lineno]
    matches = [part for part in begun if lineno <= (part.end_lineno or part.lineno)]
    return matches[0] if len({statement.lineno for statement in matches}) == 1 else None


def _is_next_computation(statements: list[ast.stmt], before: ast.stmt, statement: ast.stmt) -> bool:
    """Tell whether no other statement between two can have run an operation of the loss."""
    if before.lineno == statement.lineno:
        return True
    between = [work for work in statements if before.lineno < work.lineno < statement.lineno]
    works = [work for work in between if any(isinstance(part, _WORKS) for part in ast.walk(work))]
    does_work = any(isinstance(part, _WORKS) for part in ast.walk(statement))
    is_later = before.lineno < statement.lineno
    # The value of an expression that is a statement is dropped.
    return is_later and does_work and all(isinstance(work, ast.Expr) for work in works)
