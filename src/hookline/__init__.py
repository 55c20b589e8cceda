"""hookline: see, measure and change what flows through any PyTorch model.

import hookline as hl

with hl.record(model, nn.Conv2d) as run:
    model(x)
run["layer1.0.conv1"]
"""

from typing import TYPE_CHECKING, Any

from hookline.curves import Curves as Curves
from hookline.engine import EVERYWHERE as EVERYWHERE
from hookline.engine import Line as Line
from hookline.engine import Report as Report
from hookline.engine import Selection as Selection
from hookline.engine import Site as Site
from hookline.engine import select as select
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
from hookline.recordings import Recording as Recording
from hookline.statistics import stats as stats
from hookline.stores import Store as Store
from hookline.stores import open_folder as open
from hookline.verbs import ClassMaps as ClassMaps
from hookline.verbs import Diagnosis as Diagnosis
from hookline.verbs import Finding as Finding
from hookline.verbs import Inventory as Inventory
from hookline.verbs import Profile as Profile
from hookline.verbs import RawLine as RawLine
from hookline.verbs import Summary as Summary
from hookline.verbs import attach as attach
from hookline.verbs import cam as cam
from hookline.verbs import check as check
from hookline.verbs import clip as clip
from hookline.verbs import doctor as doctor
from hookline.verbs import edit as edit
from hookline.verbs import extract as extract
from hookline.verbs import features as features
from hookline.verbs import inventory as inventory
from hookline.verbs import monitor as monitor
from hookline.verbs import profile as profile
from hookline.verbs import record as record
from hookline.verbs import summary as summary
from hookline.verbs import watch as watch
from hookline.verbs.edit import edits as edits

if TYPE_CHECKING:
    from hookline.views import plots as plots

__version__ = "0.1.0"

__all__ = [
    "EVERYWHERE", "AmbiguousError", "AttachError", "ClassMaps", "Curves", "Diagnosis", "Finding",
    "FolderError", "HooklineError", "HooklineWarning", "InputError", "Inventory", "Line",
    "ModelError", "NonFiniteError", "NotRecordedError", "OverwrittenError", "Profile", "RanksError",
    "RawLine", "Recording", "Report", "Selection", "SelectionError", "Site", "SiteError", "Store",
    "StructureError", "Summary", "attach", "cam", "check", "clip", "doctor", "edit", "edits",
    "extract", "features", "inventory", "monitor", "open", "plots", "profile", "record", "select",
    "stats",
    "summary", "watch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import `hl.plots` on first access: most programs draw nothing."""
    if name == "plots":
        from hookline.views import plots

        return plots
    raise AttributeError(f"module 'hookline' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names for completion, without the modules that this file imports."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
