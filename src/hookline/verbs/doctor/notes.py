"""Facts about a model and its regime that matter to its hooks.

Each fact has a function, which yields no note if the fact does not apply.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hookline.display.text import name_without_torch, plural
from hookline.engine import ModuleNode, dynamo_config, is_compiled, may_have_compiled, path_text
from hookline.engine.report.known_faults import known_faults_here
from hookline.verbs.doctor.causes_of_silence import Facts, runs_differed
from hookline.verbs.doctor.diagnosis import Note, SiteVerdict
from hookline.verbs.doctor.observe import foreign_hooks
from hookline.verbs.inventory import inventory
from hookline.verbs.shared.refused_weights import execution_device

_N_SHOWN = 3
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
# Wrappers by the name of their class, because importing them would take a second.
_WRAPPED = {
    "DataParallel": Note(
        "DataParallel",
        "on several devices its replicas run in threads of their own, which a line sees only with"
        " every_thread=True",
        "hook model.module on one device, or use DistributedDataParallel",
    ),
    "FullyShardedDataParallel": Note(
        "sharded",
        "parameters and their gradients are flattened and sharded over processes; values of modules"
        " are whole",
        "to hook the gradients of parameters, shard by FSDP2's fully_shard",
    ),
    "CheckpointWrapper": Note(
        "checkpointing",
        "a CheckpointWrapper runs its module again in backward: a record holds the first run, an"
        " edit is applied in both",
        "call backward() inside the block",
    ),
}


def environment(model: nn.Module) -> dict[str, str]:
    """Return versions and modes, by name."""
    tensors = [*model.parameters(), *model.buffers()]
    modes = {module.training for module in model.modules()}
    grads = "inference mode" if torch.is_inference_mode_enabled() else "off (no_grad)"
    dynamo = "not loaded" if dynamo_config() is None else "loaded"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mode": "mixed" if len(modes) > 1 else "training" if model.training else "eval",
        "gradients": "on" if torch.is_grad_enabled() else grads,
        "autocast": _autocast_text(tensors),
        "parameters": ", ".join([*_distinct_names(t.device for t in tensors),
                                 *_distinct_names(p.dtype for p in model.parameters())]) or "none",
        "default device": str(torch.get_default_device()),
        "default dtype": name_without_torch(torch.get_default_dtype()),
        "dynamo": "has compiled code" if may_have_compiled() else dynamo,
    }  # fmt: skip


def notes(model: nn.Module, verdicts: list[SiteVerdict], facts: Facts) -> Iterator[Note]:
    """Yield all notes that apply."""
    for fault, version in known_faults_here():
        yield Note(fault.package, f"{version} {fault.wrong}", fault.fix)
    yield from _compiled(model)
    yield from _wrappers(model)
    yield from _checkpointing(model, facts)
    yield from _fast_path(facts)
    yield from _foreign_hooks(model, facts)
    yield from _modes(model)
    yield from _devices_and_dtypes(model)
    yield from _shared_modules(verdicts)
    yield from _recurrent_layers(facts.nodes)
    yield from _structured_outputs(verdicts, facts)
    yield from _backward_and_profiler(facts)
    why = runs_differed(facts)
    if why is not None:
        yield Note("the runs", why.why, why.remedy)


def _compiled(model: nn.Module) -> Iterator[Note]:
    compiled = [module for module in model.modules() if is_compiled(module)]
    if compiled:
        whole = is_compiled(model)
        subject = "the model is" if whole else f"{len(compiled)} of its modules are"
        yield Note(
            "compiled",
            f"{subject} compiled: lines work inside the graph, at the cost of one compilation for"
            " each kind; raw backward hooks (line.backward, line.backward_pre) do not",
            "for gradients, record or edit the ports 'fc:grad_output' and 'fc:grad_input'",
        )


def _wrappers(model: nn.Module) -> Iterator[Note]:
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    yield from (note for name, note in _WRAPPED.items() if name in kinds)
    sharded = sum(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    if sharded:
        yield Note(
            "sharded",
            f"{sharded} parameters are DTensors: a number computed from one may cover its local"
            " part only",
            "call .full_tensor() before .item(); use line.accumulated for complete gradients",
        )


def _checkpointing(model: nn.Module, facts: Facts) -> Iterator[Note]:
    flagged = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    if flagged and model.training:
        yield Note(
            "checkpointing",
            f"gradient_checkpointing is on in {plural(len(flagged), 'module')}, which run again in"
            " backward: a record holds the first run, an edit is applied in both",
            "call backward() inside the block",
        )
    if facts.run is not None and facts.run.is_reentrant:
        yield Note(
            "checkpointing",
            "a part of it is checkpointed with use_reentrant=True: in its first run values need no"
            " gradient, and its modules run again in backward",
            "use checkpoint(..., use_reentrant=False)",
        )


def _fast_path(facts: Facts) -> Iterator[Note]:
    fast = facts.observations.fast
    texts = [path_text(node.path) for node in facts.nodes if id(node.module) in fast]
    if texts:
        yield Note(
            "fast path",
            f"torch runs each of {_list_few(texts)} as one operation. A line on a module inside"
            " switches this off while it lasts, so the last bits of the numbers may differ",
            "call torch.backends.mha.set_fastpath_enabled(False) for the same numbers with and"
            " without a line",
        )


def _foreign_hooks(model: nn.Module, facts: Facts) -> Iterator[Note]:
    hooks = [hook for hook in inventory(model) if hook.owner not in ("hookline", "torch")]
    if hooks:
        texts = [f"{h.kind} {h.function} on {path_text(h.path)} ({h.owner})" for h in hooks]
        yield Note(
            "other hooks",
            f"{plural(len(hooks), 'hook')} of other code: {_list_few(texts)}",
            "expect values after these hooks; hl.inventory(model) lists them with file and line",
        )
    replacing = [
        f"{code.co_qualname} on {path_text(path)}"
        for path, _, code in foreign_hooks(facts.nodes)
        if code in facts.observations.replacing
    ]
    if replacing:
        yield Note(
            "other hooks",
            f"{_list_few(replacing)} returned a value, which replaces the module's output or input",
            "return None in that hook, if the replacement is not meant",
        )
    backward = [path_text(hook.path) for hook in hooks if hook.kind.startswith("backward")]
    in_place = [node.path for node in facts.nodes if getattr(node.module, "inplace", False) is True]
    if backward and in_place:
        yield Note(
            "other hooks",
            f"full backward hooks are on {_list_few(backward)}: torch raises if an in-place module"
            f" ({_list_few(in_place)}) gets the output of such a module",
            "use hl.attach(model), line.backward(...), or grad_output sites instead",
        )


def _modes(model: nn.Module) -> Iterator[Note]:
    modules = list(model.modules())
    training = [module for module in modules if module.training]
    uses_mode = any(isinstance(module, (*_DROPOUTS, *_BATCH_NORMS)) for module in modules)
    if uses_mode and training and len(training) < len(modules):
        yield Note(
            "mode",
            f"{len(training)} of {len(modules)} modules are in training mode, the others in eval",
            "call model.train() or model.eval() to set them all, unless this is meant",
        )
    drops = [m for m in training if isinstance(m, _DROPOUTS) and m.p]
    norms = [m for m in training if isinstance(m, _BATCH_NORMS)]
    parts = [f"{plural(len(drops), 'dropout')} at random"] * bool(drops)
    parts += [f"{plural(len(norms), 'batch norm')} on the batch's own statistics"] * bool(norms)
    if parts:
        yield Note(
            "training mode",
            f"{' and '.join(parts)}: values differ from those of eval mode",
            "call model.eval() for features; leave the mode to see values of training",
        )


def _devices_and_dtypes(model: nn.Module) -> Iterator[Note]:
    tensors = [*model.parameters(), *model.buffers()]
    devices = Counter(str(tensor.device) for tensor in tensors)
    if "meta" in devices and execution_device(model) is not None:
        yield Note(
            "offloaded",
            f"accelerate loads {plural(devices['meta'], 'tensor')} only while their modules run",
            "record what flows through modules; the weights hold no numbers between runs",
        )
    elif "meta" in devices:
        yield Note(
            "meta device",
            f"{plural(devices['meta'], 'tensor')} hold shapes alone, and no numbers",
            "load weights before you look at values: model.to_empty(device=...), load_state_dict",
        )
    elif len(devices) > 1:
        yield Note(
            "devices",
            f"parameters and buffers are on several: {_list_few(list(devices))}",
            "give hl.record(..., device='cpu') to keep values on one",
        )
    dtypes = Counter(
        name_without_torch(p.dtype) for p in model.parameters() if p.is_floating_point()
    )
    if len(dtypes) > 1:
        yield Note(
            "dtypes",
            "parameters are " + ", ".join(f"{name} ({n})" for name, n in dtypes.items()),
            "give hl.record(..., dtype=torch.float32) to keep values in one",
        )


def _shared_modules(verdicts: list[SiteVerdict]) -> Iterator[Note]:
    sites = {verdict.site.path: verdict.site for verdict in verdicts if verdict.site.aliases}
    if sites:
        texts = [f"{site.path} is also {', '.join(site.aliases[:2])}" for site in sites.values()]
        yield Note(
            "shared",
            f"{_list_few(texts)}: one module, so one site; its gradient is the sum over all uses",
            "select it by any of its paths; run.calls(path) tells the uses apart",
        )


def _recurrent_layers(nodes: list[ModuleNode]) -> Iterator[Note]:
    layers = [path_text(node.path) for node in nodes if isinstance(node.module, nn.RNNBase)]
    if layers:
        yield Note(
            "recurrent",
            f"the steps and gates of {_list_few(layers)} run inside one operation, so only the"
            " inputs and outputs of the whole are seen",
            "use a loop over nn.LSTMCell, GRUCell or RNNCell to see each step",
        )


def _structured_outputs(verdicts: list[SiteVerdict], facts: Facts) -> Iterator[Note]:
    values = facts.run.values if facts.run is not None else {}
    texts, example = [], ""
    for verdict in verdicts:
        site = verdict.site
        value = values.get((site.path, site.port))
        if site.port == "output" and value is not None and not (value.is_lone or site.leaf):
            texts.append(f"{path_text(site.path)} gives {value.form}")
            if value.dtype and "(Tensor" in value.form and not example:
                example = f"{path_text(site.path)}:output[0]"
    if texts:
        yield Note(
            "structures",
            f"{_list_few(texts)}: hl.edits and functions of one tensor do not take such a value",
            f"select a part, {example!r}" if example else "select a part of it by its keys",
        )


def _backward_and_profiler(facts: Facts) -> Iterator[Note]:
    run = facts.run
    if run is None:
        return
    if run.backward == "the sum of its outputs":
        yield Note(
            "backward",
            "run from the sum of the outputs, because no loss was given",
            "give a function for gradients of your loss:"
            " hl.doctor(model, lambda: loss(model(x)), ...)",
        )
    if not facts.observations.called and not run.failure and sys.getprofile() is not None:
        yield Note("profiler", "a profiler is on, so direct calls of .forward could not be seen",
                   "call hl.doctor without the profiler")  # fmt: skip


def _autocast_text(tensors: list[Any]) -> str:
    kinds = sorted({"cpu", *(tensor.device.type for tensor in tensors)} - {"meta"})
    on = filter(torch.is_autocast_enabled, kinds)
    return (
        ", ".join(f"{kind} {name_without_torch(torch.get_autocast_dtype(kind))}" for kind in on)
        or "off"
    )


def _distinct_names(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(name_without_torch(value) for value in values))


def _list_few(texts: list[str]) -> str:
    more = len(texts) - _N_SHOWN
    return ", ".join(texts[:_N_SHOWN]) + (f" and {more} more" if more > 0 else "")
