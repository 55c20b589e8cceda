"""Survey a pass for the rules: its readings in firing order, and the structure of its model."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from hookline.display.text import plural
from hookline.findings.tensor_reading import Reading

TIMES, DIVIDED = "\u00d7", "\u00f7"
_NUMBER = re.compile(r"\d+")
_LEAST_SERIES = 3
_LEAST_BLOCKS = 3
PLAIN_HOLDERS = ("Sequential", "ModuleList", "ModuleDict")  # no blocks of their own
# Modules that pass their input on, or whose zeros are meant.
_PASSING = re.compile(r"Identity|Dropout|DropPath|StochasticDepth|Flatten|Unflatten")
_ACTIVATIONS = re.compile(
    r"ReLU|GELU|SiLU|Swish|Mish|Sigmoid|sigmoid|Tanh|Softplus|ELU|Act\w*$|Softmax|Hardswish"
)
_NORMS = re.compile(r"Norm")


@final
@dataclass(frozen=True)
class Survey:
    """The readings of one pass in firing order, gradients in the order of the backward."""

    readings: Sequence[Reading]  # the readings
    # The type of each module of the model by path; empty if it is not known.
    modules: Mapping[str, str] = field(default_factory=dict)
    # The reason for each site that was selected and has no value, as path, port, reason.
    silent: Sequence[tuple[str, str, str]] = ()
    # The other paths of modules that are registered several times, by path.
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @functools.cached_property
    def outputs(self) -> list[Reading]:
        """The readings of outputs."""
        return [reading for reading in self.readings if reading.port == "output"]

    @functools.cached_property
    def inputs_and_outputs(self) -> list[Reading]:
        """The readings of inputs and outputs."""
        return [reading for reading in self.readings if reading.port in ("output", "input")]

    @functools.cached_property
    def gradients(self) -> list[Reading]:
        """The readings of gradients at modules and of parameters."""
        return [reading for reading in self.readings if reading.port.startswith("grad")]

    @functools.cached_property
    def containers(self) -> frozenset[str]:
        """The paths of the modules that hold others."""
        paths = [*self.modules, *(r.path for r in self.readings if r.port != "grad")]
        return frozenset(holder for path in paths for holder in ancestors_of(path))

    def is_leaf(self, reading: Reading) -> bool:
        """Tell whether a reading is of a module that holds no other."""
        return reading.path not in self.containers and bool(reading.path)

    @functools.cached_property
    def leaf_outputs(self) -> list[Reading]:
        """The floating outputs of modules that hold no other, in firing order."""
        return [r for r in self.outputs if self.is_leaf(r) and r.is_floating]

    @functools.cached_property
    def input_by_reading_id(self) -> dict[int, Reading]:
        """Map the identity of each leaf's reading to the reading of its input.

        It is the recorded input, else the leaf that fired before.
        """
        of_inputs = (r for r in self.readings if r.port == "input" and r.is_floating)
        inputs = {(reading.path, reading.call): reading for reading in of_inputs}
        earlier, previous = dict[int, Reading](), None
        for reading in self.leaf_outputs:
            source = inputs.get((reading.path, reading.call), previous)
            if source is not None:
                earlier[id(reading)] = source
            previous = reading
        return earlier

    def loop_key(self, reading: Reading) -> tuple[str, str, str]:
        """Return what the steps of a loop have in common: the site, and the module before it.

        A layer that a model calls at several places, such as an activation, follows several.
        """
        return reading.path, reading.leaf, self._previous_path_by_reading_id[id(reading)]

    @functools.cached_property
    def _previous_path_by_reading_id(self) -> dict[int, str]:
        """Map the identity of each leaf's reading to the path of the leaf that fired before."""
        before, paths = dict[int, str](), [""]
        for reading in self.leaf_outputs:
            if reading.path != paths[-1]:
                paths.append(reading.path)
            before[id(reading)] = paths[-2]
        return before

    @functools.cached_property
    def sibling_groups(self) -> list[list[Reading]]:
        """Groups of leaf outputs at the same place of repeated blocks, three or more, in order."""
        return self.group_siblings(self.leaf_outputs)

    def group_siblings(self, readings: Sequence[Reading]) -> list[list[Reading]]:
        """Group readings by their place in repeated blocks; groups of three or more."""
        groups: dict[tuple[str, ...], list[Reading]] = {}
        for reading in readings:
            template = template_of(reading.path)
            is_place = template.endswith("#") and self.is_leaf(reading)  # of a Sequential
            kind = reading.module_type if is_place else ""
            key = (template, reading.port, reading.leaf, str(reading.call), kind)
            groups.setdefault(key, []).append(reading)
        return [group for group in groups.values() if len(group) >= _LEAST_SERIES]

    @functools.cached_property
    def block_outputs(self) -> list[Reading]:
        """The outputs of the repeated blocks in firing order; empty without three of them.

        Of several groups of blocks the outermost one counts, then the longest. In a plain
        `nn.Sequential` the layers with weights are the blocks.
        """
        blocks: dict[str, Reading] = {}
        for reading in self.outputs:
            holds_others = reading.path in self.containers
            is_block = holds_others and self.modules.get(reading.path) not in PLAIN_HOLDERS
            if is_block and reading.is_floating:
                blocks.setdefault(reading.path, reading)
        outputs, places = list(blocks.values()), repeated_block_indices(list(blocks))
        if not places:
            layers = [reading for reading in self.leaf_outputs if is_weighted(reading)]
            plain = [
                row for row in self.group_siblings(layers) if template_of(row[0].path)[-1] == "#"
            ]
            return max(plain, key=len, default=[])
        return [outputs[place] for place in places]

    def leaf_outputs_inside(self, path: str) -> list[Reading]:
        """Return the leaf outputs inside a module, in firing order."""
        return [r for r in self.leaf_outputs if r.path.startswith(f"{path}.") or r.path == path]


def template_of(path: str) -> str:
    """Return a path with its numbers replaced, equal for the same places of repeated blocks.

    >>> template_of("h.3.attn.q_proj"), template_of("layer2.0.conv1"), template_of("net.4")
    ('h.#.attn.q_proj', 'layer#.#.conv1', 'net.#')
    """
    *holders, last = path.split(".")
    own = _NUMBER.sub("#", last) if last.isdecimal() or not holders else last
    return ".".join([*(_NUMBER.sub("#", holder) for holder in holders), own])


def repeated_block_indices(paths: Sequence[str]) -> list[int]:
    """Return the places of the paths of repeated blocks; none without at least three alike.

        >>> repeated_block_indices(["embed", "h.0", "h.1", "h.2", "head"])
        [1, 2, 3]
        >>> repeated_block_indices(["layers.layer_0", "layers.layer_1", "layers.layer_2"])
        [0, 1, 2]

    Of several groups of blocks the outermost one counts, then the longest.

    Args:
        paths: the paths of modules that hold others. Those of layers say less: `fc1` and `fc2` of a
            block are no repeated blocks.
    """
    groups: dict[str, list[int]] = {}
    for place, path in enumerate(paths):
        template = _NUMBER.sub("#", path)
        if template.endswith("#"):
            groups.setdefault(template, []).append(place)
    chosen = [group for group in groups.values() if len(group) >= _LEAST_BLOCKS]
    return min(chosen, key=lambda group: (paths[group[0]].count("."), -len(group)), default=[])


def are_first_blocks(paths: Iterable[str], siblings: Iterable[str]) -> bool:
    """Tell whether paths lie in the first of repeated blocks, which fine-tuning freezes.

    >>> weights = ["h.0.fc.weight", "h.1.fc.weight", "h.2.fc.weight"]
    >>> are_first_blocks(weights[:2], weights), are_first_blocks(weights[1:2], weights)
    (True, False)

    Args:
        paths: the paths.
        siblings: all paths at their places, theirs among them.
    """
    chosen = set(paths)
    is_chosen_by_place: dict[str, list[bool]] = {}
    for path in sorted(siblings, key=lambda path: [int(n) for n in _NUMBER.findall(path)]):
        is_chosen_by_place.setdefault(template_of(path), []).append(path in chosen)
    return all(row == sorted(row, reverse=True) for row in is_chosen_by_place.values())


def ancestors_of(path: str) -> list[str]:
    """Return the paths of the modules that hold a module, the root's left out.

    >>> ancestors_of("a.b.c")
    ['a', 'a.b']
    """
    parts = path.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts))]


def is_inside(path: str, holder: str) -> bool:
    """Tell whether a path is a module's or of a module inside it."""
    return not holder or path == holder or path.startswith(f"{holder}.")


def is_pass_through(module_type: str) -> bool:
    """Tell whether a type of module passes its input on, or has zeros on purpose."""
    return bool(_PASSING.search(module_type))


def is_activation(module_type: str) -> bool:
    """Tell whether a type of module is an activation function."""
    return bool(_ACTIVATIONS.search(module_type))


def is_norm(module_type: str) -> bool:
    """Tell whether a type of module normalises its input."""
    return bool(_NORMS.search(module_type))


def is_weighted(reading: Reading) -> bool:
    """Tell whether a reading is of a leaf with weights of its own, and no norm."""
    kind = reading.module_type
    return not (is_pass_through(kind) or is_activation(kind) or is_norm(kind) or "Pool" in kind)


def log_or_nan(number: float) -> float:
    """Return the natural logarithm; NaN of what has none."""
    return math.log(number) if 0 < number < math.inf else math.nan


def further_text(n: int, noun: str) -> str:
    """Say how many more follow.

    >>> further_text(1, "site"), further_text(2, "site"), further_text(0, "site")
    ('1 further site follows.', '2 further sites follow.', '')
    """
    return f"{plural(n, f'further {noun}')} follow{'s' if n == 1 else ''}." if n else ""


def kind_and_verb(logarithm: float) -> tuple[str, str]:
    """Name a change by the logarithm of its factor: the kind of finding, and the verb."""
    return ("exploding", "grows") if logarithm > 0 else ("vanishing", "shrinks")


def factor_text(logarithm: float) -> str:
    """Format the factor of a logarithm by a times sign, or by a division sign.

    >>> factor_text(math.log(120)) == f"{TIMES}120"
    True
    >>> factor_text(-math.log(33.4)) == f"{DIVIDED}33.4"
    True
    >>> factor_text(math.log(94_871)) == f"{TIMES}94,900"
    True
    """
    factor = f"{math.exp(min(abs(logarithm), 700.0)):.3g}"
    factor = f"{float(factor):,.0f}" if 1000 <= float(factor) < 1e6 else factor
    return f"{TIMES if logarithm >= 0 else DIVIDED}{factor}"
