"""Fourteen planted porting faults: how many each tool names, and how many clean ports it blames.

    python -m benchmarks.porting [TOOL ...]

The faults are those of the tests (`tests/ported_transformer.py`). Tools that are not installed are
left out.
"""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hookline as hl

sys.path.append(str(Path(__file__).parents[1] / "tests"))
ported = importlib.import_module("ported_transformer")

# The path that a tool names, as in the original; None for none.
Tool = Callable[[nn.Module, nn.Module, Callable[[str], str]], str | None]
_PREFIX = "decoder."
_NOISE = 1e-4  # of a sum of absolute values, as DebugMode compares


def _unchanged(path: str) -> str:
    return path


def _without_prefix(path: str) -> str:
    return path.removeprefix(_PREFIX)


# For each column the port that is made of a model with a fault, and how its paths are called.
COLUMNS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[str], str]]] = {
    "float32": (lambda port: port, _unchanged),
    "bfloat16": (lambda port: port.bfloat16(), _unchanged),
    "renamed": (ported.Renamed, _without_prefix),
    "functions": (ported.with_functions, _unchanged),
}


def by_compare(model: nn.Module, port: nn.Module, names: Callable[[str], str]) -> str | None:
    """Record both, and compare."""
    return hl.compare(ported.run_of(model), ported.run_of(port), names=names).suspect


def by_compare_with_cast(
    model: nn.Module, port: nn.Module, names: Callable[[str], str]
) -> str | None:
    """Cast the original to the dtype of the port, whose clean code then repeats each bit."""
    dtype = next(port.parameters()).dtype
    cast = ported.run_of(copy.deepcopy(model).to(dtype))
    floor = hl.compare(cast, cast) if dtype is torch.bfloat16 else None
    return hl.compare(cast, ported.run_of(port), names=names, floor=floor).suspect


def by_shadow(model: nn.Module, port: nn.Module, names: Callable[[str], str]) -> str | None:
    """Feed each module of the port what its counterpart got."""
    comparison = hl.shadow(model, port, ported.IDS, names=names)
    modes = [finding.site for finding in comparison.findings if finding.kind == "model"]
    return modes[0] if modes else comparison.suspect


def by_pytest_torch(model: nn.Module, port: nn.Module, names: Callable[[str], str]) -> str | None:
    """The first diverging layer whose inputs do not diverge; names are mapped, parents recorded."""
    localize = importlib.import_module("pytest_torch").localize_divergence
    known = {names(path): path for path, _ in port.named_modules() if path}
    known["<root>"] = "<root>"
    report = localize(model, port, ported.IDS, module_map=known, leaf_only=False)
    # A layer that the port has not is called diverged, too, with a note.
    layers = [layer for layer in report.diverged if not layer.note]
    inside = [layer.name for layer in layers if not layer.inputs_diverged]
    return inside[0].replace("<root>", "") if inside else None


def by_debug_mode(model: nn.Module, port: nn.Module, names: Callable[[str], str]) -> str | None:
    """The module of the first operation whose output has another sum of absolute values."""
    mode = importlib.import_module("torch.utils._debug_mode").DebugMode
    logs = []
    for net in (model, port):
        with torch.no_grad(), mode(record_nn_module=True) as debug, mode.log_tensor_hashes():
            net(ported.IDS)
        logs.append(debug.logs)
    hashes = {
        id(mismatch["hash1"]): mismatch
        for mismatch in mode.check_hash_mismatches(*logs)
        if mismatch["rel_diff"] > _NOISE
    }
    stack: list[tuple[int, str]] = []
    for entry in logs[0]:
        while stack and stack[-1][0] >= entry.call_depth:
            stack.pop()
        if hasattr(entry, "tag"):  # a module: "Net.blocks.1.mlp"
            stack.append((entry.call_depth, entry.tag))
        elif any(id(number) in hashes for number in _numbers((entry.log or {}).get("hash"))):
            return stack[-1][1].partition(".")[2]
    return None


def _numbers(value: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(value)


def by_fx_numeric_suite(
    model: nn.Module, port: nn.Module, names: Callable[[str], str]
) -> str | None:
    """The first logged operation whose output has a signal-to-noise ratio below 80 dB."""
    suite = importlib.import_module("torch.ao.ns._numeric_suite_fx")
    loggers = suite.add_loggers(
        "a", copy.deepcopy(model), "b", copy.deepcopy(port), suite.OutputLogger
    )
    for net in loggers:
        with torch.no_grad():
            net(ported.IDS)
    results = suite.extract_logger_info(*loggers, suite.OutputLogger, "b")
    ratio = importlib.import_module("torch.ao.ns.fx.utils").compute_sqnr
    suite.extend_logger_results_with_comparison(results, "a", "b", ratio, "sqnr")
    paths = {path.replace(".", "_"): path for path, _ in port.named_modules()}
    for layer in results.values():
        entry = layer["node_output"]["b"][0]
        if any(float(decibels) < 80 for decibels in entry["sqnr"]):
            name = entry["ref_node_name"]  # of a function, if it is no module's
            return names(paths.get(name, name))
    return None


TOOLS: dict[str, Tool] = {
    "hl.compare": by_compare,
    "hl.compare with the cast": by_compare_with_cast,
    "hl.shadow": by_shadow,
    "pytest-torch": by_pytest_torch,
    "DebugMode": by_debug_mode,
    "FX numeric suite": by_fx_numeric_suite,
}


def judge_tool(tool: Tool, column: str) -> tuple[int, bool, set[str]]:
    """Return how many faults a tool names, whether it blames a clean port, and its errors."""
    make, names = COLUMNS[column]
    n_named, errors, model = 0, set(), ported.net()
    is_blamed = False
    for plant, path in [*ported.FAULTS.values(), (lambda model: None, None)]:
        port = copy.deepcopy(model)
        plant(port)
        expected = path.removesuffix(".act") if path and column == "functions" else path
        try:
            named = tool(model, make(port), names)
        except Exception as error:
            errors.add(f"{type(error).__name__}: {error}".splitlines()[0][:100])
            continue
        n_named += path is not None and named == expected
        is_blamed |= path is None and named is not None
    return n_named, is_blamed, errors


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{'named of 14':28s}", *(f"{column:>10s}" for column in COLUMNS))
    for name, tool in TOOLS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        cells, errors = [], set()
        for column in COLUMNS:
            n_named, is_blamed, why = judge_tool(tool, column)
            cells.append(f"{n_named}{' !' * is_blamed}")
            errors |= why
        print(f"{name:28s}", *(f"{cell:>10s}" for cell in cells), *sorted(errors)[:2], flush=True)
    print("! blames a clean port as well")


if __name__ == "__main__":
    main()
