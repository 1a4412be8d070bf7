"""The draft: grows the speculation trees of many sessions in one batch. Knows no target, no network."""
