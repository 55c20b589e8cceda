"""What was seen: the recording, and the folder it is saved in. Data, never code."""

from hookline.recordings.encoding import Fields as Fields
from hookline.recordings.encoding import Lost as Lost
from hookline.recordings.folder import check_target as check_target
from hookline.recordings.index import stamp as stamp
from hookline.recordings.recording import PassRecord as PassRecord
from hookline.recordings.recording import Recording as Recording
from hookline.recordings.recording import open_recording as open_recording

__all__ = ["Fields", "Lost", "PassRecord", "Recording", "check_target", "open_recording", "stamp"]
