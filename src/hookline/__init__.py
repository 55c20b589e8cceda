"""hookline: see, measure and change what flows through any PyTorch model.

import hookline as hl

with hl.record(model, nn.Conv2d) as run:
    model(x)
run["layer1.0.conv1"]
"""

from typing import TYPE_CHECKING

from hookline.errors import AmbiguousError as AmbiguousError
from hookline.errors import AttachError as AttachError
from hookline.errors import FolderError as FolderError
from hookline.errors import HooklineError as HooklineError
from hookline.errors import HooklineWarning as HooklineWarning
from hookline.errors import InputError as InputError
from hookline.errors import ModelError as ModelError
from hookline.errors import NonFiniteError as NonFiniteError
from hookline.errors import NotRecordedError as NotRecordedError
from hookline.errors import OverwrittenError as OverwrittenError
from hookline.errors import RanksError as RanksError
from hookline.errors import SelectionError as SelectionError
from hookline.errors import SiteError as SiteError
from hookline.errors import StructureError as StructureError
from hookline.util.lazy_imports import lazy_getattr
from hookline.util.version import VERSION

if TYPE_CHECKING:
    from hookline.curves import Curves as Curves
    from hookline.engine import EVERYWHERE as EVERYWHERE
    from hookline.engine import Line as Line
    from hookline.engine import Report as Report
    from hookline.engine import Selection as Selection
    from hookline.engine import Site as Site
    from hookline.engine import select as select
    from hookline.findings import Finding as Finding
    from hookline.findings import Findings as Findings
    from hookline.opening import open as open
    from hookline.recordings import Recording as Recording
    from hookline.statistics import stats as stats
    from hookline.stores import Store as Store
    from hookline.verbs.anatomy.anatomy import Anatomy as Anatomy
    from hookline.verbs.anatomy.anatomy import anatomy as anatomy
    from hookline.verbs.attach.raw_line import RawLine as RawLine
    from hookline.verbs.attach.raw_line import attach as attach
    from hookline.verbs.cam.cam import cam as cam
    from hookline.verbs.cam.class_maps import ClassMaps as ClassMaps
    from hookline.verbs.check.check import check as check
    from hookline.verbs.check.finding import CheckFinding as CheckFinding
    from hookline.verbs.clip.clip import clip as clip
    from hookline.verbs.compare.compare import compare as compare
    from hookline.verbs.compare.comparison import Comparison as Comparison
    from hookline.verbs.compare.shadow import shadow as shadow
    from hookline.verbs.doctor.diagnosis import Diagnosis as Diagnosis
    from hookline.verbs.doctor.doctor import doctor as doctor
    from hookline.verbs.edit import edits as edits
    from hookline.verbs.edit.edit import edit as edit
    from hookline.verbs.extract.extract import extract as extract
    from hookline.verbs.invariance.invariance import invariance as invariance
    from hookline.verbs.invariance.result import Invariance as Invariance
    from hookline.verbs.inventory import Inventory as Inventory
    from hookline.verbs.inventory import inventory as inventory
    from hookline.verbs.monitor.monitor import monitor as monitor
    from hookline.verbs.operations import Operations as Operations
    from hookline.verbs.operations import operations as operations
    from hookline.verbs.profile.profile import Profile as Profile
    from hookline.verbs.profile.profile import profile as profile
    from hookline.verbs.record.by_query import by_query as by_query
    from hookline.verbs.record.features import features as features
    from hookline.verbs.record.record import record as record
    from hookline.verbs.summary import Summary as Summary
    from hookline.verbs.summary import summary as summary
    from hookline.verbs.sweep.attribute import attribute as attribute
    from hookline.verbs.sweep.sweep import sweep as sweep
    from hookline.verbs.sweep.sweep_results import Attribution as Attribution
    from hookline.verbs.sweep.sweep_results import Sweep as Sweep
    from hookline.verbs.watch.watch import watch as watch
    from hookline.views import plots as plots
    from hookline.views import write_page as write_page

__version__ = VERSION

# Where each name is: imported on first use, since a program uses few of them.
_MODULES = {
    "curves": "Curves",
    "engine": "EVERYWHERE Line Report Selection Site select",
    "findings": "Finding Findings",
    "opening": "open",
    "recordings": "Recording",
    "statistics": "stats",
    "stores": "Store",
    "verbs.anatomy.anatomy": "Anatomy anatomy",
    "verbs.attach.raw_line": "RawLine attach",
    "verbs.cam.cam": "cam",
    "verbs.cam.class_maps": "ClassMaps",
    "verbs.check.check": "check",
    "verbs.check.finding": "CheckFinding",
    "verbs.clip.clip": "clip",
    "verbs.compare.compare": "compare",
    "verbs.compare.comparison": "Comparison",
    "verbs.compare.shadow": "shadow",
    "verbs.doctor.diagnosis": "Diagnosis",
    "verbs.doctor.doctor": "doctor",
    "verbs.edit": "edits",
    "verbs.edit.edit": "edit",
    "verbs.extract.extract": "extract",
    "verbs.invariance.invariance": "invariance",
    "verbs.invariance.result": "Invariance",
    "verbs.inventory": "Inventory inventory",
    "verbs.monitor.monitor": "monitor",
    "verbs.operations": "Operations operations",
    "verbs.profile.profile": "Profile profile",
    "verbs.record.by_query": "by_query",
    "verbs.record.features": "features",
    "verbs.record.record": "record",
    "verbs.summary": "Summary summary",
    "verbs.sweep.attribute": "attribute",
    "verbs.sweep.sweep_results": "Attribution Sweep",
    "verbs.sweep.sweep": "sweep",
    "verbs.watch.watch": "watch",
    "views": "plots write_page",
}
_MODULE_OF = {
    name: f"hookline.{module}" for module, names in _MODULES.items() for name in names.split()
}

__all__ = list(_MODULE_OF)
__all__ += [name for name in globals() if name.endswith(("Error", "Warning"))]

# What other packages call these.
_ELSEWHERE = {
    "hl.record(model, selector)": "Trace TraceDict trace run_with_cache",
    "hl.features(model, inputs, selector)": "create_feature_extractor IntermediateLayerGetter",
    "hl.edit(model, selector, change)": "run_with_hooks patch ablate steer",
    "hl.attach(model)": "hook add_hook register_forward_hook",
    "hl.cam(model, images)": "GradCAM gradcam",
    "hl.attribute(model, baseline, selector, metric, clean=inputs)": "IntegratedGradients",
    "hl.summary(model, inputs)": "flops FlopCountAnalysis",
    "hl.open(folder)": "load",
    "from hookline.models import load_model": "load_model models",
}
_CALL_OF = {name: call for call, names in _ELSEWHERE.items() for name in names.split()}

__getattr__ = lazy_getattr(__name__, _MODULE_OF, _CALL_OF)


def __dir__() -> list[str]:
    """List the public names for completion, without the modules that this file imports."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
