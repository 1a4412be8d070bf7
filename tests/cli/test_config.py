"""``paceline config``: YAML that can be read again, and a reference that holds every key."""

from __future__ import annotations

import yaml

from paceline.cli.main import main
from paceline.config import ServiceConfig
from paceline.errors.refusals import keys_of


def printed(capsys, *flags):
    assert main(["config", *flags]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_defaults_are_yaml_that_gives_the_defaults(capsys):
    assert ServiceConfig.parse(yaml.safe_load(printed(capsys))) == ServiceConfig()


def test_file_and_flags_are_part_of_it(capsys, tmp_path):
    file = tmp_path / "paceline.yaml"
    file.write_text("server: {grpc_port: 9100}")
    found = yaml.safe_load(printed(capsys, "--config", str(file), "--http-port", "8100", "--set", "log.level=DEBUG"))
    assert (found["server"]["grpc_port"], found["server"]["http_port"]) == (9100, 8100)
    assert found["log"]["level"] == "DEBUG"


def test_the_reference_has_a_row_for_every_key(capsys):
    lines = printed(capsys, "--markdown").splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert {row[0].strip("|` ") for row in rows} == set(keys_of(ServiceConfig))
    assert all(len(row) == 4 for row in rows)


def test_the_reference_gives_types_and_defaults(capsys):
    out = printed(capsys, "--markdown")
    assert "| `server.grpc_port` | whole number at least 1 and at most 65535 | `9000` |" in out
    assert "| `log.level` | `DEBUG` or `INFO` or `WARNING` or `ERROR` | `INFO` |" in out
    assert "| `draft_config` | section or `null` |  | null: plain decoding. |" in out
    assert "\n## `draft_config`, with `kind: ngram`\n" in out


def test_a_section_has_one_table_and_a_sentence(capsys):
    sections = printed(capsys, "--markdown").split("\n## ")
    for section in sections:
        assert section.count("| Key | Type | Default | Meaning |") == 1
        title, _, rest = section.partition("\n\n")
        assert rest[0].isupper() or rest.startswith("`"), title
