"""The report of an analysis as one HTML file that needs no network: page.render(analysis), page.save(analysis, to)."""
