"""``python -m paceline``: the same as the console script."""

from paceline.cli.main import console_script

if __name__ == "__main__":
    console_script()
