"""The verbs that people call: each is a selection, a hook and a sink."""

from hookline.verbs.attach.raw_line import RawLine as RawLine
from hookline.verbs.attach.raw_line import attach as attach
from hookline.verbs.cam.cam import cam as cam
from hookline.verbs.cam.class_maps import ClassMaps as ClassMaps
from hookline.verbs.check.check import CheckLine as CheckLine
from hookline.verbs.check.check import check as check
from hookline.verbs.check.finding import Finding as Finding
from hookline.verbs.clip.clip import ClipLine as ClipLine
from hookline.verbs.clip.clip import clip as clip
from hookline.verbs.clip.report import ClipReport as ClipReport
from hookline.verbs.doctor.diagnosis import Diagnosis as Diagnosis
from hookline.verbs.doctor.diagnosis import diagnosis_data as diagnosis_data
from hookline.verbs.doctor.diagnosis import diagnosis_parts as diagnosis_parts
from hookline.verbs.doctor.doctor import doctor as doctor
from hookline.verbs.edit import edits as edits
from hookline.verbs.edit.edit import edit as edit
from hookline.verbs.extract.extract import extract as extract
from hookline.verbs.extract.options import Extracting as Extracting
from hookline.verbs.inventory import Inventory as Inventory
from hookline.verbs.inventory import inventory as inventory
from hookline.verbs.monitor.monitor import MonitorLine as MonitorLine
from hookline.verbs.monitor.monitor import monitor as monitor
from hookline.verbs.profile.profile import Profile as Profile
from hookline.verbs.profile.profile import profile as profile
from hookline.verbs.profile.table import ProfileTable as ProfileTable
from hookline.verbs.profile.table import profile_parts as profile_parts
from hookline.verbs.record.features import features as features
from hookline.verbs.record.record import RecordLine as RecordLine
from hookline.verbs.record.record import record as record
from hookline.verbs.record.to_store import StoreLine as StoreLine
from hookline.verbs.shared.run_model import Inputs as Inputs
from hookline.verbs.summary import Summary as Summary
from hookline.verbs.summary import summary as summary
from hookline.verbs.summary import summary_parts as summary_parts
from hookline.verbs.watch.watch import Watch as Watch
from hookline.verbs.watch.watch import watch as watch

__all__ = [
    "CheckLine", "ClassMaps", "ClipLine", "ClipReport", "Diagnosis", "Extracting", "Finding",
    "Inputs", "Inventory", "MonitorLine", "Profile", "ProfileTable", "RawLine", "RecordLine",
    "StoreLine", "Summary", "Watch", "attach", "cam", "check", "clip", "diagnosis_data",
    "diagnosis_parts", "doctor", "edit", "edits", "extract", "features", "inventory", "monitor",
    "profile", "profile_parts", "record", "summary", "summary_parts", "watch",
]  # fmt: skip
