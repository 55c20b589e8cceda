"""Say in the words of the command line what an error of a verb advises in Python's."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from typing import Any

# The parameters of verbs that are options of commands, with what stands for a value in Python.
_OPTIONS = {
    "names": "THEIRS=OURS", "dims": "SITES=DIM", "floor": "DIR", "tokens": "FILE", "only": "CHECK",
    "backend": "NAME",
}  # fmt: skip
# The verbs that are commands, and the names of their arguments in advice.
_COMMANDS = "anatomy|doctor|invariance|inventory|operations|profile|summary"
_ARGUMENTS = {"model": "MODEL", "x": "INPUT", "inputs": "INPUT", "batch": "INPUT"}

_NAME = "|".join(_OPTIONS)
_CALL = re.compile(rf"\bhl\.({_COMMANDS})\(([^()]*)\)")
_SUBJECT = re.compile(rf"\A({_NAME}) must ")
# Not within a call of Python, where another argument stands before it, nor within a path, which
# may begin a message or a quotation.
_OPTION = re.compile(
    rf"(?!\A)(?<!, )(?<![\w(./'\"-])({_NAME})="
    r"(\{[^{}]*\}|\((?:[^()]|\([^()]*\))*\)|'[^']*'|\"[^\"]*\"|-?\w+(?:\.\w+)*(?:\([^()]*\))?)"
    r"(?![\w/]|\.\w)"
)
# What messages say in Python's words, where … is any text, and what stands for it.
PHRASES = {
    "two curves or two dicts of arrays": "two trainings or two files of arrays",
    "; texts of your own are given as a list: ['first', 'second']": "",
    "a dict is given as keyword arguments, and the model's forward refuses them":
        "the model's forward refuses the names of these arrays",
    "Give a dict that is one argument in a tuple: …":
        "Give one array, or a file of arrays by the names that it takes.",
    "Give its arguments as a tuple, or by name in a dict.":
        "Give a file of arrays by these names, .npz or .safetensors.",
    "tokenize must convert the texts of … to tensors, got…":
        r"the texts of \1 need a tokenizer, and the model has none."
        "\nGive a model with one, such as hf:NAME, or a file of arrays.",
}  # fmt: skip


def python_to_commands(text: str) -> str:
    """Write a message with commands and options in place of calls and arguments of Python.

    >>> python_to_commands("names must be names of a.\\nGive names={'p': 'x'}.")
    '--names must be names of a.\\nGive --names p=x.'
    >>> python_to_commands("Write hl.anatomy(model, x).")
    'Write hookline anatomy MODEL INPUT.'
    """
    for phrase, words in PHRASES.items():
        text = re.sub(re.escape(phrase).replace("…", "(.+)"), words, text, flags=re.DOTALL)
    text = _CALL.sub(_command_text, text)
    text = _SUBJECT.sub(r"--\1 must ", text)
    return _OPTION.sub(_option_text, text)


def _command_text(call: re.Match[str]) -> str:
    given = [word for word in call[2].split(", ") if word]
    words = [_ARGUMENTS.get(word) or shlex.quote(word.strip("'\"")) for word in given]
    command = "hooks" if call[1] == "inventory" else call[1]
    if call[1] == "doctor" and len(words) > 2:
        words.insert(2, "--at")
    return " ".join(["hookline", command, *words])


def _option_text(argument: re.Match[str]) -> str:
    name, value = argument[1], argument[2]
    try:
        words = _option_values(ast.literal_eval(value))
    except (ValueError, SyntaxError):
        words = [_OPTIONS[name]]
    return " ".join(f"--{name} {word}" for word in words)


def _option_values(value: Any) -> list[str]:
    """Return the words of an option's values; one word for each use of the option.

    Raises:
        ValueError: the command line has no words for the value.
    """
    if isinstance(value, Mapping):
        return [shlex.quote(f"{key}={part}") for key, part in value.items()]
    if isinstance(value, list | tuple):
        raise ValueError
    return [shlex.quote(str(value))]
