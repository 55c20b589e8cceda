"""Read the data of a recording's page."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import re


def core_of(text: str) -> dict:
    """Unpack the data of a recording's page, with whole columns in place of differences."""
    packed = re.search(r'<script type="text/plain" id="core">([^<]*)</script>', text)[1]
    core = json.loads(gzip.decompress(base64.b64decode(packed)))
    for columns, name in (("rows", "parent"), ("values", "row"), ("values", "order")):
        core[columns][name] = list(itertools.accumulate(core[columns][name]))
    return core
