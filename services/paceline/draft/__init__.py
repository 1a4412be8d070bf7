"""The draft: grows speculation trees for many sessions in one batch. Knows no target, no network and no Ray."""
