"""Identify a model and a function, across processes and machines.

A model is its classes, its weights and its plain attributes. Code outside its classes, such as a
global function that `forward` calls, is not part of the identity.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypedDict, final

import numpy as np
import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from hookline.engine.provenance import Provenance, device_of, flags_here, versions_here
from hookline.engine.pytree import describe
from hookline.engine.pytree.tree import attributes, local_shards, parts_of_wrapper
from hookline.engine.torch_private.distributed import class_before_fsdp2, gather_full, is_dtensor
from hookline.engine.torch_private.modules import parts_of_sparse, wrapper_chain
from hookline.util.view_as_array import view_as_array

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_COMPILED = re.compile(r"\._orig_mod\b")  # of a path through a module that torch.compile wraps
_PLAIN_REPR: Any = object.__repr__
_N_DIGITS = 16  # of a fingerprint of code
_SAMPLED_BYTES = 2**20  # a larger tensor may be sampled
_N_BLOCKS = 64
_BLOCK_BYTES = _SAMPLED_BYTES // _N_BLOCKS
_MOST_SHOWN = 60  # characters of a plain attribute
_PLAIN = bool | int | float | complex | str | None


class Identity(TypedDict):
    """Identify a model.

    Args:
        type: the name of its class.
        structure: a fingerprint of the class and the `extra_repr` of each module.
        weights: a digest of parameters and buffers, with their names, shapes and dtypes.
        code: a fingerprint of each class of a module that is not torch's.
        attributes: numbers and texts that modules hold, by class and name: their text, or a
            fingerprint where instances differ.
    """

    type: str
    structure: str
    weights: str
    code: dict[str, str]
    attributes: dict[str, str]


def model_identity(model: nn.Module, *, whole: bool = False, sampled: bool = False) -> Identity:
    """Return fingerprints of a model's structure, weights and code, and its plain attributes.

    torch's wrappers do not count: a compiled model is the model that was compiled.

    Args:
        model: the model.
        whole: gather sharded weights, one at a time: a collective. The identity is then that of
            the same model in one process. False takes of them what this rank holds.
        sampled: read only 64 blocks of each tensor of more than 1 MiB.
    """
    model = wrapper_chain(model)[-1]
    kind = class_before_fsdp2(model)
    return {
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "structure": _short_digest(
            "\n".join(map(": ".join, _module_texts(model).items())).encode()
        ),
        "weights": _weights_digest(model, whole=whole, sampled=sampled),
        "code": _code_fingerprints(model),
        "attributes": _attribute_texts(model),
    }


def _module_texts(model: nn.Module) -> dict[str, str]:
    """Return class and `extra_repr` of each module, by its path."""
    # Not repr(model): it has the names of the classes that FSDP2 makes.
    return {
        path: f"{kind.__name__}({_ADDRESS.sub('', module.extra_repr())})"
        for path, module, kind in _modules_without_wrappers(model)
    }


def _modules_without_wrappers(model: nn.Module) -> list[tuple[str, nn.Module, type]]:
    """Return path, module and class, as if torch.compile had wrapped no module."""
    modules = dict(model.named_modules())
    kinds = map(class_before_fsdp2, modules.values())
    return [
        (_COMPILED.sub("", path), module, kind)
        for (path, module), kind in zip(modules.items(), kinds, strict=True)
        if kind.__name__ != "OptimizedModule"
    ]


def _weights_digest(model: nn.Module, *, whole: bool = False, sampled: bool = False) -> str:
    digest = xxh3_128()  # ten times as fast as sha256: weights are hashed at each start
    named = {
        _COMPILED.sub("", name): tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    for name in sorted(named):
        tensor = named[name].detach()
        tensor = gather_full(tensor) if whole and is_dtensor(tensor) else local_shards(tensor)
        digest.update(f"{name} {describe.in_words(tensor)}".encode())
        digest.update(_value_bytes(_sample_blocks(tensor) if sampled else tensor))
    for path, module, _ in _modules_without_wrappers(model):
        for name, value in vars(module).items():
            if _holds_packed_weights(value):
                digest.update(f"{path}.{name}".encode() + _value_bytes(value))
    return digest.hexdigest()


def _holds_packed_weights(value: Any) -> bool:
    """Tell whether it is an object of C++, in which torch's quantised modules hold weights."""
    return type(value) is torch.ScriptObject and hasattr(value, "__getstate__")


def _sample_blocks(tensor: Any) -> Any:
    """Return evenly spaced blocks of a large dense tensor, the first and the last included."""
    is_dense = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    if not is_dense or tensor.nbytes <= _SAMPLED_BYTES or not tensor.is_contiguous():
        return tensor
    flat, size = tensor.reshape(-1), _BLOCK_BYTES // tensor.element_size()
    last = flat.numel() - size
    starts = [last * block // (_N_BLOCKS - 1) for block in range(_N_BLOCKS)]
    return torch.cat([flat[start : start + size] for start in starts])


def _code_fingerprints(model: nn.Module) -> dict[str, str]:
    kinds = dict.fromkeys(map(class_before_fsdp2, model.modules()))
    parts = {kind: _short_digest(_class_bytes(kind)) for kind in kinds if not _is_torch_class(kind)}
    digests: dict[str, str] = {}
    for kind in sorted(parts, key=lambda kind: (kind.__qualname__, kind.__module__)):
        digests[kind.__qualname__] = digests.get(kind.__qualname__, "") + parts[kind]
    return digests


def _class_bytes(kind: type) -> bytes:
    """Return bytes of the code of a class's methods, inherited ones included."""
    parts = []
    for part in kind.__mro__:
        if part is object or _is_torch_class(part):
            continue
        for name, member in sorted(vars(part).items()):
            for function in _member_functions(member):
                parts.append(name.encode() + _identity_bytes(function.__code__, frozenset()))
            if isinstance(member, _PLAIN) and not name.startswith("__"):
                parts.append(f"{name}={member!r}".encode())
    return b"".join(b"%d:%b" % (len(part), part) for part in parts)


def _member_functions(member: Any) -> Iterator[FunctionType]:
    """Yield the functions of a member of a class, those that a decorator has wrapped included."""
    members = [member]
    if isinstance(member, property):
        members = [member.fget, member.fset]
    elif isinstance(member, staticmethod | classmethod):
        members = [member.__func__]
    elif isinstance(member, functools.cached_property | functools.partialmethod):
        members = [member.func]
    ids: set[int] = set()
    while members:
        part = members.pop()
        if isinstance(part, FunctionType) and id(part) not in ids:
            ids.add(id(part))
            yield part
            members += map(_cell_contents, part.__closure__ or ())


def _is_torch_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _attribute_texts(model: nn.Module) -> dict[str, str]:
    texts: dict[str, list[str]] = {}
    for _, module, kind in _modules_without_wrappers(model):
        for name, value in vars(module).items():
            if name != "training" and not name.startswith("_") and _is_plain(value):
                texts.setdefault(f"{kind.__qualname__}.{name}", []).append(repr(value))
    return {key: _text_or_digest(texts[key]) for key in sorted(texts)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(part, _PLAIN) for part in value)
    return isinstance(value, _PLAIN)


def _text_or_digest(texts: list[str]) -> str:
    if len(set(texts)) == 1 and len(texts[0]) <= _MOST_SHOWN:
        return texts[0]
    return f"fingerprint {_short_digest(repr(texts).encode())}"


def _value_bytes(tensor: Any) -> Any:
    if _holds_packed_weights(tensor):
        return _value_bytes(tensor.__getstate__())
    if isinstance(tensor, tuple | list):
        return b"".join(map(bytes, map(_value_bytes, tensor)))
    if not isinstance(tensor, Tensor):
        return repr(tensor).encode()
    if tensor.is_meta:
        return b""
    if tensor.layout is torch.sparse_coo and not tensor.is_coalesced():
        tensor = tensor.coalesce()
    parts = parts_of_sparse(tensor) or parts_of_wrapper(tensor)
    if parts:
        return _value_bytes(parts)
    if tensor.is_quantized:
        return _value_bytes(tensor.dequantize())
    try:
        flat = tensor.cpu().contiguous().reshape(-1)
        return view_as_array(flat.view(torch.uint8)).data
    except (RuntimeError, TypeError):  # a subclass: by its numbers
        return repr(tensor.tolist()).encode()


@final
@dataclass(frozen=True)
class RecordedModel:
    """Identify the model of a saved recording or of a run.

    Two recordings with equal fingerprints were saved with the same model. If the fingerprints
    differ, `structure`, `weights` and `code` show the part that differs. Hooks, edits, attributes
    of the modules, and functions that `forward` calls do not count.
    """

    type: str  # the name of the model's class, with its module
    structure: str  # a fingerprint of the class and the `extra_repr` of each module
    # A fingerprint of parameters and buffers, with their names, shapes and dtypes. In a distributed
    # job, of this rank's part. Of a tensor of more than 1 MiB, 64 evenly spaced blocks of 16 KiB
    # are read.
    weights: str
    # A fingerprint of the code of the modules' classes, torch's own left out. It depends on the
    # version of Python.
    code: str
    # The versions of hookline, Python and torch, and of timm, torchvision and transformers where
    # they were imported.
    versions: dict[str, str]
    # The devices of the model; empty if an older hookline wrote the folder.
    device: str = field(default="", compare=False)
    # Torch's settings that change numbers, as they were when the model was identified.
    flags: dict[str, str] = field(default_factory=dict, compare=False)
    # The class and arguments of each module, by its path, as `print(model)` writes them; empty if
    # an older hookline wrote the folder.
    modules: dict[str, str] = field(default_factory=dict, compare=False)
    # True if a parameter or buffer was a DTensor, so that `weights` are of a part.
    sharded: bool = field(default=False, compare=False)

    @property
    def provenance(self) -> Provenance:
        """Return the fields that say where values come from."""
        return Provenance(self.versions, self.device, self.fingerprint, self.flags)

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of structure, weights and code: 16 hexadecimal digits."""
        return _short_digest(
            "\n".join((self.type, self.structure, self.weights, self.code)).encode()
        )

    def as_json(self) -> dict[str, Any]:
        """Return the fields as `from_json` reads them."""
        return asdict(self)

    @staticmethod
    def from_json(row: Any) -> RecordedModel | None:
        """Read the fields that `as_json` returned; None for None.

        Raises:
            KeyError, TypeError, AttributeError: it is something else.
        """
        if row is None:
            return None
        versions = {str(name): str(text) for name, text in row["versions"].items()}
        kind, structure, weights, code = (
            str(row[key]) for key in ("type", "structure", "weights", "code")
        )
        # hookline before 0.2.0 wrote no device, no flags and no modules
        flags, modules = (
            {str(name): str(text) for name, text in row.get(key, {}).items()}
            for key in ("flags", "modules")
        )
        device, sharded = str(row.get("device", "")), row.get("sharded") is True
        return RecordedModel(
            kind, structure, weights, code, versions, device, flags, modules, sharded
        )


def recorded_model(model: nn.Module) -> RecordedModel | None:
    """Identify a model, without torch's wrappers around it; None if its weights cannot be read.

    Args:
        model: the model.
    """
    try:
        identity = model_identity(model, sampled=True)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # such as lazy parameters
        return None
    code = _short_digest(repr(identity["code"]).encode())
    return RecordedModel(
        identity["type"], identity["structure"], identity["weights"], code, versions_here(),
        device_of(model), flags_here(), _module_texts(wrapper_chain(model)[-1]),
        any(map(is_dtensor, (*model.parameters(), *model.buffers()))),
    )  # fmt: skip


def function_identity(function: Callable[..., Any] | None) -> str | None:
    """Return a fingerprint of a function: its name, code, constants, defaults and closure.

    The same source gives the same fingerprint in another process, and inside another function.
    Functions that it calls by name are not part of it. The object of a method, and an object that
    is called, count by their attributes; by their repr where they have one of their own.
    """
    if function is None:
        return None
    name = getattr(function, "__qualname__", type(function).__qualname__)
    # Without the scope: the function that a call was moved into does not change what is computed.
    return f"{name.rpartition('.')[2]} {_short_digest(_identity_bytes(function, frozenset()))}"


def _identity_bytes(value: Any, within: frozenset[int]) -> bytes:
    """Return bytes that tell what a function does: of code what is executed, of data its values.

    Args:
        value: the function, or a part of it.
        within: the ids of what it is a part of: a function may close over itself.
    """
    if id(value) in within:
        return b"itself"
    inside = within | {id(value)}
    parts = [_identity_bytes(part, inside) for part in _identity_parts(value)]
    if isinstance(value, set | frozenset):
        parts.sort()  # their order differs between processes
    # The lengths keep neighbours apart: (1, 23) is not (12, 3).
    return b"".join(b"%d:%b" % (len(part), part) for part in [_own_bytes(value), *parts])


def _identity_parts(value: Any) -> Iterator[Any]:
    """Yield the parts of a function, a container or an object."""
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, sorted(value.keywords.items()))
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
        yield from map(_cell_contents, value.__closure__ or ())
    elif isinstance(value, CodeType):
        yield from (value.co_names, value.co_varnames, value.co_consts)
    elif isinstance(value, tuple | list | set | frozenset):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.items()
    elif type(value).__repr__ is _PLAIN_REPR:
        yield from attributes(value) or ()


def _own_bytes(value: Any) -> bytes:
    """Return bytes that tell a value from others of equal parts."""
    kind = type(value).__qualname__.encode()
    if isinstance(value, CodeType):
        return value.co_code
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}".encode() + bytes(_value_bytes(value.detach()))
    if isinstance(value, np.ndarray) and value.dtype != object:  # the repr of a long one has "..."
        return f"{value.dtype} {value.shape}".encode() + value.tobytes()
    if isinstance(value, nn.Module):
        return f"{_weights_digest(value)} {_ADDRESS.sub('', repr(value))}".encode()
    has_parts = isinstance(value, tuple | list | set | frozenset | Mapping | functools.partial)
    if has_parts or isinstance(value, FunctionType | MethodType):
        return kind
    return kind + _ADDRESS.sub("", repr(value)).encode("utf-8", "backslashreplace")


def _cell_contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return "an empty cell"


def _short_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_N_DIGITS]
