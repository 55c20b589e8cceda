"""The tables of docs/where-it-works.md, from the marks on the tests that prove their cells.

A test that goes over the regimes of tests/regime_cases.py, by `@each("values")`, proves theirs; so
does one over those of tests/rerun_regimes.py, by `@each_again("sweep")`.

    @pytest.mark.cell("autocast", "record", "edit")                      # works
    @pytest.mark.cell("autocast", "statistics", note="In float32.")      # works, with a condition
    @pytest.mark.cell("tracing", "record", refused="AttachError")        # refused, with which error

`python tests/regimes/table.py` writes them anew; a test says when that was forgotten.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "where-it-works.md"
PROOFS = HERE / "README.md"
BEGIN, END = "<!-- the tables: made by tests/regimes/table.py -->\n", "<!-- end -->\n"

VERBS = (
    "record", "gradients", "statistics", "edit", "edit gradients", "patch", "edit at", "raw hooks",
    "features", "watch", "clip", "check", "monitor", "profile", "sweep", "attribute", "shadow",
    "anatomy",
)  # fmt: skip

# Each table's heading, the guides on it, and its rows in their order.
GROUPS = {
    "Training and compilation": (
        "[torch.compile](#torchcompile), [activation checkpointing](#activation-checkpointing),"
        " [autocast, no gradients](#autocast-and-runs-without-gradients)",
        "autocast",
        "torch.compile",
        "activation checkpointing",
        "activation checkpointing in compiled code",
        "no_grad, inference_mode",
        "`no_grad` or `enable_grad` inside forward",
        "anomaly mode, deterministic algorithms, hooks on saved tensors, default device and dtype,"
        " `TorchFunctionMode`, `TorchDispatchMode`",
    ),
    "Many devices": (
        "[several ranks](ranks.md), [a cluster](ranks.md#one-data-set-on-many-processes)",
        "DDP",
        "FSDP2",
        "tensor parallelism",
        "pipeline parallelism",
        "DataParallel",
    ),
    "Transformers": (
        "[models of other libraries](inspecting.md#models-of-other-libraries)",
        "models of transformers",
        "encoder-decoders of transformers",
        "`generate` of transformers",
        "TransformerEncoder, with gradients",
        "TransformerEncoder, torch's fast path on",
        "TransformerEncoder, torch's fast path off",
        "MultiheadAttention",
    ),
    "Models and modules": (
        "[models of other libraries](inspecting.md#models-of-other-libraries)",
        "operations inside modules",
        "operations inside modules, in compiled code",
        "lazy modules, before their first run",
        "parametrized weights",
        "pruning; old `weight_norm` and `spectral_norm`",
        "AveragedModel (EMA, SWA)",
        "a forward replaced on the instance",
        "modules that call themselves recursively",
        "modules with their own `__call__`",
        "modules with their own `__getattr__`, `__setattr__`",
        "modules inside `ModuleList`, `ModuleDict`, `ParameterList`, `ParameterDict`",
        "deep copies of a model with hooks",
    ),
    "Operations and the parts of attention": (
        "[inside a module](inside.md)",
        "operations in checkpoints",
        "operations in checkpoints, in compiled code",
        "operations under DDP",
        "operations under FSDP1",
        "operations under FSDP2",
        "operations under tensor parallelism",
        "operations under torch.func",
        "operations in several threads",
    ),
    "Tensors and quantisation": (
        "[kinds of tensors](#kinds-of-tensors),"
        " [weights](inspecting.md#weights-that-are-not-parameters)",
        "sparse, complex, quantised, 8-bit, nested, empty and viewed tensors",
        "nested tensors",
        "packed sequences",
        "tensor subclasses",
        "torchao, int8 weights",
        "dynamically quantised",
        "statically quantised",
    ),
    "torch.func and tracing": (
        "[torch.func](#torchfunc), [tracing](#tracing-and-export)",
        "torch.func.grad, vjp",
        "torch.func.vmap",
        "forward-mode AD",
        "`torch.export`, `torch.jit.trace`, `make_fx`",
        "`torch.fx.symbolic_trace`",
        "torch.fx.GraphModule",
        "a feature extractor made by `torch.fx`",
        "fake tensors",
        "meta device",
    ),
    "Threads and processes": (
        "[threads and tasks](recording.md#threads-and-tasks),"
        " [copies and processes](inspecting.md#copies-and-processes)",
        "several threads that share a model",
        "thread pools",
        "async tasks",
        "`os.fork` while hooks are attached",
        "`os.fork` while another thread attaches hooks",
        "forked workers of a DataLoader",
        "spawned processes",
    ),
}


class Cell(NamedTuple):
    """What one test proves."""

    regime: str
    verbs: tuple[str, ...]
    note: str
    refused: str
    test: str


def cells(folder: Path = HERE) -> list[Cell]:
    """Every cell that a test in the folder proves, in the order of the files and tests."""
    return [cell for path in sorted(folder.glob("test_*.py")) for cell in _cells_of(path)]


def _cells_of(path: Path) -> Iterator[Cell]:
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        test = f"{path.name}::{node.name}"
        for mark in node.decorator_list:
            name = ast.unparse(mark.func) if isinstance(mark, ast.Call) else ""
            if name == "each":
                from regime_cases import told  # it loads torch

                for regime, tried in told(ast.literal_eval(mark.args[0])):
                    yield Cell(regime, tried, "", "", test)
            if name == "each_again":
                from rerun_regimes import told_again

                for regime, tried in told_again(ast.literal_eval(mark.args[0])):
                    yield Cell(regime, tried, "", "", test)
            if name == "pytest.mark.cell":
                regime, *verbs = [ast.literal_eval(value) for value in mark.args]
                said = {key.arg: ast.literal_eval(key.value) for key in mark.keywords}
                unknown = [verb for verb in verbs if verb not in VERBS]
                if unknown or not verbs or said.keys() - {"note", "refused"}:
                    raise ValueError(f"{path.name}: {node.name}: {ast.unparse(mark)}")
                yield Cell(
                    regime, tuple(verbs), said.get("note", ""), said.get("refused", ""), test
                )


def tables(found: list[Cell]) -> str:
    """Return a table for each group of regimes, with its notes below it."""
    grouped = {regime for _, *regimes in GROUPS.values() for regime in regimes}
    if missing := [cell.regime for cell in found if cell.regime not in grouped]:
        raise ValueError(f"tests/regimes/table.py: no group in GROUPS has {missing[0]!r}")
    parts = []
    for heading, (guides, *regimes) in GROUPS.items():
        if not (mine := [cell for cell in found if cell.regime in regimes]):
            continue
        present = [name for name in regimes if any(cell.regime == name for cell in mine)]
        verbs = [verb for verb in VERBS if any(verb in cell.verbs for cell in mine)]
        rows = ["| regime | " + " | ".join(verbs) + " |", "|---" * (len(verbs) + 1) + "|"]
        notes = []
        for regime in present:
            cells_of = [cell for cell in mine if cell.regime == regime]
            shown = [_cell([cell for cell in cells_of if verb in cell.verbs]) for verb in verbs]
            rows.append(f"| {regime} | " + " | ".join(shown) + " |")
            notes += _notes(regime, cells_of)
        lines = ["Notes:", "", *notes, ""] if notes else []
        parts += [f"## {heading}", "", f"Guides: {guides}.", "", *rows, "", *lines]
    return "\n".join(parts)


def proofs(found: list[Cell]) -> str:
    """Return the list of the tests of each regime."""
    regimes = [regime for _, *regimes in GROUPS.values() for regime in regimes]
    of_each = {name: [cell for cell in found if cell.regime == name] for name in regimes}
    lines = [_proof(regime, cells_of) for regime, cells_of in of_each.items() if cells_of]
    return "\n".join(["# The tests of each regime", "", *lines, ""])


def _cell(proofs: list[Cell]) -> str:
    if not proofs:
        return ""
    if all(cell.refused for cell in proofs):
        return "refused"
    return "yes\\*" if any(_note(cell) for cell in proofs) else "yes"


def _notes(regime: str, proofs: list[Cell]) -> list[str]:
    """Return the lines of one regime's notes, each with the columns that it is about."""
    tested = [verb for verb in VERBS if any(verb in cell.verbs for cell in proofs)]
    about: dict[str, list[str]] = {}
    for verb in tested:
        mine = [_note(cell) for cell in proofs if verb in cell.verbs and _note(cell)]
        for note in dict.fromkeys(mine):
            about.setdefault(note, []).append(verb)
    said = [
        note if verbs == tested else f"*{', '.join(verbs)}*: {note}"
        for note, verbs in about.items()
    ]
    if len(said) == 1:
        return [f"- **{regime}**{', ' if said[0][0] == '*' else ': '}{said[0]}"]
    return [f"- **{regime}**", *(f"    - {one}" for one in said)] if said else []


def _note(cell: Cell) -> str:
    error = f"`{cell.refused}`" if cell.refused and cell.refused not in cell.note else ""
    return ": ".join(part for part in (error, cell.note) if part)


def _proof(regime: str, proofs: list[Cell]) -> str:
    """Return the line that names one regime's tests, by file."""
    names: dict[str, list[str]] = {}
    for test in dict.fromkeys(cell.test for cell in proofs):
        file, _, name = test.partition("::")
        names.setdefault(file, []).append(f"`{name}`")
    files = "; ".join(f"`{file}`: {', '.join(tests)}" for file, tests in names.items())
    return f"- **{regime}**: {files}"


def page(text: str, found: list[Cell]) -> str:
    """The page with the tables in their place."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + "\n" + tables(found) + "\n" + END + after


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))  # of regime_cases.py
    PAGE.write_text(page(PAGE.read_text(), cells()))
    PROOFS.write_text(proofs(cells()))
