"""The page of a recording: a self-contained HTML file, or a local server."""

from hookline.views.page.serving import Serving as Serving
from hookline.views.page.sources import FolderSource as FolderSource
from hookline.views.page.sources import OpenRecordings as OpenRecordings
from hookline.views.page.write import write_page as write_page

__all__ = ["FolderSource", "OpenRecordings", "Serving", "write_page"]
