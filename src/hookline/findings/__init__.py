"""Findings: what is wrong with the values of a run, and where it begins."""

from hookline.findings.finding import Finding as Finding
from hookline.findings.finding import Findings as Findings
from hookline.findings.finding import Level as Level
from hookline.findings.finding import sort_by_level as sort_by_level
