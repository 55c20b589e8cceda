"""The house: imports point down, nothing is global, private names of torch live in one room."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from hookline.engine import OPEN
from package_source import DEFINITION, FUNCTION, SRC, module_of, parsed, statements, texts

# The rooms from the roof down, as docs/architecture.md draws them. A file may import from its own
# room and from those below it.
ROOMS = [
    "hookline.cli", "hookline", "hookline.integrations", "hookline.views", "hookline.verbs",
    "hookline.verbs.extract", "hookline.verbs.compare", "hookline.verbs.sweep",
    "hookline.verbs.anatomy",
    "hookline.verbs.doctor", "hookline.verbs.cam", "hookline.verbs.clip", "hookline.verbs.check",
    "hookline.verbs.watch",
    "hookline.verbs.profile", "hookline.verbs.monitor", "hookline.verbs.monitor.writers",
    "hookline.verbs.record", "hookline.verbs.edit", "hookline.verbs.summary",
    "hookline.verbs.attach", "hookline.verbs.inventory", "hookline.verbs.operations",
    "hookline.verbs.shared",
    "hookline.opening", "hookline.data", "hookline.stores", "hookline.recordings",
    "hookline.curves", "hookline.findings", "hookline.statistics", "hookline.models",
    "hookline.engine", "hookline.engine.line", "hookline.engine.report",
    "hookline.engine.gradients", "hookline.engine.autograd", "hookline.engine.taps",
    "hookline.engine.compile", "hookline.engine.memory", "hookline.engine.passes",
    "hookline.engine.distributed", "hookline.engine.selection", "hookline.engine.pytree",
    "hookline.engine.operations", "hookline.engine.attention", "hookline.engine.names_elsewhere",
    "hookline.engine.function_names",
    "hookline.engine.torch_private.graph", "hookline.engine.torch_private", "hookline.files",
    "hookline.errors", "hookline.display", "hookline.util",
]  # fmt: skip
GROUND = {"hookline.errors", "hookline.display", "hookline.util"}
# What a room may see of those below it, where that is not all.
ONLY = {
    "hookline.files": GROUND,
    "hookline.models": GROUND,
    "hookline.views": GROUND | {
        "hookline.verbs.summary", "hookline.verbs.compare", "hookline.verbs.sweep",
        "hookline.verbs.check", "hookline.verbs.profile", "hookline.opening", "hookline.stores",
        "hookline.recordings", "hookline.curves", "hookline.findings", "hookline.statistics",
        "hookline.engine", "hookline.engine.pytree", "hookline.files",
    },
}  # fmt: skip
# Functions that may import late: what is heavy, when it is asked for.
ENTRY_POINTS = {"__getattr__", "main"}
TEXTS = texts()


@cache
def room_of(module: str) -> str:
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len)


@cache
def imports(text: str) -> list[tuple[str, str | None]]:
    """Every import of ours: the module, and the function that it is in or None."""

    def walk(node, function):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("hookline"):
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield (full if full in TEXTS else child.module), inside
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    if alias.name.startswith("hookline"):
                        yield alias.name, inside
            yield from walk(child, inside)

    return list(walk(parsed(text), None))


def faults(here: str, text: str) -> list[str]:
    """What a file imports that it may not."""
    room, found = room_of(here), []
    for module, function in imports(text):
        other = room_of(module)
        if function in ENTRY_POINTS:
            continue
        if function is not None:
            found.append(f"{here} imports {module} inside {function}()")
        if ROOMS.index(other) < ROOMS.index(room):
            found.append(f"{here} imports {module}, above it")
        allowed = ONLY.get(room)
        if allowed is not None and other != room and other not in allowed:
            found.append(f"{here} imports {module}, which {room} is not to see")
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The first circle of imports, or nothing."""
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name not in done:
            for other in sorted(graph.get(name, ())):
                if circle := visit(other, (*above, name)):
                    return circle
            done.add(name)
        return []

    return next((circle for name in graph if (circle := visit(name, ()))), [])


def test_imports_point_down():
    assert [fault for name, text in TEXTS.items() for fault in faults(name, text)] == []


def test_there_is_no_circle():
    # Also of what is imported late.
    graph = {name: {module for module, _ in imports(text)} for name, text in TEXTS.items()}
    graph["hookline"] = set()  # asks for its own parts by name, late
    assert cycle(graph) == []


def test_every_room_is_there_and_every_folder_is_a_room():
    folders = {module_of(path.parent / "__init__.py") for path in (SRC / "engine").rglob("*.py")}
    folders |= {f"hookline.{path.stem}" for path in SRC.iterdir() if path.stem[0] not in "_."}
    assert folders - {"hookline.py"} <= {*ROOMS, "hookline.py"}
    assert all(room in TEXTS for room in ROOMS)


@pytest.mark.parametrize(
    ("here", "line", "why"),
    [
        ("hookline.engine.taps.base", "from hookline.engine.line.line import Line", "above it"),
        ("hookline.engine.line.line", "from hookline.verbs import record", "above it"),
        ("hookline.engine.pytree.tree", "from hookline.engine import Pass", "above it"),
        ("hookline.recordings.pass_log", "import hookline.views", "above it"),
        ("hookline.models.load_model", "from hookline.engine import Site", "not to see"),
        ("hookline.verbs.cam.cam", "def f():\n    import hookline.engine", "inside f()"),
    ],
)
def test_an_import_that_points_up_or_hides_is_found(here, line, why):
    (fault, *_) = faults(here, line)
    assert why in fault


def test_a_circle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


BRANCHES = (
    ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.BoolOp, ast.comprehension,
    ast.match_case,
)  # fmt: skip
NESTS = ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match


def own_nodes(node):
    """All that a function holds, without the functions in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, DEFINITION):
            yield child
            yield from own_nodes(child)


def nesting(node, depth=0):
    """How deep the statements of a function stand in one another; an elif is beside its if."""
    deepest = depth
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (*DEFINITION, ast.expr)):
                is_elif = isinstance(node, ast.If) and field == "orelse" and value == [child]
                is_beside = is_elif and isinstance(child, ast.If)
                inside = depth + (isinstance(child, NESTS) and not is_beside)
                deepest = max(deepest, nesting(child, inside))
    return deepest


def tangles(text: str) -> list[str]:
    """The functions that are too long to be read at once, and what is global."""
    found = []
    for node in statements(parsed(text)):
        if isinstance(node, ast.Global):
            found.append(f"{', '.join(node.names)} is global")
        if not isinstance(node, FUNCTION):
            continue
        doc = ast.get_docstring(node, clean=False) or ""
        lines = node.end_lineno - node.lineno + 1 - len(doc.splitlines())
        branches = sum(isinstance(part, BRANCHES) for part in own_nodes(node))
        sizes = [(lines, 60, "lines"), (branches, 15, "branches"), (nesting(node), 4, "nesting")]
        found += [f"{node.name} has {n} {what}" for n, most, what in sizes if n > most]
    return found


def test_nothing_is_global_and_no_function_is_tangled():
    # A file has no cap: one idea a file is the rule, and a cap splits them in the midst of one.
    assert [(name, tangle) for name, text in TEXTS.items() for tangle in tangles(text)] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("    global a", "a is global"),
        ("    a = 1\n" * 60, "f has 61 lines"),
        ("    a = b or c if d else [e for e in g]\n" * 5 + "    if a: pass", "f has 16 branches"),
        ("    if a:\n     for b in c:\n      with d:\n       while e:\n        try: f()\n"
         "        finally: pass", "f has 5 nesting"),
    ],
)  # fmt: skip
def test_a_tangled_function_is_found(text, said):
    assert tangles(f"def f():\n{text}") == [said]


def test_what_is_just_short_enough_is_let_be():
    assert tangles("def f():\n" + "    a = 1\n" * 59) == []
    assert tangles("def f():\n" + "    if a: pass\n" * 15) == []
    assert tangles("def f():\n    if a: pass\n" + "    elif b: pass\n" * 5) == []


def test_no_docstring_lists_what_a_file_imports():
    # Its imports do, and are never out of date.
    for name, text in TEXTS.items():
        docstring = ast.get_docstring(parsed(text)) or ""
        assert docstring, f"{name}: say what the file is for"
        assert "TODO" not in docstring, name
        assert not re.search(r"\bImports\b", docstring), name


FREE_RELATIVES = {"What", "Whether", "How", "Where", "Why", "Who"}


def docstrings(text: str) -> list[str]:
    """Every docstring of a file, the outer ones first."""
    tree = parsed(text)
    nodes = [tree, *(node for node in statements(tree) if isinstance(node, DEFINITION))]
    return [doc for node in nodes if (doc := ast.get_docstring(node))]


def opens_with_a_relative(doc: str) -> bool:
    """Return whether a docstring opens with a relative in place of a verb or a noun."""
    return doc.split(maxsplit=1)[0].strip(",.:") in FREE_RELATIVES


@pytest.mark.slow
def test_docstrings_open_with_a_verb_or_a_noun():
    found = [doc for text in TEXTS.values() for doc in docstrings(text)]
    share = sum(map(opens_with_a_relative, found)) / len(found)
    assert share < 0.03, f"{share:.1%} of the docstrings open with a relative such as What"


def test_an_opening_with_a_relative_is_found():
    text = '"""Who asks."""\ndef f():\n    """Return it."""\nclass A:\n    """What: it is."""'
    assert [opens_with_a_relative(doc) for doc in docstrings(text)] == [True, False, True]


def test_no_room_of_the_engine_is_large():
    for room in (path for path in (SRC / "engine").iterdir() if path.is_dir()):
        lines = sum(len(path.read_text().splitlines()) for path in room.glob("*.py"))
        assert lines <= 1500, f"{room.name} has {lines} lines"


PRIVATE = re.compile(
    r"torch\._(?!_version)|_forward_hooks|_forward_pre_hooks|_backward_hooks|_call_impl\b|\._modules\b"
    r"|_global_\w+hooks|\._parameters\b|\._buffers\b"
)


def test_private_names_of_torch_are_touched_in_one_room():
    for name, text in TEXTS.items():
        if room_of(name).startswith("hookline.engine.torch_private"):
            continue
        # A name in a string is looked for, not touched: failing_module reads tracebacks.
        code = re.sub(r'"[^"\n]*"', '""', re.sub(r"#.*", "", text))
        touched = PRIVATE.findall(code)
        assert not touched, f"{name} touches {touched}"


def test_hooks_are_registered_in_one_file():
    for name, text in TEXTS.items():
        code = re.sub(r">>>.*", "", text)  # an example may register by hand
        registers = re.findall(r"register_\w*hook\(|hooks\[(?:key|_FIRST_ID)\] = ", code)
        # torch_private puts hooks on what a pass computed: they go with its graph.
        allowed = name.endswith(".registration") or ".torch_private." in name
        assert not registers or allowed, name


def past_the_face(here: str, text: str) -> list[str]:
    """What a file outside the engine imports that the engine's face does not name."""
    if room_of(here).startswith("hookline.engine"):
        return []
    meant = {"hookline.engine", *(f"hookline.engine.{name}" for name in OPEN)}
    named = {module for module, _ in imports(text)}
    return sorted(name for name in named - meant if name.startswith("hookline.engine."))


def test_nothing_is_imported_past_the_face_of_the_engine():
    past = [(name, module) for name, text in TEXTS.items() for module in past_the_face(name, text)]
    assert past == []


def test_an_import_past_the_face_is_found():
    line, module = "from hookline.engine.line.line import Line", "hookline.engine.line.line"
    assert past_the_face("hookline.verbs.summary", line) == [module]
    assert past_the_face("hookline.engine.line.compile_support", line) == []
    assert past_the_face("hookline.verbs.summary", "from hookline.engine.pytree import tree") == []
    assert not any("torch_private" in name for name in OPEN)


def test_names_of_tests_are_short_enough_to_be_read():
    for path in Path(__file__).parent.rglob("test_*.py"):
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE):
            assert len(name) <= 60, f"{path.name}: {name}"
