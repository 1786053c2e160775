"""`report`: the tables and figures of arXiv 2605.23057 from one's own results, as a page and as PNGs."""

from loadgen.report.command import register

__all__ = ["register"]
