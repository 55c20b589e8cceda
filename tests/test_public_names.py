"""The public surface, frozen: a name that comes or goes is a decision, made here."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from fnmatch import fnmatch

import pytest
import torch
from torch import nn

import hookline as hl
import hookline.data
import hookline.models
from small_stores import write_store

# fmt: off
NAMES = [
    "EVERYWHERE", "AmbiguousError", "Anatomy", "AttachError", "Attribution", "CheckFinding",
    "ClassMaps", "Comparison", "Curves", "Diagnosis", "Finding", "Findings", "FolderError",
    "HooklineError", "HooklineWarning", "InputError", "Invariance", "Inventory", "Line",
    "ModelError", "NonFiniteError", "NotRecordedError", "Operations", "OverwrittenError", "Profile",
    "RanksError", "RawLine", "Recording", "Report", "Selection", "SelectionError", "Site",
    "SiteError", "Store", "StructureError", "Summary", "Sweep", "anatomy", "attach", "attribute",
    "by_query", "cam", "check", "clip", "compare", "doctor", "edit", "edits", "extract", "features",
    "invariance", "inventory", "monitor", "open", "operations", "plots", "profile", "record",
    "select", "shadow", "stats", "summary", "sweep", "watch", "write_page",
]
# fmt: on

SIGNATURES = {
    "anatomy": "(model, inputs=None)",
    "attach": "(model=None, *, every_thread=False)",
    "attribute": "(model, inputs, selector, metric, *, clean, each=None, **options)",
    "by_query": "(function)",
    "cam": "(model, inputs, layer=None, target=None, *, method='gradcam', reshape=None,"
    " batch_size=32, **others)",
    "check": "(model, *, also=(), keep=None, every_thread=False)",
    "clip": "(model, selector=None, *, norm=None, value=None, total_norm=None, norm_type=2.0,"
    " ports='grad', every_thread=False, **others)",
    "compare": "(a, b, *, names=None, floor=None, tokens='auto', dims=None)",
    "doctor": "(model, inputs=None, selector=None, *, ports='output')",
    "edit": "(model, selector, change=None, *, ports='output', at=None, steps=None,"
    " every_thread=False, **others)",
    "extract": "(model, data, selector, to, *, batch_size=None, resume=True, engine=None,"
    " **options)",
    "features": "(model, inputs, selector, *, eval=True, **options)",
    "invariance": "(model, inputs, *, only=None, backend='aot_eager')",
    "inventory": "(model)",
    "monitor": "(model, selector=None, *, ports=None, every=1, stats=None, to=None, scaler=None,"
    " every_thread=False, **others)",
    "open": "(folder, *, verify=False)",
    "operations": "(model, inputs, path='')",
    "profile": "(model, *, flops=True, every_thread=False)",
    "record": "(model, selector=None, *, ports='output', to=None, every_thread=False, **options)",
    "select": "(model, selector=None, ports='output')",
    "shadow": "(a, b, inputs, *, names=None)",
    "summary": "(model, inputs=None, **others)",
    "sweep": "(model, inputs, changes, metric, *, each=None, clean=None, read=None, **options)",
    "write_page": "(result, path, *, title='', texts=None)",
    "watch": "(model, selector=None, *, ports=None, file=None, every_thread=False)",
    "ClassMaps.overlay": "(self, image=None, alpha=0.5)",
    "ClassMaps.save": "(self, path, image=None, alpha=0.5)",
    "Line.remove": "(self)",
    "Line.report": "(self)",
    "RawLine.forward": "(self, selector, hook, *, with_kwargs=False, prepend=False,"
    " always_call=False)",
    "RawLine.forward_pre": "(self, selector, hook, *, with_kwargs=False, prepend=False)",
    "RawLine.backward_pre": "(self, selector, hook, *, prepend=False)",
    "RawLine.backward": "(self, selector, hook, *, prepend=False)",
    "RawLine.saved": "(self, selector, pack, unpack)",
    "RawLine.grad": "(self, selector, hook, *, prepend=False)",
    "RawLine.accumulated": "(self, selector, hook, *, prepend=False)",
    "RawLine.registered": "(self, kind, hook)",
    "RawLine.step_pre": "(self, optimizer, hook)",
    "RawLine.step_post": "(self, optimizer, hook)",
    "RawLine.state_dict_pre": "(self, where, hook)",
    "RawLine.state_dict": "(self, where, hook)",
    "RawLine.load_state_dict_pre": "(self, where, hook)",
    "RawLine.load_state_dict": "(self, where, hook)",
    "Profile.top": "(self, n=10, by='self')",
    "Profile.fold": "(self, depth)",
    "Profile.trace": "(self, path)",
    "Recording.gradients": "(self)",
    "Recording.save": "(self, folder, *, alone=False, group=None, timeout=60.0)",
    "Recording.full": "(self, key, dim=None, *, group=None, timeout=60.0)",
    "Recording.reduced": "(self, key, op='mean', *, group=None, timeout=60.0)",
    "Recording.stack": "(self, key)",
    "Recording.cat": "(self, key, dim=0)",
    "Recording.calls": "(self, key)",
    "Recording.leaves": "(self, key)",
    "Recording.tensor": "(self, key)",
    "plots.channels": "(recording, site, *, n=64, order='index', sample=0, layout=None,"
    " shared=False)",
    "plots.compare": "(a, b, site=None, *, n=None, order='difference', sample=0, layout=None)",
    "plots.gradients": "(recording)",
    "plots.histograms": "(recording, sites=None, *, bins=64, n=48, log=True)",
    "plots.images": "(recording, site='(root):input', *, n=16, layout=None)",
    "plots.statistics": "(recording, sites=None, *, what=('mean', 'std', 'min', 'max', 'zeros'))",
    "plots.sweep": "(effects, *, axes=None, texts=None, normalised=False)",
    "plots.tokens": "(recording, site, *, texts=None, n=None, order='index', sample=0,"
    " layout=None)",
    "Store.cat": "(stores)",
    "Store.dataset": "(self, *sites)",
    "Store.shuffled": "(self, *sites, batch_size=256, seed=0, shards=16, drop_last=False)",
    "Store.export": "(self, to, format, *sites)",
    "edits.scale": "(factor)",
    "edits.add": "(offset)",
    "edits.replace": "(new)",
    "edits.noise": "(std, *, seed=None)",
    "edits.clamp": "(min=None, max=None)",
    "stats.moments": "(*, compile=None)",
    "stats.histogram": "(*, low=1e-09, high=1000000000.0, per_octave=1)",
    "stats.quantiles": "(q=(0.01, 0.25, 0.5, 0.75, 0.99), *, error=0.01, low=1e-09,"
    " high=1000000000.0)",
    "stats.covariance": "()",
}


def test_the_public_names():
    assert sorted(hl.__all__) == sorted(NAMES)
    assert all(hasattr(hl, name) for name in hl.__all__)


def test_the_signatures():
    for name, expected in SIGNATURES.items():
        thing = hl
        for part in name.split("."):
            thing = getattr(thing, part)
        signature = inspect.signature(thing)
        plain = signature.replace(
            parameters=[
                p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
            ],
            return_annotation=inspect.Signature.empty,
        )
        assert str(plain) == expected, name


def test_everything_public_is_documented_with_an_example():
    for name in ("attach", "attribute", "cam", "clip", "doctor", "edit", "features", "inventory",
                 "open", "profile", "record", "select", "summary", "sweep", "watch"):  # fmt: skip
        text = inspect.getdoc(getattr(hl, name))
        for part in (">>> ", "Args:", "Returns:", "Raises:"):
            assert part in text or (name, part) in {
                ("inventory", "Raises:"),
                ("select", "Returns:"),
            }, f"hl.{name} has no {part}"


def test_every_error_can_be_caught_as_one_and_as_pythons_own():
    errors = [getattr(hl, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, hl.HooklineError) for error in errors)
    assert issubclass(hl.SelectionError, LookupError)
    assert issubclass(hl.FolderError, OSError)
    assert issubclass(hl.HooklineWarning, UserWarning)


def recorded():
    model = nn.Linear(2, 2)
    with hl.record(model) as run:
        model(torch.ones(1, 2))
    return run


def swept(verb):
    x = torch.ones(1, 2)
    return verb(nn.Linear(2, 2).eval(), x, "(root)", lambda out: out[0, 0], clean=2 * x)


def stored():
    columns = {"x": torch.ones(3, 2), "pooled": torch.ones(2, 2)}
    return hl.open(str(write_store(
        f"memory://public-names-{os.getpid()}", columns, lengths=[1, 2], per_token=["x"],
        tokens=torch.arange(3),
    )))  # fmt: skip


# fmt: off
LOOK_UPS = ["full", "get", "items", "keys", "leaves", "reduced", "tensor", "values"]
LINE = ["name", "remove", "report"]
EFFECTS = [
    "axes", "baseline", "clean", "effects", "is_change", "labels", "normalised", "to_dict",
    "to_pandas",
]
SURFACES = {
    "hookline": (lambda: hl, NAMES),
    "edits": (lambda: hl.edits, [
        "add", "clamp", "noise", "patch", "project_out", "replace", "reroute", "round_to", "scale",
        "steer",
    ]),
    "plots": (lambda: hl.plots, [
        "attention", "channels", "compare", "gradients", "histograms", "images", "statistics",
        "sweep", "tokens",
    ]),
    "stats": (lambda: hl.stats, [
        "Covariance", "Histogram", "Moments", "Quantiles", "Statistic", "covariance", "histogram",
        "moments", "quantiles",
    ]),
    "Line": (lambda: hl.edit(nn.Linear(2, 2), "(root)", hl.edits.scale(1)), LINE),
    "RawLine": (lambda: hl.attach(nn.Linear(2, 2)), [
        *LINE, "accumulated", "backward", "backward_pre", "forward", "forward_pre", "grad",
        "load_state_dict", "load_state_dict_pre", "registered", "saved", "state_dict",
        "state_dict_pre", "step_post", "step_pre",
    ]),
    "ClipLine": (lambda: hl.clip(nn.Linear(2, 2), norm=1.0), ["remove", "report"]),
    "Watch": (lambda: hl.watch(nn.Linear(2, 2)), ["remove", "report"]),
    "Profile": (lambda: hl.profile(nn.Linear(2, 2)), [
        "failure", "first", "fold", "per_pass", "remove", "rows", "table", "to_dict",
        "to_pandas", "top", "total", "trace",
    ]),
    "RecordLine": (lambda: hl.record(nn.Linear(2, 2)), ["recording", "remove", "report"]),
    "Sweep": (lambda: swept(hl.sweep), [
        *EFFECTS, "forwards", "notes", "rows", "unmoved", "values",
    ]),
    "Attribution": (lambda: swept(hl.attribute), [
        *EFFECTS, "failing", "gradients", "measured", "rank_correlation", "scores", "unjudged",
    ]),
    "Recording": (recorded, [
        *LOOK_UPS, "calls", "cat", "findings", "gradients", "lost", "model", "modules", "passes",
        "provenance", "ranks", "release", "report", "save", "sites", "stack",
        "to_dict", "to_pandas",
    ]),
    "PassRecord": (lambda: recorded().passes[0], [
        *LOOK_UPS, "backwards", "calls", "failed", "fired", "number", "order", "settings",
        "to_dict", "to_pandas",
    ]),
    "Report": (lambda: recorded().report(), [
        "counts", "ended", "excused", "fired", "model_type", "n_fired", "name", "notes",
        "other_contexts", "outside_root", "passes", "remarks", "removed", "replaced", "silent",
        "sites", "to_dict", "to_pandas", "warning", "why",
    ]),
    "Store": (stored, [
        "cat", "dataset", "export", "files", "findings", "items", "job", "labels", "n_items",
        "n_rows", "names", "nbytes", "parts", "place", "provenance", "release", "shuffled",
        "sites", "skipped", "statistics", "to_dict", "to_pandas", "tokens", "verify",
    ]),
    "Column": (lambda: stored()["x"], [
        "dtype", "is_ragged", "lengths", "name", "nbytes", "ndim", "numpy", "of_item", "of_items",
        "padded", "shape",
    ]),
    "Selection": (lambda: hl.select(nn.Linear(2, 2)), ["sites", "to_dict", "to_pandas"]),
    "Site": (lambda: hl.Site(""), [
        "aliases", "call", "is_gradient", "leaf", "module_type", "path", "port",
    ]),
}
# fmt: on


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.filterwarnings("ignore::hookline.HooklineWarning")
def test_what_an_editor_completes_is_what_users_are_meant_to_use(name):
    made, expected = SURFACES[name]
    thing = made()
    shown = [one for one in dir(thing) if not one.startswith("_")]
    assert shown == sorted(expected)
    assert all(hasattr(thing, one) for one in shown)
    if hasattr(thing, "remove"):
        thing.remove()


def test_names_are_imported_from_where_type_checkers_look():
    """The table for the first use, and the imports for type checkers, say the same."""
    source = ast.parse(inspect.getsource(hl))
    (block,) = [node for node in source.body if isinstance(node, ast.If)]
    for statement in block.body:
        for alias in statement.names:
            name = alias.asname or alias.name
            assert hl._MODULE_OF[name] == statement.module, name
            module = importlib.import_module(statement.module)
            assert getattr(hl, name) is getattr(module, alias.name), name
    known = {alias.asname or alias.name for node in block.body for alias in node.names}
    errors = {name for name in hl.__all__ if name.endswith(("Error", "Warning"))}
    assert known | errors == set(hl.__all__)
    assert known == hl._MODULE_OF.keys()


@pytest.mark.parametrize(
    "public",
    [getattr(room, name) for room in (hookline.data, hookline.models) for name in room.__all__],
)
def test_the_examples_of_models_and_inputs_by_name_are_run(pytestconfig, public):
    file = inspect.getsourcefile(public)
    (ignored,) = [
        plugin.collect_ignore_glob
        for plugin in pytestconfig.pluginmanager.get_plugins()
        if hasattr(plugin, "collect_ignore_glob")
    ]
    assert not any(fnmatch(file, str(pytestconfig.rootpath / glob)) for glob in ignored)


@pytest.mark.processes
def test_importing_hookline_imports_no_verb():
    code = "import sys, hookline; print([name for name in sys.modules if name[:9] == 'hookline.'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = (
        "display", "display.text", "util", "util.arguments_elsewhere", "errors",
        "util.preserve_python_rng", "util.lazy_imports", "util.version",
    )  # fmt: skip
    assert done.stdout.strip() == str([f"hookline.{name}" for name in names])
