"""Reports of finished runs: tables, plots and one HTML page that needs nothing else.

    fedprotip report DIR            # DIR/report.html, DIR/tables/*.csv, DIR/plots/*.png
    fedprotip compare DIR DIR …     # mean ± std over seeds, methods side by side

A report reads only the run folder. Tasks are counted from 1 here, as in the paper.
"""

from fedprotip.report.page import comparison_remarks, comparison_rows, comparison_text, write_comparison, write_report

__all__ = ["comparison_remarks", "comparison_rows", "comparison_text", "write_comparison", "write_report"]
