"""Load a model from `path/to/file.py:FACTORY` or `package.module:FACTORY`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from torch import nn

from hookline.errors import ModelError
from hookline.models.loaded_model import LoadedModel
from hookline.models.packages import error_in_short
from hookline.models.preprocessing import guess_preprocess
from hookline.util.local_paths import is_file, names_in, printable, why_no_file

_N_NAMES_LISTED = 8


def load_file_factory(file: str, factory: str) -> LoadedModel:
    """Run a Python file and call its factory, a function that returns a model.

        >>> load_file_factory("nets/tiny.py", "make").name
        'nets/tiny.py:make'

    Args:
        file: the path of the file. While it runs, it can import modules beside it.
        factory: the name of a function or class, called without arguments, or of a model.

    Returns:
        The model; `guess_preprocess` prepares its pictures.

    Raises:
        ModelError: the file or the name does not exist, running the file or calling the factory
            fails, or the result is not an `nn.Module`.
    """
    path = Path(os.path.expanduser(file))
    if not is_file(path):
        files = [name for name in names_in(path.parent) if name.endswith(".py")]
        close = difflib.get_close_matches(path.name, files, n=3, cutoff=0.7)
        hint = f"Did you mean {', '.join(close)}?" if close else "Give the path of a Python file."
        raise ModelError(f"the file {printable(path)} {why_no_file(path)}.\n{hint}")
    with _as_a_script(path.resolve().parent, str(file)):
        module = _run_file(path)
        return _call_factory(module, str(file), factory)


def load_module_factory(module_name: str, factory: str) -> LoadedModel:
    """Import a module and call its factory, a function that returns a model.

        >>> load_module_factory("torch.nn", "Identity").model
        Identity()

    Args:
        module_name: an importable module, also one in the current folder.
        factory: as for `load_file_factory`.

    Returns:
        The model; `guess_preprocess` prepares its pictures.

    Raises:
        ModelError: as for `load_file_factory`.
    """
    with _as_a_script(Path.cwd(), module_name):
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is not None and f"{module_name}.".startswith(f"{missing}."):
                raise ModelError(
                    f"{module_name}:{factory}: the module {missing!r} must be importable, and is"
                    " not.\nCheck the spelling, install it, or give the file:"
                    " path/to/file.py:FACTORY."
                ) from error
            fix = "Mend the module, or name another one."
            raise _load_error(f"the module {module_name} cannot be imported", error, fix) from error
        return _call_factory(module, module_name, factory)


def _run_file(path: Path) -> ModuleType:
    # dataclasses and pickle look the module up in sys.modules; the digest makes its name unique.
    digest = zlib.crc32(os.fsencode(path.resolve()))
    module_name = f"_hookline_{path.stem}_{digest:08x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} cannot be run as a Python file.\nGive a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        fix = "Mend the file."
        if isinstance(error, ImportError) and "no known parent package" in str(error):
            fix = "From the folder that holds its package, give package.module:FACTORY."
        raise _load_error(f"{path} cannot be run", error, fix) from error
    return module


def _call_factory(module: ModuleType, place: str, factory: str) -> LoadedModel:
    name = f"{place}:{factory}"
    product = getattr(module, factory, None)
    if product is None or not callable(product):
        raise _no_factory_error(module, place, factory)
    # The name may be a model itself; a class or a function is called.
    if not isinstance(product, nn.Module):
        try:
            product = product()
        except (Exception, SystemExit) as error:
            fix = "Give a function without arguments that returns an nn.Module."
            raise _load_error(f"{name}() without arguments failed", error, fix) from error
    if not isinstance(product, nn.Module):
        raise ModelError(
            f"{name} must return an nn.Module, got {type(product).__name__}.\n"
            "End the factory with `return model`."
        )
    return LoadedModel(name, product, guess_preprocess)


def _no_factory_error(module: ModuleType, place: str, factory: str) -> ModelError:
    public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
    names = [k for k in public if _is_defined_in(vars(module)[k], module)]
    # A package re-exports names that its __init__ imports; a single file does not.
    if hasattr(module, "__path__"):
        names = list(dict.fromkeys([*names, *public]))
    state = "cannot be called" if hasattr(module, factory) else "is not there"
    close = difflib.get_close_matches(factory, public, n=1)
    listed = ", ".join(names[:_N_NAMES_LISTED])
    if len(names) > _N_NAMES_LISTED:
        listed += f" and {len(names) - _N_NAMES_LISTED} more"
    return ModelError(
        f"{place}:{factory}: {factory} {state}.\n"
        + (f"Did you mean {close[0]}? " if close else "")
        + (f"Callable names: {listed}." if names else "It defines no function or class.")
    )


def _is_defined_in(value: object, module: ModuleType) -> bool:
    """Return whether a module defines a value itself; a model instance always counts as its own."""
    is_model = isinstance(value, nn.Module)
    return is_model or getattr(value, "__module__", "") == module.__name__


def _load_error(event: str, error: BaseException, fix: str) -> ModelError:
    """Return an error that says what failed, in which file and line, and how to mend it."""
    frames = traceback.extract_tb(error.__traceback__)
    # A call that does not fit the factory's signature fails here, not in the user's file.
    frame = frames[-1] if frames and frames[-1].filename != __file__ else None
    place = ""
    if frame is not None and not isinstance(error, SyntaxError):  # its text has file and line
        place = f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ModelError(f"{event}: {error_in_short(error)}{place}.\n{fix}")


@contextmanager
def _as_a_script(folder: Path, name: str) -> Iterator[None]:
    """Run code inside the block as `python file.py` does, without arguments.

    Its folder is first on `sys.path`. A change of the current folder ends with the block, since the
    caller's paths are relative to the one before.
    """
    entry, argv, here = str(folder), sys.argv, Path.cwd()
    sys.path.insert(0, entry)
    sys.argv = [name]
    try:
        yield
    finally:
        os.chdir(here)
        sys.argv = argv
        if entry in sys.path:
            sys.path.remove(entry)
