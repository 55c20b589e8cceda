"""Read the data of pages."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import re


def data_of(text: str) -> dict:
    """Unpack the data of a page."""
    packed = re.search(r'<script type="text/plain" id="core">([^<]*)</script>', text)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def core_of(text: str) -> dict:
    """Unpack the data of a recording's page, with whole columns in place of differences."""
    core = data_of(text)
    for columns, name in (("rows", "parent"), ("values", "row"), ("values", "order")):
        core[columns][name] = list(itertools.accumulate(core[columns][name]))
    return core
