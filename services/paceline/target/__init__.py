"""The target: ``schedule -> forward -> verify -> commit``. Knows nothing of drafts, only of nodes that arrive."""
