"""What Ray says in the process of ``paceline serve`` does not reach its terminal."""

import subprocess
import sys

SAID = """
import logging, pathlib, sys
import ray
from ray import serve
import ray._private.worker as worker

if sys.argv[2:]:
    from paceline.cluster.ray_output import divert
    divert(pathlib.Path(sys.argv[1]))
logging.getLogger("ray").warning("token authentication")
logging.getLogger("ray.serve").error("a replica is slow")
worker.print_to_stdstream({"lines": ["task failed"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
"""
MESSAGES = ("token authentication", "a replica is slow", "task failed")


def run(*arguments):
    return subprocess.run([sys.executable, "-c", SAID, *arguments], capture_output=True, text=True, timeout=300)


def test_what_ray_says_goes_to_a_file(tmp_path):
    before = run(str(tmp_path))
    assert all(message in before.stdout + before.stderr for message in MESSAGES), before  # else this test shows nothing
    done = run(str(tmp_path), "divert")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    written = (tmp_path / "messages.log").read_text()
    assert all(written.count(message) == 1 for message in MESSAGES), written
