"""Which page does a reader get? `build` gathers what a model shows over the dial, `write_report` makes it one page."""

from softequiv.report.build import build
from softequiv.report.data import ReportData
from softequiv.report.page import write_report

__all__ = ["ReportData", "build", "write_report"]
