"""``paceline bench parts NAME``: what single parts of a step cost, each compared with another way to do the same."""
