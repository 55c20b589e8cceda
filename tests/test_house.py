"""The house is easy to read: names are nouns, functions are short, flat and ask for little."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import pytest

import hookline as hl
import hookline.data
import hookline.models
import hookline.views
from package_source import DEFINITION, FUNCTION, SRC, functions, parsed, texts

BLOCK = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
# Names that say nothing of what they hold.
VAGUE = {"one", "found"}


@cache
def public() -> frozenset[str]:
    """The dotted names of what users call: it may have many options."""
    values = [getattr(hl, name) for name in hl.__all__]
    packages = [value for value in values if isinstance(value, ModuleType)]
    packages += [hookline.data, hookline.models]
    values += [getattr(package, name) for package in packages for name in package.__all__]
    values += vars(hookline.views).values()
    return frozenset(
        f"{value.__module__}.{value.__qualname__}"
        for value in values
        if hasattr(value, "__qualname__")
    )


# The name that a node binds.
BOUND = {
    ast.Name: lambda node: node.id if isinstance(node.ctx, ast.Store) else None,
    ast.arg: lambda node: node.arg,
    ast.MatchAs: lambda node: node.name,
    ast.ExceptHandler: lambda node: node.name,
}


def vague_names(text: str, module: str) -> dict[str, int]:
    """Bindings of names that say nothing: how many on each line."""
    lines: dict[str, int] = {}
    if not re.search(rf"\b({'|'.join(VAGUE)})\b", text):
        return lines
    for node in ast.walk(parsed(text)):
        bound = BOUND[type(node)](node) if type(node) in BOUND else None
        if bound in VAGUE:
            place = f"{module}:{node.lineno} {bound}"
            lines[place] = lines.get(place, 0) + 1
    return lines


def depths(text: str, module: str) -> dict[str, int]:
    """How deep blocks lie in one another, by function."""

    def depth(node: ast.AST) -> int:
        deepest = 0
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*DEFINITION, ast.expr)):
                continue
            is_elif = isinstance(node, ast.If) and [child] == node.orelse
            is_block = isinstance(child, BLOCK) and not (is_elif and isinstance(child, ast.If))
            deepest = max(deepest, depth(child) + is_block)
        return deepest

    return {name: depth(node) for name, node in functions(text, module)}


def parameters(text: str, module: str) -> dict[str, int]:
    """The parameters of what users do not call, by function. Those of commands are options."""
    numbers = {}
    for name, node in functions(text, module):
        owner, _, last = name.rpartition(".")
        is_public = name in public() or (owner in public() and not last.startswith("_"))
        is_public |= owner in public() and last == "__init__"
        if not is_public and not module.startswith(("hookline.cli", "hookline.integrations")):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            numbers[name] = sum(each.arg not in ("self", "cls") for each in every)
    return numbers


def lengths(text: str, module: str) -> dict[str, int]:
    """The lines of code of each function, without its docstring, comments and empty lines.

    All lines of a text in the code count. A tokenizer says the same, and takes far longer.
    """
    is_code = [line.lstrip()[:1] not in ("", "#") for line in text.split("\n")]
    for node in ast.walk(parsed(text)):
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            is_code[node.lineno - 1 : node.end_lineno] = [True] * (
                node.end_lineno - node.lineno + 1
            )
    sizes = {}
    for name, node in functions(text, module):
        sizes[name] = sum(is_code[node.lineno - 1 : node.end_lineno])
        if ast.get_docstring(node) is not None:
            sizes[name] -= sum(is_code[node.body[0].lineno - 1 : node.body[0].end_lineno])
    return sizes


def unguarded_jumps(text: str, module: str) -> dict[str, int]:
    """Loops under a lock that Ctrl-C can leave with the lock held, by function.

    In Python 3.12 and 3.13, the jump from a condition back to the start of a loop is outside of
    what `with` guards, and Python handles signals there.
    """

    def parts(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (*FUNCTION, ast.Lambda, ast.GeneratorExp)):
                yield child
                yield from parts(child)

    def is_locked(node: ast.AST) -> bool:
        items = node.items if isinstance(node, ast.With) else ()
        return any("lock" in ast.unparse(item).lower() for item in items)

    def is_unguarded(node: ast.AST) -> bool:
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
            return any(generator.ifs for generator in node.generators)
        ends_in_condition = isinstance(node, ast.For) and isinstance(node.body[-1], ast.If)
        return isinstance(node, ast.While) or ends_in_condition

    if "lock" not in text.lower():
        return {}
    return {
        name: sum(
            is_unguarded(part)
            for block in parts(function)
            if is_locked(block)
            for part in parts(block)
        )
        for name, function in functions(text, module)
    }


# What is measured, and the most of it that a line or a function may have.
BUDGETS = {
    "bindings named `one` or `found`": (vague_names, 0),
    "blocks inside one another": (depths, 3),
    "parameters of what users do not call": (parameters, 6),
    "lines of code of a function": (lengths, 55),
    "loops under a lock that Ctrl-C leaves locked": (unguarded_jumps, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_source_keeps_to_the_budget(budget):
    measure, most = BUDGETS[budget]
    over = []
    for module, text in texts().items():
        numbers = measure(text, module)
        over += [f"{name}: {number}" for name, number in numbers.items() if number > most]
    assert not over, "\n".join(over)


PLANTED = {
    "bindings named `one` or `found`": [
        "found = 1", "def f(one): ...", "[one for one in x]", "with a as (b, found): ...",
        "for one in x: ...", "if found := x: ...", "try: ...\nexcept E as found: ...",
    ],
    "blocks inside one another": [
        "def f():\n if a:\n  for b in c:\n   with d:\n    while e: ...",
        "def f():\n try: ...\n finally:\n  if a: ...\n  elif b:\n   if c:\n    if d: ...",
    ],
    "parameters of what users do not call": [
        "def _f(a, b, c, d, e, f, g): ...",
        "class A:\n def m(self, a, b, /, c, d, *, e, f, g): ...",
    ],
    "lines of code of a function": ["def f():\n" + " x()\n" * 55],
    "loops under a lock that Ctrl-C leaves locked": [
        "def f(self):\n with self._lock:\n  return [x for x in self.all if x]",
        "def f():\n with a, _lock:\n  for x in y:\n   if x: z()",
        "def f():\n with place.locked():\n  while x: y()",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("budget", "text"), [(budget, text) for budget in PLANTED for text in PLANTED[budget]]
)
def test_each_budget_can_be_exceeded(budget, text):
    measure, most = BUDGETS[budget]
    assert max(measure(text, "hookline.planted").values()) > most


def test_empty_lines_of_a_text_in_the_code_count():
    assert lengths("def f():\n\n    # why\n    return '''a\n\n# b\n'''", "m") == {"m.f": 5}


WITHIN = """
def f(self, a, b, c, d, e, g):
    '''A docstring.

    of three lines
    '''
    # and a comment
    if a:
        ...
    elif b:
        ...
    elif c:
        ...
    else:
        for each in d:
            if each:
                ...
"""


def test_a_chain_of_elif_and_a_docstring_count_for_nothing():
    assert depths(WITHIN, "m") == {"m.f": 3}
    assert parameters(WITHIN, "m") == {"m.f": 6}
    assert lengths(WITHIN, "m") == {"m.f": 11}


# torch and IPython call them.
CALLED_BY_OTHERS = {"_count_flops", "_ipython_key_completions_"}


def unused(texts: list[str]) -> set[str]:
    """The private functions that no line but their definition names."""
    words = Counter(word for text in texts for word in re.findall(r"\w+", text))
    return {
        node.name
        for text in texts
        for _, node in functions(text, "")
        if re.match(r"_[^_]", node.name)
        if words[node.name] == 1
    }


@pytest.mark.slow
def test_each_private_function_is_used():
    assert unused([*texts().values()]) == CALLED_BY_OTHERS
    assert unused(["def _f(): ...\ndef _g(): _g\ndef __h__(): ..."]) == {"_f"}


@pytest.mark.slow
def test_lines_of_the_pages_templates_are_short():
    folder = SRC / "views" / "page" / "templates"
    files = [path for path in folder.rglob("*.*") if path.suffix in (".css", ".html", ".js")]
    assert len(files) > 40
    long = [
        f"{path.relative_to(folder)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(line) > 100
    ]
    assert long == []
