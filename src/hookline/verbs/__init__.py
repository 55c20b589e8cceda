"""What people do: each verb is a selection, a hook and a sink."""

from hookline.verbs import edits as edits
from hookline.verbs.calling import Inputs as Inputs
from hookline.verbs.cam import cam as cam
from hookline.verbs.class_maps import ClassMaps as ClassMaps
from hookline.verbs.clip import ClipLine as ClipLine
from hookline.verbs.clip import clip as clip
from hookline.verbs.clip_report import ClipReport as ClipReport
from hookline.verbs.diagnosis import Diagnosis as Diagnosis
from hookline.verbs.diagnosis import diagnosis_data as diagnosis_data
from hookline.verbs.diagnosis import diagnosis_parts as diagnosis_parts
from hookline.verbs.doctor import doctor as doctor
from hookline.verbs.edit import edit as edit
from hookline.verbs.features import features as features
from hookline.verbs.record import RecordLine as RecordLine
from hookline.verbs.record import record as record
from hookline.verbs.summary import Summary as Summary
from hookline.verbs.summary import summary as summary
from hookline.verbs.summary import summary_parts as summary_parts
from hookline.verbs.watch import Watch as Watch
from hookline.verbs.watch import watch as watch

__all__ = [
    "ClassMaps", "ClipLine", "ClipReport", "Diagnosis", "Inputs", "RecordLine", "Summary", "Watch",
    "cam", "clip", "diagnosis_data", "diagnosis_parts", "doctor", "edit", "edits", "features",
    "record", "summary", "summary_parts", "watch",
]  # fmt: skip
