"""Tell whether an open file was deleted: what is written to it then is lost without an error."""

from __future__ import annotations

import os


def is_deleted(file: int) -> bool:
    """Tell whether no folder has the open file any more. A file that was moved is not deleted.

    Args:
        file: the file's descriptor.
    """
    return os.fstat(file).st_nlink == 0
