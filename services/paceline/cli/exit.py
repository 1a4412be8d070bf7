"""Exit statuses, the same for every command."""

EXIT_DONE = 0
"""Done, or stopped by SIGTERM."""
EXIT_FAILED = 1
"""An engine or the service failed, or the answer is no: ``check`` (it would not start), ``status`` (no target is up),
``plan`` (no fleet keeps the limit), ``demo`` (tokens differ)."""
EXIT_USAGE = 2
"""The command line, the configuration or the request is at fault."""
EXIT_INTERRUPTED = 130
"""Interrupted by Ctrl-C."""
