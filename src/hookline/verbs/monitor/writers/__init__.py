"""Write reports to loggers: one file for each, imported when it is used."""

from hookline.verbs.monitor.writers.choose import writers_for as writers_for
from hookline.verbs.monitor.writers.protocol import ReportWriter as ReportWriter
from hookline.verbs.monitor.writers.protocol import writer_name as writer_name
