"""The page: a recording as one HTML file that needs nothing else, and as a server."""

from hookline.views.page.serving import Serving as Serving
from hookline.views.page.sources import FolderSource as FolderSource
from hookline.views.page.sources import Shelf as Shelf
from hookline.views.page.write import write_page as write_page

__all__ = ["FolderSource", "Serving", "Shelf", "write_page"]
