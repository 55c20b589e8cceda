"""The house: imports point down, nothing is global, private names of torch live in one file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "hookline"
FILES = sorted(SRC.rglob("*.py"))

# Each folder may import from those after it, and from its own files.
ORDER = ["cli", "views", "models", "verbs", "recordings", "engine", "errors", "display", "util"]
# Inside the engine, each file may import from those before it.
ENGINE = [
    "regime_internals", "torch_internals",
    "everywhere_internals", "compile_internals", "compile_marks", "identity",
    "checkpoint_internals", "distributed_internals", "regime", "meeting", "tree", "opaque",
    "outlines", "memory", "read_only", "local", "globs", "site", "modules",
    "ground", "no_match", "select", "calls", "passes",
    "recompute", "arguments", "traced", "taps", "raw_taps", "returns", "values", "flow",
    "graph_gradients", "gradient_tap", "gradient_taps", "backward_taps", "saved_taps",
    "fast_paths", "attachment", "placing", "compile_notes", "compiled", "ending", "handle",
    "report", "inventory", "blame", "line", "everywhere", "hooks_on_modules",
    "hooks_on_tensors", "hooks_on_events", "attach", "__init__",
]  # fmt: skip
# Functions in which a file may import a module of ours that lies above it, or late.
ENTRY_POINTS = {"__str__", "_repr_html_", "__getattr__", "main"}
# What a layer may see of the engine, where that is not all of it.
ONLY = {
    "models": set(),
    "views": {"hookline.engine", "hookline.engine.tree"},
}
PLAIN_DATA = {"Site", "as_written", "Report", "Inventory", "HookEntry", "tree"}


def name_of(path: Path) -> str:
    parts = ("hookline", *path.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST):
    """Every import of ours: (module, names, the function it is in or None)."""

    def walk(node, function, typing_only):
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            checking = typing_only or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("hookline"):
                yield child.module, [alias.name for alias in child.names], inside
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    if alias.name.startswith("hookline"):
                        yield alias.name, [], inside
            yield from walk(child, inside, checking)

    yield from walk(tree, None, False)


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path):
    here = name_of(path)
    for module, names, function in imports(ast.parse(path.read_text())):
        if function in ENTRY_POINTS:
            continue
        assert function is None, f"{here} imports {module} inside {function}()"
        if layer(here) in ("", "cli"):
            continue
        assert layer(module) in ORDER, f"{here} imports {module}"
        assert ORDER.index(layer(module)) >= ORDER.index(layer(here)), f"{here} imports {module}"
        if layer(module) == "engine" and layer(here) in ONLY:
            allowed = ONLY[layer(here)]
            assert module in allowed, f"{here} imports {module}"
            if module == "hookline.engine":
                assert set(names) <= PLAIN_DATA, f"{here} imports {names} from the engine"


def test_the_engines_files_build_on_one_another_in_the_order_that_it_says():
    files = {path.stem for path in (SRC / "engine").glob("*.py")}
    assert files == set(ENGINE)
    says = (SRC / "engine" / "__init__.py").read_text().split('"""')[1].partition("another:")[2]
    assert re.findall(r"[a-z_]+", says) == ENGINE[:-1]
    for name in ENGINE:
        tree = ast.parse((SRC / "engine" / f"{name}.py").read_text())
        for module, names, function in imports(tree):
            if function in ENTRY_POINTS:
                continue
            if layer(module) != "engine":
                continue
            used = [module.split(".")[2]] if module != "hookline.engine" else names
            for other in used:
                assert ENGINE.index(other) < ENGINE.index(name), f"{name} imports {other}"


def test_there_is_no_cycle():
    graph = {}
    for path in FILES:
        tree = ast.parse(path.read_text())
        graph[name_of(path)] = {
            target
            for module, names, function in imports(tree)
            if function is None
            for target in (
                [f"{module}.{n}" for n in names if f"{module}.{n}" in map(name_of, FILES)]
                or [module]
            )
        }
    done: set[str] = set()

    def visit(name, above):
        assert name not in above, " -> ".join([*above, name])
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, [*above, name])
            done.add(name)

    for name in graph:
        visit(name, [])


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_global_and_no_function_is_long(path):
    # A file has no cap: one idea a file is the rule, and a cap splits them in the midst of one.
    tree = ast.parse(path.read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            doc = ast.get_docstring(node, clean=False) or ""
            length = node.end_lineno - node.lineno + 1 - len(doc.splitlines())
            assert length <= 60, f"{node.name} has {length} lines"


PRIVATE = re.compile(
    r"torch\._(?!_version)|_forward_hooks|_forward_pre_hooks|_backward_hooks|_call_impl\b|\._modules\b"
    r"|_global_\w+hooks|\._parameters\b|\._buffers\b"
)


def test_private_names_of_torch_are_touched_in_one_place():
    for path in FILES:
        if path.name.endswith("_internals.py"):
            continue
        # A name in a string is looked for, not touched: blame reads tracebacks.
        code = re.sub(r'"[^"\n]*"', '""', re.sub(r"#.*", "", path.read_text()))
        found = PRIVATE.findall(code)
        assert not found, f"{path.name} touches {found}"


def test_hooks_are_registered_in_one_file():
    for path in (SRC / "engine").glob("*.py"):
        code = re.sub(r">>>.*", "", path.read_text())  # an example may register by hand
        registers = re.findall(r"register_\w*hook\(|hooks\[key\] = ", code)
        # The internals put hooks on what a pass computed: they go with its graph.
        allowed = ("placing.py", "torch_internals.py", "compile_internals.py")
        assert not registers or path.name in allowed, path.name
    for path in FILES:
        if "engine" not in path.parts:
            assert not re.findall(r"register_\w*hook\(", path.read_text()), path.name
