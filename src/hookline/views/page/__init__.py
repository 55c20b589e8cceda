"""The page of a result or a run: a self-contained HTML file, or a local server."""

from hookline.views.page.curves_view import write_curves_page as write_curves_page
from hookline.views.page.results import write_comparison_page as write_comparison_page
from hookline.views.page.results import write_page as write_page
from hookline.views.page.serving import Serving as Serving
from hookline.views.page.single_file import Evidence as Evidence
from hookline.views.page.single_file import write_contents_page as write_contents_page
from hookline.views.page.single_file import write_recording_page as write_recording_page
from hookline.views.page.sources import FolderSource as FolderSource
from hookline.views.page.sources import OpenRecordings as OpenRecordings
