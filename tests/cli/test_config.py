"""``paceline config``: YAML that can be read again, and a reference that holds every key."""

from __future__ import annotations

import re

import yaml

from paceline.cli.main import main
from paceline.config import ServiceConfig
from paceline.errors.refusals import keys_of


def printed(capsys, *arguments):
    """What a command prints, which complains of nothing."""
    assert main([*arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_defaults_are_yaml_that_gives_the_defaults(capsys):
    assert ServiceConfig.parse(yaml.safe_load(printed(capsys, "config"))) == ServiceConfig()


def test_file_and_flags_are_part_of_it(capsys, tmp_path):
    file = tmp_path / "paceline.yaml"
    file.write_text("server: {grpc_port: 9100}")
    found = yaml.safe_load(
        printed(capsys, "config", "--config", str(file), "--http-port", "8100", "--set", "log.level=DEBUG")
    )
    assert (found["server"]["grpc_port"], found["server"]["http_port"]) == (9100, 8100)
    assert found["log"]["level"] == "DEBUG"


def test_the_reference_has_a_row_for_every_key_or_a_link_to_the_section_that_has_it(capsys):
    lines = printed(capsys, "config", "--markdown").splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert all(len(row) == 4 for row in rows)
    keys = {row[0].strip("|` ") for row in rows}
    assert keys <= set(keys_of(ServiceConfig))
    links = [(row[0].strip("|` "), re.findall(r"Keys: \[`([\w.]+)`", row[3])) for row in rows]
    for _ in range(2):  # a linked section may itself hold a link
        for key, sections in links:
            below = [
                name.removeprefix(section) for section in sections for name in keys if name.startswith(f"{section}.")
            ]
            keys |= {key + rest for rest in below}
    assert keys >= set(keys_of(ServiceConfig))


def test_the_reference_has_each_table_once(capsys):
    rows = [line for line in printed(capsys, "config", "--markdown").splitlines() if line.startswith("| `")]
    assert sum("_group_config.bundles`" in row for row in rows) == 1


def test_the_reference_gives_types_and_defaults(capsys):
    out = printed(capsys, "config", "--markdown")
    assert "| `server.grpc_port` | whole number at least 1 and at most 65535 | `9000` |" in out
    assert "| `log.level` | `DEBUG` or `INFO` or `WARNING` or `ERROR` | `INFO` |" in out
    assert "| `draft_config` | section or `null` |  | null: plain decoding. |" in out
    assert "\n## `draft_config`, with `kind: ngram`\n" in out


def test_a_section_has_one_table_and_a_sentence(capsys):
    sections = printed(capsys, "config", "--markdown").split("\n## ")
    for section in sections:
        assert section.count("| Key | Type | Default | Meaning |") == 1
        title, _, rest = section.partition("\n\n")
        assert rest[0].isupper() or rest.startswith("`"), title
