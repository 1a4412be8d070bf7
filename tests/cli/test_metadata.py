"""The installed metadata: the console script, and the command of the benchmark as an entry point."""

import re
from importlib.metadata import entry_points, requires

from paceline.cli.main import build_parser, console_script


def test_the_console_script_is_ours():
    (script,) = entry_points(group="console_scripts", name="paceline")
    assert script.load() is console_script


def test_the_benchmark_is_found_through_an_entry_point():
    (command,) = entry_points(group="paceline.commands")
    assert (command.name, command.value) == ("bench", "paceline_bench.cli:add_parser")
    args = build_parser("bench").parse_args(["bench", "report", "a.json", "--out", "folder"])
    assert args.run.__module__ == "paceline_bench.cli"


def test_the_libraries_of_a_client_are_required_without_an_extra():
    plain = [line for line in requires("paceline") or [] if ";" not in line]
    names = {re.split(r"[^A-Za-z0-9-]", line)[0].lower() for line in plain}
    assert {"grpcio", "grpcio-health-checking", "protobuf", "pydantic", "pyyaml"} <= names
