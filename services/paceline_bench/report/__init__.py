"""Reports: summaries, documents for ``--json``, plain text, and pages with plots."""
