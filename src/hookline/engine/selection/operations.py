"""The names of operations in selectors, and messages for names that cannot be selected."""

from __future__ import annotations

from hookline.engine.operations.attention import PARTS
from hookline.engine.operations.names import close_names, functions, is_attribute
from hookline.engine.selection.module_tree import ModuleNode
from hookline.engine.selection.site import glob, path_text
from hookline.engine.torch_private.graph.function_modes import is_exported
from hookline.errors import SelectionError

_LIST = "\nhl.operations(model, x, {path!r}) lists what a module calls."


def operation_names(text: str, host: str) -> list[str]:
    """Return the names of operations that the text after the `@` stands for.

    Args:
        text: a name; or several, as in `{softmax,matmul}`.
        host: the text before the `@`, for messages.

    Raises:
        SelectionError: torch has no such function.
    """
    known = [*PARTS, *functions()]
    if text in PARTS or text in functions():
        return [text]
    if "{" in text or "*" in text or "?" in text:
        matches = glob(text).fullmatch
        names = [name for name in known if matches(name)]
        if names:
            return names
    list_them = _LIST.format(path=host or "(root)")
    if is_attribute(text):
        raise SelectionError(
            f"{text!r} in '{host}@{text}' is an attribute of tensors, and no function that is"
            f" called.\nSelect a function that uses it.{list_them}"
        )
    near = close_names(text, [*PARTS])
    close = f" Did you mean {', '.join(repr(f'{host}@{name}') for name in near)}?" if near else ""
    raise SelectionError(
        f"torch has no function {text!r}, as '{host}@{text}' asks for.{close}{list_them}"
    )


def refuse_exported(node: ModuleNode) -> None:
    """Refuse the operations of an exported program.

    Raises:
        SelectionError: the module runs a graph of `torch.ops`, which no name of torch stands for.
    """
    if is_exported(node.module):
        raise SelectionError(
            f"{path_text(node.path)} is an exported program: it calls torch.ops, and none of the"
            " functions that selectors name."
            "\nSelect the operations of the model, before torch.export."
        )
