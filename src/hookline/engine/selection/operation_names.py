"""The names of operations in selectors, and messages for names that cannot be selected."""

from __future__ import annotations

import difflib

from hookline.engine.function_names import functions_by_name, is_tensor_attribute
from hookline.engine.operations.attention_parts import PARTS
from hookline.engine.selection.module_tree import ModuleNode
from hookline.engine.selection.site import glob_to_regex, path_text
from hookline.engine.torch_private.graph.function_modes import is_exported
from hookline.engine.torch_private.modules import is_scripted
from hookline.errors import AttachError, SelectionError


def operation_names(text: str, host: str) -> list[str]:
    """Return the names of operations that the text after the `@` stands for.

    Args:
        text: a name; or several, as in `{softmax,matmul}`.
        host: the text before the `@`, for messages.

    Raises:
        SelectionError: torch has no such function.
    """
    known = [*PARTS, *functions_by_name()]
    if text in known:
        return [text]
    if "{" in text or "*" in text or "?" in text:
        matches = glob_to_regex(text).fullmatch
        if names := [name for name in known if matches(name)]:
            return names
    list_them = f"\nhl.operations(model, x, {host or '(root)'!r}) lists what a module calls."
    if is_tensor_attribute(text):
        raise SelectionError(
            f"{text!r} in '{host}@{text}' is an attribute of tensors, and no function that is"
            f" called.\nSelect a function that uses it.{list_them}"
        )
    bare = _selector_name(text)
    near = [bare] if bare in known else difflib.get_close_matches(bare, known, n=4)
    if "." in text and bare not in known:
        raise SelectionError(
            f"{text!r} in '{host}@{text}' must be the name of a function of torch, without its"
            f" module; operators of torch.ops cannot be selected.{list_them}"
        )
    close = f" Did you mean {', '.join(repr(f'{host}@{name}') for name in near)}?" if near else ""
    raise SelectionError(
        f"torch has no function {text!r}, as '{host}@{text}' asks for.{close}{list_them}"
    )


def _selector_name(text: str) -> str:
    """Return the name of a function as selectors write it, from how code writes it."""
    name = text.strip().rpartition(".")[2]
    is_operator = name.startswith("__") and name.endswith("__")
    return name.strip("_") if is_operator else name


def refuse_exported(node: ModuleNode) -> None:
    """Refuse the operations of a module that calls no function of torch by its name.

    Raises:
        SelectionError: the module is an exported program.
        AttachError: it is scripted.
    """
    path = path_text(node.path)
    if is_exported(node.module):
        raise SelectionError(
            f"{path} is an exported program: it calls torch.ops, and none of the functions that"
            " selectors name.\nSelect the operations of the model, before torch.export."
        )
    if is_scripted(node.module):
        raise AttachError(
            f"{path} is a ScriptModule: it runs in C++, where no hook sees its calls.\nSelect the"
            " operations of the model, before torch.jit.script; or a module around it."
        )
