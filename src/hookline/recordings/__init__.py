"""Recordings in memory and on disk. A folder holds data only, never code."""

from hookline.recordings.atomic_replace import as_recording_place as as_recording_place
from hookline.recordings.atomic_replace import check_target as check_target
from hookline.recordings.encoding import Fields as Fields
from hookline.recordings.encoding import NotSaved as NotSaved
from hookline.recordings.gradient_flow import GradientFlow as GradientFlow
from hookline.recordings.gradient_flow import GradientRow as GradientRow
from hookline.recordings.log_entries import PartialGradients as PartialGradients
from hookline.recordings.log_entries import StampWithCopies as StampWithCopies
from hookline.recordings.log_entries import UndetectableStamp as UndetectableStamp
from hookline.recordings.log_entries import version_stamp as version_stamp
from hookline.recordings.open_recording import open_recording as open_recording
from hookline.recordings.pass_record import PassRecord as PassRecord
from hookline.recordings.recording import Recording as Recording
