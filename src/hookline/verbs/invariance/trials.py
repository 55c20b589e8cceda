"""Run a model on changed arguments, each time from the same state, and record it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch import nn

from hookline.display.text import first_line
from hookline.engine import Line
from hookline.recordings import Recording
from hookline.verbs.compare.compare import compare_with_unpaired
from hookline.verbs.compare.comparison import ComparedSite, Comparison
from hookline.verbs.invariance.batch import Batch, CheckNotApplicable
from hookline.verbs.record.record import start_recording
from hookline.verbs.shared.casting import cast_model
from hookline.verbs.shared.model_state import in_eval_mode, restore_after_run, restore_parameters
from hookline.verbs.shared.run_model import call_model, copy_inputs, sum_of_mean_squares
from hookline.verbs.shared.token_inputs import CACHES

_SITES = ["**", "(root):input"]


class Run(NamedTuple):
    """A recording, and the tokens of each of its passes."""

    recording: Recording  # the recording
    tokens: Any  # what `hl.compare` takes of this side; None for inputs without ids
    # How the sites begin of outputs that a pass is given, and hands on.
    given: str | tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Trials:
    """Runs of a model, each from the state in which the model is now."""

    model: nn.Module  # the model, which each run leaves as it was
    batch: Batch  # its arguments as given
    backend: str | Callable[..., Any] = "aot_eager"  # the backend of the compiled run
    eval_modules: tuple[nn.Module, ...] = ()  # modules that run in eval mode
    # Whether all other modules run in training mode; False leaves their own.
    is_training: bool = False
    # The recorded ports of modules; with gradients, each run has a backward.
    ports: tuple[str, ...] = ("output",)

    @cached_property
    def base_run(self) -> Run:
        """The run that the others are compared with."""
        return self.run(self.batch)

    def run(
        self,
        *batches: Batch,
        model: nn.Module | None = None,
        before: Callable[[], None] | None = None,
        tokens: Batch | None = None,
    ) -> Run:
        """Record a pass for each of some arguments.

        Args:
            batches: the arguments.
            model: the compiled model, or a copy; None runs the model itself.
            before: called before the passes, and not recorded.
            tokens: the arguments that tell the tokens, where these tell less.
        """

        def passes(root: nn.Module) -> None:
            for batch in batches:
                self._run_pass(root, batch)

        told = [(tokens or batch).token_inputs() for batch in batches]
        given = None if None in told else told if len(told) > 1 else told[0]
        return Run(self.record(passes, model, before), given)

    def record(
        self,
        passes: Callable[[nn.Module], None],
        model: nn.Module | None = None,
        before: Callable[[], None] | None = None,
    ) -> Recording:
        """Record what a function runs, from the state of the model, which is put back."""
        root = self.model if model is None else model
        has_gradients = "grad" in self.ports
        with ExitStack() as stack:
            for module in dict.fromkeys((self.model, root)):
                stack.enter_context(restore_after_run(module))
                is_training = self.is_training or any(part.training for part in module.modules())
                if is_training or before is not None:  # which trains, perhaps
                    stack.enter_context(restore_parameters(module))
            stack.enter_context(self._set_modes(root))
            stack.enter_context(torch.set_grad_enabled(has_gradients))
            if before is not None:
                before()
            line = Line(root, name="invariance", lenient=True)
            line.options.quiet = True  # modules that do not run are none of its business
            recorder = start_recording(line, _SITES, self.ports, {"copy": True})
            with recorder as recording:
                passes(root)
        recording.set_model(None)  # all are of one model, whose fingerprint would take the longest
        return recording

    def _set_modes(self, root: nn.Module) -> AbstractContextManager[None]:
        """Put the modules in their modes; `restore_after_run` puts them back."""
        for module in root.modules() if self.is_training else ():
            module.training = True
        eval_modules = self.eval_modules
        if root is not self.model:  # a copy, whose modules are in the same order
            resting_ids = set(map(id, eval_modules))
            both = zip(_unwrapped_modules(self.model), _unwrapped_modules(root), strict=True)
            eval_modules = tuple(other for module, other in both if id(module) in resting_ids)
        return in_eval_mode(eval_modules)

    def _run_pass(self, root: nn.Module, batch: Batch) -> None:
        output = call_model(root, copy_inputs(batch.inputs))
        if "grad" not in self.ports:
            return
        loss = sum_of_mean_squares(output)
        if loss is None:
            raise CheckNotApplicable("no output requires a gradient")
        torch.autograd.backward(loss)

    def copy_model(self, target: torch.dtype | torch.device) -> nn.Module:
        """Return a copy of the model in a dtype or on a device.

        Raises:
            CheckNotApplicable: it cannot be copied.
        """
        try:
            model = copy.deepcopy(self.model)
            if isinstance(target, torch.device):
                return model.to(target)
            return cast_model(model, target)
        except Exception as error:  # whatever a module's own copy raises
            raise CheckNotApplicable(f"the model cannot be copied: {first_line(error)}") from error


def _unwrapped_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model without the wrappers that torch.compile puts around them."""
    return [module for module in model.modules() if type(module).__name__ != "OptimizedModule"]


def compare_runs(run: Run, reference: Run) -> Comparison:
    """Compare a run with a reference; a result of one of the two alone is not comparable."""
    has_tokens = run.tokens is not None and reference.tokens is not None
    tokens = (run.tokens, reference.tokens) if has_tokens else "auto"
    comparison, alone = compare_with_unpaired(run.recording, reference.recording, tokens=tokens)
    rows = [
        ComparedSite(site, site, "not comparable", why=f"only in {name}")
        for name, sites in alone.items()
        for site in sites
        if is_model_result(site)
    ]
    made = [row for row in comparison.rows if not row.site.startswith(run.given)]
    return replace(comparison, rows=made + rows)


def is_model_result(site: str) -> bool:
    """Tell whether a site is an output of the model, but no cache, or a gradient."""
    if site.endswith(":grad"):
        return True
    is_output = site.startswith("(root)") and not site.startswith("(root):input")
    return is_output and not any(name in site.split(".") for name in CACHES)
