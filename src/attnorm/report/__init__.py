"""The report of an analysis: terminal tables, figures, and the HTML page (`report.html`)."""
