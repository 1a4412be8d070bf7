"""Heads of a target: drafters in its own process. ``driver.py`` says when they are fed and asked."""
