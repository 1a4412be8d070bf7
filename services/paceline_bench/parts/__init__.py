"""``paceline bench parts NAME``: what single parts of a step cost, each compared with another way to do the same."""

from __future__ import annotations

import argparse


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of one part's own flags."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"paceline bench parts {name}", description=description, formatter_class=form)
