"""The page: a recording as one HTML file that needs nothing else, and as a server."""

from hookline.views.page.serving import Serving as Serving
from hookline.views.page.sources import FolderSource as FolderSource
from hookline.views.page.sources import OpenRecordings as OpenRecordings
from hookline.views.page.write import write_page as write_page

__all__ = ["FolderSource", "OpenRecordings", "Serving", "write_page"]
