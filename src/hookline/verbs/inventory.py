"""List every hook on a model, and the owner of each."""

from __future__ import annotations

import inspect
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, final

from torch import nn

from hookline.display.results import Printout, Result
from hookline.display.text import plural
from hookline.display.text_table import Heading
from hookline.display.wrapped_text import Cell
from hookline.engine import (
    HOOK_DICTS,
    ModeTap,
    RootTap,
    Tap,
    global_hooks,
    hook_dict,
    hooked_operations_on,
    is_inert,
    module_tree,
    path_text,
    require_model,
    tensor_hooks,
)


@final
@dataclass(frozen=True)
class HookEntry:
    """A hook that is on a model now.

    Args:
        path: the path of its module, or of the module and the parameter. "(every module)" for a
            process-wide hook.
        kind: "forward_pre", "forward", "backward", "grad", "state_dict", ...
        owner: "hookline", "torch", the name of an installed package, "python" (the standard
            library), or "yours".
        function: the qualified name of the function. For a hook of hookline, the tap and its site.
        where: the file and line of the definition; empty where Python does not know them.
    """

    path: str
    kind: str
    owner: str
    function: str
    where: str


@final
@dataclass(frozen=True, repr=False)
class Inventory(Result):
    """Every hook on a model. Print it, iterate over it, or take its length.

        >>> model = nn.Linear(2, 2)
        >>> handle = model.register_forward_hook(lambda module, args, output: None)
        >>> [(hook.path, hook.kind) for hook in hl.inventory(nn.Sequential(model))]
        [('0', 'forward')]

    Args:
        entries: the process-wide hooks, then the hooks of each module, in registration order of the
            modules. A hook has `path` (of its module or parameter), `kind` (such as "forward"),
            `owner` ("hookline", "torch", a package, "python" or "yours"), `function` (its name)
            and `where` (the file and line of its definition).
        modules: the number of modules of the model.
    """

    entries: tuple[HookEntry, ...]
    modules: int
    _row_type: ClassVar[type] = HookEntry

    def __iter__(self) -> Iterator[HookEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Return the number of modules and, as `hooks`, the hooks, as plain values."""
        return {"modules": self.modules, "hooks": self._table_rows()}

    def _table_rows(self) -> list[dict[str, Any]]:
        return [asdict(entry) for entry in self.entries]

    def _printout(self) -> Printout:
        if not self.entries:
            return Printout(head=f"no hooks on {plural(self.modules, 'module')}")
        rows: list[list[Cell]] = [
            [
                path_text(entry.path),
                entry.kind,
                [(entry.owner, "bold" if entry.owner == "yours" else "")],
                entry.function,
                [(entry.where, "dim")],
            ]
            for entry in self
        ]
        return Printout(headings=_HEADINGS, rows=rows, more="hooks; iterate for all")


_HEADINGS = (
    Heading("path", "path"), Heading("kind"), Heading("owner"), Heading("function", "path"),
    Heading("where", "path"),
)  # fmt: skip


def inventory(model: nn.Module) -> Inventory:
    """List every hook now on a model, and its owner: hookline, torch, a library, or you.

        >>> model = nn.Linear(2, 2)
        >>> handle = model.register_forward_hook(lambda module, args, output: None)
        >>> [hook.kind for hook in hl.inventory(model)]
        ['forward']

    Args:
        model: any module. It is neither run nor changed.

    Returns:
        The hooks on its modules and parameters, and the process-wide hooks. Print them, or iterate
        over them. Each has `path`, `kind`, `owner`, `function` and `where`.

    Raises:
        AttachError: `model` is not a module.
    """
    require_model(model, "hl.inventory(model)")
    nodes = module_tree(model).nodes
    return Inventory(tuple(_hook_entries(nodes)), len(nodes))


def _hook_entries(nodes: list[Any]) -> Iterator[HookEntry]:
    for kind, hook in global_hooks():
        yield _make_entry("(every module)", kind, hook)
    for node in nodes:
        operations = hooked_operations_on(node.module)
        named = [(f"{node.path}@{operation.name}", operation) for operation in operations]
        for path, module in [(node.path, node.module), *named]:
            for kind in HOOK_DICTS:
                hooks = hook_dict(module, kind).values()
                yield from (_make_entry(path, kind, hook) for hook in hooks)
        for name, parameter in node.module.named_parameters(recurse=False):
            for kind, hook in tensor_hooks(parameter):
                yield _make_entry(f"{node.path}.{name}".lstrip("."), kind, hook)


def _make_entry(path: str, kind: str, hook: Callable[..., Any]) -> HookEntry:
    # torch wraps load-state-dict pre-hooks, and a user may register a functools.partial.
    inner = getattr(hook, "func", None) or getattr(hook, "hook", None) or hook
    owner = getattr(inner, "__self__", None)
    if isinstance(owner, Tap | RootTap | ModeTap):
        return HookEntry(path, kind, "hookline", _tap_description(owner, inner.__name__), "")
    is_code = inspect.isfunction(inner) or inspect.ismethod(inner)
    code: Any = inner if is_code else type(inner)
    module = getattr(code, "__module__", None) or ""
    try:
        file = inspect.getsourcefile(code) or ""
        line = inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        file, line = "", 0
    name = getattr(code, "__qualname__", type(inner).__name__)
    where = f"{file}:{line}" if file else ""
    return HookEntry(path, kind, _owner_package(module, file), name, where)


def _tap_description(owner: Tap | RootTap | ModeTap, method: str) -> str:
    if isinstance(owner, ModeTap):
        return "watches for calls of operations" if method == "fire" else "stops watching"
    if is_inert(owner):
        return "inert (of a copy): does nothing, is removed when first called"
    if isinstance(owner, RootTap):
        return f"pass {method}s"
    return f"{owner.order.name.lower()} {owner.site}"


def _owner_package(module: str, file: str) -> str:
    top = module.partition(".")[0]
    if top in ("torch", "hookline"):
        return top
    path = Path(file)
    if file and any(path.is_relative_to(folder) for folder in _library_folders()):
        return "python" if top in sys.stdlib_module_names else top
    return "yours"


def _library_folders() -> list[str]:
    user = site.getusersitepackages()
    paths = sysconfig.get_paths()
    return [*site.getsitepackages(), user, paths["purelib"], paths["platlib"], paths["stdlib"]]
