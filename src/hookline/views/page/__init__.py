"""The page of a recording or a run: a self-contained HTML file, or a local server."""

from hookline.views.page.curves_view import write_curves_page as write_curves_page
from hookline.views.page.serving import Serving as Serving
from hookline.views.page.single_file import write_page as write_page
from hookline.views.page.sources import FolderSource as FolderSource
from hookline.views.page.sources import OpenRecordings as OpenRecordings
