"""Find where an edit applies: the step of `generate`, the tokens of a value, the call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.rnn import PackedSequence

from hookline.display.text import plural
from hookline.engine import PARTS, ArgumentBinder, Pass, Site, path_text
from hookline.engine.pytree import describe, leaves, tree
from hookline.errors import AttachError, StructureError
from hookline.verbs.edit.compiled_edits import change_token_columns, refuse_compiled
from hookline.verbs.edit.indices import Indices
from hookline.verbs.edit.tokens import (
    PassTokens,
    Tokens,
    add_trailing_dims,
    read_tokens,
    tokens_by_column,
)
from hookline.verbs.shared.enclosing_generate import (
    PromptChunk,
    is_assisted,
    is_continuous,
    prefill_chunk,
)
from hookline.verbs.shared.root_call import root_call
from hookline.verbs.shared.token_inputs import find_cache, n_cached_tokens

# Why compiled code cannot tell the tokens where no run of the root has begun.
_OUTSIDE = "it runs outside a run of the edited model"
# Parts of attention that hold the tokens of the cache, too, in the last dimension but one.
_OF_ALL_KEYS = ("@k", "@v")
_OF_ATTENTION = tuple(f"@{part}" for part in PARTS)  # with heads in dimension 1, or without


class PassAndCall(NamedTuple):
    """Which call of a module, in which pass, as a recording counts: failed passes are left out."""

    # The number of earlier passes; for an input or output, of those in which the site fired.
    number: int
    call: int  # the number of the module's call in the pass
    is_assisted: bool = False  # whether a run has another number of tokens than a step


@final
@dataclass(slots=True, eq=False)
class EditedPass:
    """One pass of an edited model."""

    # The number of earlier passes that a run of the root began, without failed ones; None if no run
    # of the root is known.
    number: int | None = None
    step: int | None = None  # the step of `generate`, 0 for the prompt; None likewise
    # The tokens of the pass; None if the root's inputs are not known.
    tokens: PassTokens | None = None
    is_assisted: bool = False  # whether it is one of assisted decoding
    # Whether the pass ended by an exception; known when the next pass begins.
    has_failed: bool = False
    # The number of this pass for each site, as in `PassAndCall`.
    numbers: dict[Any, int] = field(default_factory=dict)


class _Thread(threading.local):
    """The latest pass of a thread that a run of the root began."""

    latest: tuple[Pass, EditedPass] | None = None


@final
class EditLimits:
    """The steps and tokens to which a line limits its edits.

    Args:
        at: the chosen tokens; None for all.
        steps: the chosen steps; None for all.

    Attributes:
        why_not_compiled: why compiled code cannot apply `at` in this pass; empty if it can.
            Compiled code reads it, and so compiles again when it changes.
        n_tokens: the number of tokens that compiled code must find; None if it is not known. Each
            other number compiles again.
    """

    def __init__(self, at: Indices | None, steps: Indices | None) -> None:
        self.at = at
        self.steps = steps
        self.why_not_compiled: str = _OUTSIDE
        self.n_tokens: int | None = None
        # What tells no token where a run takes several new ones.
        is_from_end = at is not None and at.counts_from_end
        self._refused = "steps" if steps is not None else str(at) if is_from_end else ""
        # Whether it is noted which positions occur: not if all values are of compiled code, and
        # the inputs do not tell the tokens.
        self._is_noted = False
        self._root: Callable[[], nn.Module | None] = lambda: None
        self._arguments = ArgumentBinder()
        self._thread = _Thread()
        self._of_pass: weakref.WeakKeyDictionary[Pass, EditedPass] = weakref.WeakKeyDictionary()
        self._of_region: weakref.WeakKeyDictionary[Any, EditedPass] = weakref.WeakKeyDictionary()

    @property
    def is_limited(self) -> bool:
        """Tell whether the edits leave out tokens or steps."""
        return self.at is not None or self.steps is not None

    def set_root(self, root: nn.Module) -> None:
        """Set the root, whose inputs tell the tokens."""
        self._root = weakref.ref(root)

    def begin_pass(self, current: Pass, frame: FrameType) -> None:
        """Note what the root is called with, when a pass begins."""
        root = self._root()
        assisted = is_assisted(frame)
        if assisted and self._refused:
            raise AttachError(
                f"{self._refused} must not be given in assisted decoding, where one run takes"
                " several drafted tokens, and some of them are dropped again."
                "\nGive at= with positions from the start, such as at=slice(prompt_length, None);"
                " or generate without an assistant."
            )
        if self.steps is not None and is_continuous(frame):
            raise AttachError(
                "steps must not be given in continuous batching (generate_batch), where one run"
                " takes prompts and new tokens of several requests.\nCall generate."
            )
        chunk = prefill_chunk(frame) if self._refused else PromptChunk()
        call = None if root is None else root_call(frame, root)
        inputs: dict[str, Any] = {}
        if call is not None:
            bound = self._arguments.bind(call.root, call.args, call.kwargs)
            inputs = call.kwargs or {"": bound} if isinstance(bound, Tensor) else bound
        number, step = self._next_pass_and_step(
            chunk, is_prompt=n_cached_tokens(find_cache(inputs)) == 0
        )
        # Compiled code cannot note which steps and positions have occurred.
        is_chosen = self.steps is None or self.steps.match_step(step)
        if self.at is not None and self.at.counts_from_end and is_chosen and not chunk.is_whole:
            raise AttachError(
                f"{self.at} must not be given for a prompt in chunks (prefill_chunk_size), where a"
                " run does not know how long the prompt is.\nGive at= with positions from the"
                " start, such as at=prompt_length - 1; or leave out the prompt:"
                " steps=slice(1, None)."
            )
        is_known = call is not None and self.at is not None and is_chosen
        tokens = read_tokens(inputs) if is_known else None
        edited = EditedPass(number, step, tokens, is_assisted=assisted)
        self._of_pass[current] = edited
        self._thread.latest = current, edited
        if self.at is not None:
            self._choose_tokens(self.at, edited)
            current.at_end.append(self._reset_compiled_tokens)

    def _next_pass_and_step(self, chunk: PromptChunk, *, is_prompt: bool) -> tuple[int, int]:
        """Return the number and the step of a pass that begins; chunks of a prompt are one step."""
        if self._thread.latest is None:
            return 0, 0
        before, edited = self._thread.latest
        edited.has_failed = bool(before.failed)
        number, step = edited.number or 0, edited.step or 0
        if not edited.has_failed:
            number, step = number + 1, step + chunk.is_first
        return number, 0 if is_prompt else step

    def _reset_compiled_tokens(self) -> None:
        """Say that compiled code knows no tokens: the pass of the root has ended."""
        self.why_not_compiled = _OUTSIDE

    def _choose_tokens(self, at: Indices, edited: EditedPass) -> None:
        """Choose the tokens of a pass, and note whether compiled code can."""
        self.why_not_compiled, self.n_tokens = "", None
        if edited.tokens is None:
            self.why_not_compiled = "the inputs of the model are not known"
            return
        for tokens in filter(None, edited.tokens):
            self._is_noted = True
            tokens.chosen_mask(at)
            self.n_tokens = tokens.positions.shape[1]
            if not tokens.is_numbered_by_column or edited.tokens.decoder is not None:
                self.why_not_compiled = "the model has padding, a cache or two stacks"

    def edited_pass(self, current: Pass) -> EditedPass:
        """Return what is known of a pass; of a recomputation, that of the first run."""
        again = current.recomputation
        edited = self._of_pass.get(current) if again is None else self._of_region.get(again.region)
        if edited is None:
            edited = self._of_pass[current] = EditedPass()
            latest = self._thread.latest
            if latest is not None:
                latest[1].has_failed = bool(latest[0].failed)
        if current.region is not None and current.region is not again:
            self._of_region[current.region] = edited
        return edited

    def mask_of_columns(self, at: Indices, value: Tensor) -> Tensor:
        """Choose from the columns of a value, where the inputs do not tell the tokens."""
        self._is_noted = True
        return tokens_by_column(1, value.shape[1]).chosen_mask(at)

    def unmet_text(self) -> str | None:
        """Say which of the chosen numbers have not occurred; None if all have."""
        at = self.at if self._is_noted else None
        steps = None if self._thread.latest is None else self.steps
        texts = [
            text for given in (at, steps) if given is not None and (text := given.unmet_text())
        ]
        if not texts:
            return None
        return (
            f"hl.edit never met {' and '.join(texts)}: no run in the block had it."
            "\nPositions count the tokens of each row from 0, without padding; steps count the runs"
            " of the model."
        )


@final
class SiteEditLimits:
    """The steps and tokens to which the edit of one site is limited.

    Args:
        limits: the limits of the line.
        site: the site.
        wants_pass_and_call: whether the change is called with its pass and call, too.
    """

    __slots__ = ("_last", "_limits", "_number", "_site", "_where", "wants_pass_and_call")
    traced = None  # as a key of `Pass.calls`, it is no tap that compiled code calls

    def __init__(self, limits: EditLimits, site: Site, *, wants_pass_and_call: bool) -> None:
        self._limits = limits
        self._site = site
        self._where = str(site)
        self.wants_pass_and_call: bool = wants_pass_and_call
        self._last: EditedPass | None = None
        self._number = 0

    def apply(
        self, change: Callable[..., Any], current: Pass, value: Any, call: int | None = None
    ) -> Any:
        """Call the change with a value, and put the result at the chosen tokens.

        Args:
            change: called with the value, and with its pass and call if it wants them.
            current: the pass.
            value: the value.
            call: the number of the module's call, if it is known.

        Returns:
            The new value; None if the value stays as it is.
        """
        if is_dynamo_compiling():
            return self._apply_in_graph(change, value)
        limits = self._limits
        edited = limits.edited_pass(current)
        extra = (
            {"pass_and_call": self._next_pass_and_call(current, edited, call)}
            if self.wants_pass_and_call
            else {}
        )
        if limits.steps is not None and not limits.steps.match_step(self._require_step(edited)):
            return None
        if limits.at is None:
            return change(value, **extra)
        parts = (value, *value) if type(value) is tuple else (value,)
        if any(isinstance(part, PackedSequence) for part in parts):
            raise self._no_tokens_error("a PackedSequence, in which rows alternate")
        masks: dict[tree.Leaf, Tensor] = {}
        for leaf, part in tree.tensors(value):
            masks[leaf] = self._token_mask(limits.at, edited, part, next(iter(masks), None))
        if not masks:
            raise self._no_tokens_error(describe.in_words(value))
        if not any(mask.any() for mask in masks.values()):
            return None
        new = change(value, **extra)
        if new is None or describe.difference(value, new):
            return new  # which is refused
        return _merge_masked(value, new, masks, self._where)

    def _require_step(self, edited: EditedPass) -> int:
        if edited.step is None:
            raise self._outside_run_error("steps")
        return edited.step

    def _next_pass_and_call(
        self, current: Pass, edited: EditedPass, call: int | None
    ) -> PassAndCall:
        """Count this call of the site, and return its number with that of the pass.

        Gradients arrive in another order than their passes begin, so their passes count.
        """
        if call is not None:
            if edited.number is None:
                raise self._outside_run_error("a recording")
            return PassAndCall(edited.number, call, edited.is_assisted)
        if self not in edited.numbers:
            if self._last is not None and not self._last.has_failed:
                self._number += 1
            self._last = edited
            edited.numbers[self] = self._number
        call = self._site.call
        if call is None:
            call = current.calls.get(self, 0)
            current.calls[self] = call + 1
        return PassAndCall(edited.numbers[self], call, edited.is_assisted)

    # -- tokens ---------------------------------------------------------------------------------

    def _token_mask(
        self, at: Indices, edited: EditedPass, value: Tensor, fitting: tree.Leaf | None
    ) -> Tensor:
        """Return a mask of the chosen tokens that broadcasts to a value.

        Args:
            at: chooses the tokens.
            edited: the pass.
            value: the value, or a part of one.
            fitting: another part of it, which holds the tokens; None if none is known.
        """
        if edited.tokens is None:
            raise self._outside_run_error("at")
        tokens = self._tokens_of_own_stack(edited.tokens, value)
        if tokens is None:
            if value.dim() > 3 and self._site.path.endswith(_OF_ATTENTION):
                raise self._no_tokens_error(f"{describe.in_words(value)}, with heads")
            if value.is_nested or value.dim() < 3:
                raise self._no_tokens_error(describe.in_words(value))
            return add_trailing_dims(self._limits.mask_of_columns(at, value), value)
        # An expert gets the tokens that chose it, in the order of their choices.
        in_order = "experts" not in self._site.path.split(".")[:-1]
        mask = tokens.broadcast_mask(value, at, in_order=in_order)
        if self._site.path.endswith(_OF_ALL_KEYS):  # which may be as many heads as tokens
            is_clear = value.dim() < 4 and value.shape[-2] == tokens.positions.shape[1]
            mask = mask if is_clear else None
        if mask is None:
            raise self._no_tokens_error(describe.in_words(value), tokens, fitting, value.shape[1:2])
        return mask

    def _tokens_of_own_stack(self, tokens: PassTokens, value: Tensor) -> Tokens | None:
        """Return the tokens of the stack that the site is in."""
        if tokens.decoder is None:
            return tokens.main
        names = self._site.path.split(".")
        if "decoder" in names:
            return tokens.decoder
        if "encoder" in names:
            return tokens.main
        fits = [
            stack
            for stack in tokens
            if stack is not None and value.dim() > 1 and value.shape[1] == stack.positions.shape[1]
        ]
        if len(fits) != 1:
            raise self._no_tokens_error(describe.in_words(value))
        return fits[0]

    def _apply_in_graph(self, change: Callable[..., Any], value: Any) -> Any:
        limits, where = self._limits, self._where
        if limits.steps is not None:
            refuse_compiled("steps=", where, "it cannot tell the run of the model")
        if limits.at is None:
            return change(value)
        if limits.why_not_compiled:
            refuse_compiled("at=", where, limits.why_not_compiled)
        return change_token_columns(limits.at, change, value, where, limits.n_tokens)

    def refuse_compiled_gradient(self) -> None:
        """Refuse a change of a gradient in compiled code."""
        refuse_compiled("at=, steps= or a recording", self._where, "its backward has no pass")

    def _outside_run_error(self, name: str) -> AttachError:
        return AttachError(
            f"{name} needs a run of the edited model, but {path_text(self._site.path)} ran outside"
            " of one.\nGive hl.edit the module that is called, such as"
            " hl.edit(model.encoder, ...)."
        )

    def _no_tokens_error(
        self,
        got: str,
        tokens: Tokens | None = None,
        fitting: tree.Leaf | None = None,
        columns: tuple[int, ...] = (),
    ) -> StructureError:
        sizes = None if tokens is None else [*tokens.positions.shape]
        wanted = "3 dimensions or more" if sizes is None else f"{sizes} as first dimensions"
        n_kept = None if tokens is None else tokens.n_kept
        hint = "Select such a value, or give hl.edit a function that changes a part of it."
        if fitting is not None:
            part = replace(self._site, leaf=(*self._site.leaf, *fitting))
            hint = f"Select the part that holds them: {str(part)!r}."
        elif self._site.path.endswith(_OF_ATTENTION):
            hint = (
                "Where heads come first, give hl.edit a function that changes a part, such as"
                " t[:, head, position], or select attn_heads of hl.anatomy."
            )
        elif n_kept is not None and columns == (n_kept,):
            hint = (
                f"With logits_to_keep={n_kept}, as in generate, the head gets the last"
                f" {plural(n_kept, 'token')} alone: leave out at=, or select what comes before it."
            )
        return StructureError(
            f"at needs a value at {self._site} whose dimension 1 holds the tokens ({wanted}), got"
            f" {got}.\n{hint}"
        )


def _merge_masked(value: Any, new: Any, masks: Mapping[tree.Leaf, Tensor], where: str) -> Any:
    """Return a value with the new tensors where their masks are true."""
    result = new
    for leaf, mask in masks.items():
        old, now = leaves.get(value, leaf, where), leaves.get(new, leaf, where)
        merged = torch.where(mask.to(old.device), now, old)
        result = leaves.put(result, leaf, merged, where) if leaf else merged
    return result
