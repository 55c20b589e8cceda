"""The page of a result or a run: a self-contained HTML file, or a local server."""

from hookline.views.page.limited_server import LimitedServer as LimitedServer
from hookline.views.page.recording_page import ImagesAndClasses as ImagesAndClasses
from hookline.views.page.recording_page import (
    write_folder_contents_page as write_folder_contents_page,
)
from hookline.views.page.recording_page import write_recording_page as write_recording_page
from hookline.views.page.result_pages import write_comparison_page as write_comparison_page
from hookline.views.page.result_pages import write_page as write_page
from hookline.views.page.served_folders import FolderSource as FolderSource
from hookline.views.page.served_folders import OpenRecordings as OpenRecordings
from hookline.views.page.training_page import write_curves_page as write_curves_page
