"""Recordings in memory and on disk. A folder holds data only, never code."""

from hookline.recordings.encoding import Fields as Fields
from hookline.recordings.encoding import NotSaved as NotSaved
from hookline.recordings.gradients import GradientFlow as GradientFlow
from hookline.recordings.gradients import GradientRow as GradientRow
from hookline.recordings.log_entries import PartialGradients as PartialGradients
from hookline.recordings.opening import open_recording as open_recording
from hookline.recordings.pass_record import PassRecord as PassRecord
from hookline.recordings.recording import Recording as Recording
from hookline.recordings.stamps import Beside as Beside
from hookline.recordings.stamps import Unknowable as Unknowable
from hookline.recordings.stamps import stamp as stamp
from hookline.recordings.target_folder import check_target as check_target

__all__ = [
    "Beside",
    "Fields",
    "GradientFlow",
    "GradientRow",
    "NotSaved",
    "PartialGradients",
    "PassRecord",
    "Recording",
    "Unknowable",
    "check_target",
    "open_recording",
    "stamp",
]  # fmt: skip
