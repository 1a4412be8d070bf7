"""`paceline bench report`: what is rendered are the numbers of the JSON files."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.cli.main import main
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.types import Mode
from paceline_bench.arithmetic import interval
from paceline_bench.latency import latencies
from paceline_bench.local import devices
from paceline_bench.machine import bandwidth, floor_s, step_bytes
from paceline_bench.records import RequestRecord, RoundRecord
from paceline_bench.report import documents, forms, headline, page, plots, sections
from paceline_bench.report.summaries import summarize

FLOOR = {"read_bytes_per_s": 1e9, "target": {"weight_bytes": 8_000_000, "kv_bytes_per_token": 1000}, "draft": {}}


def record(method: str, unit: int, temperature: float, **fields: Any) -> RequestRecord:
    speed = {"plain": 1.0, "overlapped K=8": 0.4, "sequential K=4": 0.7, "colocated K=4": 0.9}.get(method, 2.0)
    drafted = 0 if method in ("plain", "transformers generate") else 4
    tokens = 3 if drafted else 1
    cause = {"overlapped K=8": "hit", "plain": "disabled"}.get(method, "sequential")
    rounds = [RoundRecord(0, 0, 1, "start", 0.1)]
    for i in range(1, 5):
        at_s = 0.1 + speed * (0.01 + 0.001 * unit) * i * tokens
        rounds.append(RoundRecord(drafted, min(2, drafted), tokens, cause if i % 2 or not drafted else "token", at_s))
    values: dict[str, Any] = {
        "prompt": f"p{unit}",
        "prompt_tokens": 50,
        "token_ids": tuple(range(1 + 4 * tokens)),
        "prefill_s": 0.1,
        "decode_s": rounds[-1].at_s - 0.1,
        "rounds": tuple(rounds),
        "target_steps": ((1, 0.01), (1, 0.012), (1, 0.011)),
    }
    mode = {"transformers generate": "transformers"}.get(method, method.split()[0])
    return RequestRecord(method, mode, drafted, temperature, unit, 0, **values | fields)


METHODS = ("plain", "sequential K=4", "overlapped K=8", "colocated K=4", "transformers generate")


def local_file(path: Path, sessions: int = 1, **fields: Any) -> Path:
    records = [record(m, unit, t, **fields) for t in (0.0, 1.0) for m in METHODS for unit in range(4)]
    timeline = {
        "method": "overlapped K=8",
        "temperature": 0.0,
        "prompt": "p0",
        "rounds": [asdict(r) for r in record("overlapped K=8", 0, 0.0).rounds],
        "target": [(0.1, 0.01, 3), (0.11, 0.01, 3), (0.12, 0.01, 3)],
        "draft": [(0.105, 0.01, 5), (0.13, 0.005, 5)],
    }
    settings = {"sessions": sessions, "dtype": "bfloat16"}
    data = documents.of_local(settings, {}, records, floor=FLOOR, timelines=[timeline], label="made")
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_the_report_holds_the_numbers_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    file = local_file(tmp_path / "a.json")
    assert main(["bench", "report", str(file), "--out", str(out), "--title", "A <title>"]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {out / "report.html", out / "report.md"} < set(written)
    assert all(path.stat().st_size > 500 for path in written)
    data = json.loads(file.read_text(encoding="utf-8"))
    html, markdown = ((out / name).read_text(encoding="utf-8") for name in ("report.html", "report.md"))
    for text in (html, markdown):
        for s in data["summaries"]:
            assert f"{s['decode_tokens_per_s']:.1f}" in text
            assert f"{s['ratio']['value']:.2f}" in text
            assert f"{s['tokens_per_step']:.2f}" in text
        for r in (RequestRecord.from_json(r) for r in data["requests"]):
            assert r.method in text
    rows = [line for line in markdown.splitlines() if line.startswith("| made | 0 | 1 | overlapped K=8 |")]
    records = [RequestRecord.from_json(r) for r in data["requests"]]
    own = [r for r in records if r.method == "overlapped K=8" and r.temperature == 0]
    found = latencies(own)
    assert "/".join(f"{v * 1e3:.1f}" for v in found["gap"].values() if v is not None) in " ".join(rows)
    assert "0.0/" in " ".join(rows), "the median ITL of bursts is 0"
    assert "A &lt;title&gt;" in html
    assert "<script" not in html
    assert "http" not in re.sub(r'(xmlns(:\w+)?|href|rdf:\w+)="[^"]*"', "", html.split("</style>", 1)[1]), (
        "needs nothing else"
    )
    assert html.count("<svg") == len([p for p in written if p.suffix == ".svg"]) >= 5


def test_plots_are_pictures_that_name_every_series(tmp_path: Path) -> None:
    run = documents.read_run(local_file(tmp_path / "a.json"))
    assert isinstance(run, documents.LocalRun)
    speed, again = sections.throughput([run]), sections.throughput([run])
    assert ElementTree.fromstring(speed.svg).tag.endswith("svg")
    assert {"plain", "sequential", "overlapped", "colocated", "transformers generate"} <= set(
        re.findall(r">([^<>\n]+)</text>", speed.svg)
    )
    assert speed.svg == again.svg, "the same numbers give the same file"


def test_what_each_section_computes(tmp_path: Path) -> None:
    run = documents.read_run(local_file(tmp_path / "a.json"))
    assert isinstance(run, documents.LocalRun)
    of = {s.method: s for s in run.summaries if s.temperature == 0}
    best = sections.against_transformers([run])
    assert best is not None
    assert best.rows[1][3] == "transformers generate"
    ratio = of["plain"].decode_tokens_per_s / of["transformers generate"].decode_tokens_per_s
    assert best.rows[1][6] == f"{ratio:.2f}" == "2.00"
    devices_of = {row[3]: row for row in sections.per_device([run]).rows[1:] if row[1] == "0"}
    assert {m: devices_of[m][4] for m in METHODS} == dict(zip(METHODS, "12221", strict=True))
    assert devices_of["overlapped K=8"][5] == f"{of['overlapped K=8'].decode_tokens_per_s / 2:.1f}"
    floor = sections.floors([run])
    assert floor is not None
    # 8 MB of weights and 1000 bytes for each of 50 + 5 / 2 tokens at 1 GB/s; the median step is 11 ms
    assert floor.rows[1][6:] == (f"{8 + 0.0525:.2f}", "11.00", f"{8.0525 / 11:.0%}")
    timeline = sections.timeline([run])
    assert timeline is not None
    assert timeline.rows[1][0] == "overlapped K=8"
    assert timeline.rows[1][4] == "67%", "10 of 15 ms of the draft's steps are within the target's"
    assert sections.overlap_s([(0.0, 2.0), (3.0, 1.0)], [(1.0, 2.5)]) == pytest.approx(1.5)
    accepted = sections.acceptance([run])
    assert accepted is not None
    (row,) = (row for row in accepted.rows if row[2:4] == ("overlapped K=8", "0"))
    assert row[4:7] == ("3.00", "0.500", "0.500 of 16")


def test_task_groups_have_rows_of_their_own(tmp_path: Path) -> None:
    run = documents.read_run(local_file(tmp_path / "a.json", category="tables"))
    titles = [s.title for s in sections.all_sections([run])]
    assert titles == ["Task groups", "Machine and models"]
    assert isinstance(run, documents.LocalRun)
    section = sections.task_groups([run])
    assert section is not None
    assert [row[3] for row in section.rows[1:]] == ["tables"] * 10


def test_the_page_has_contents_themes_and_the_best_of_each_load(tmp_path: Path) -> None:
    run = documents.read_run(local_file(tmp_path / "a.json"))
    made = sections.all_sections([run])
    html = page.to_html("t", made)
    assert [s.title for s in made][:2] == ["In short", "One request in time"]
    links, anchors = re.findall(r'<a href="#([^"]+)"', html), re.findall(r'<section id="([^"]+)"', html)
    assert links == anchors == [s.anchor for s in made]
    assert 'name="viewport"' in html
    assert "prefers-color-scheme: dark" in html
    drawn = html[html.index("<svg") :]
    assert plots.FOREGROUND not in drawn, "text of plots has the color of the page"
    assert plots.BACKGROUND not in drawn
    (speed,) = (s for s in made if s.title == "Tokens per second by concurrency")
    best = [(group.heading, group.rows[group.best or 0][0]) for group in page.groups(speed)]
    assert best == [(f"made, T {t}, at once 1", "overlapped K=8") for t in (0, 1)]
    marked = re.findall(r'<tr class="best"><td>([^<]+)</td>', html)
    assert marked[:2] == ["overlapped K=8 ★"] * 2


def test_a_report_begins_with_the_speed_up_and_its_interval(tmp_path: Path) -> None:
    run = documents.read_run(local_file(tmp_path / "a.json"))
    assert isinstance(run, documents.LocalRun)
    of = {s.method: s for s in run.summaries if s.temperature == 0}
    ratio = of["overlapped K=8"].ratio
    assert ratio is not None
    first = headline.in_short([run])
    assert first is not None
    ((figure, sentence),) = first.figures
    assert figure == f"{ratio.value:.2f} ×" == "2.50 ×"
    assert "over plain decoding, 95 % interval" in sentence or ratio.low == ratio.high
    assert "Over sequential K=4, the fastest of its mode: 1.75." in sentence


def test_what_was_measured_once_has_no_interval(tmp_path: Path) -> None:
    records = [record(m, unit, 0.0) for m in METHODS for unit in range(4)]
    alone = [r for r in records if r.unit == 0]
    for given, said in ((alone, True), (records, False)):
        data = documents.of_local({"sessions": 1, "dtype": "float32"}, {}, given, label="made")
        (tmp_path / "a.json").write_text(json.dumps(data), encoding="utf-8")
        run = documents.read_run(tmp_path / "a.json")
        assert isinstance(run, documents.LocalRun)
        table = sections.throughput([run]).rows
        speeds = {row[3]: row[5] for row in table[1:]}
        assert (set(speeds.values()) == {"not repeated"}) is said
        assert table[1][7] == "-", "plain over itself has no interval"
    assert forms.ends((153.0, 153.0)) == "not repeated"


def test_series_of_a_plot_differ() -> None:
    looks = [tuple(sorted(plots.series_style(number).items())) for number in range(63)]
    assert len(set(looks)) == 63


@pytest.mark.slow
def test_several_files_and_those_of_earlier_versions(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    names = ("local-heavy.json", "service-150m.json")
    runs = [
        documents.read_run(file) for file in (*(results / name for name in names), local_file(tmp_path / "a.json", 4))
    ]
    made = sections.all_sections(runs)
    titles = [section.title for section in made]
    assert "The service in a closed loop" in titles
    assert titles.count("Machine and models") == 1
    text = page.to_markdown("t", made, [None] * len(made))
    old = json.loads((results / names[0]).read_text(encoding="utf-8"))
    for summary in old["summaries"]:
        assert f"| {summary['method']} | {summary['decode_tokens_per_s']:.1f} |" in text
    for cell in json.loads((results / names[1]).read_text(encoding="utf-8"))["cells"]:
        assert f"| {cell['configuration']} | {cell['tokens_per_s']:.1f} |" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not what paceline bench"),
        ("{}", "'environment'"),
        ('{"environment": {}, "settings": {}, "models": {}}', "'requests'"),
        ('{"environment": {}, "settings": {"sessions": 1}, "models": {}, "requests": []}', "no requests"),
        ('{"environment": {}, "settings": {}, "models": {}, "cells": [{}]}', "'configuration'"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, content, said, capsys) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content, encoding="utf-8")
    assert main(["bench", "report", str(file), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "bad.json" in message
    assert said in message
    assert not (tmp_path / "out").exists()


def test_records_survive_the_file() -> None:
    before = record("overlapped K=8", 1, 0.5, category="tables", submitted_s=0.25)
    read = RequestRecord.from_json({**json.loads(json.dumps(before.to_json())), "later": 1})
    assert read.to_json() == before.to_json()
    assert (read.category, read.submitted_s, read.token_ids) == ("tables", 0.25, before.token_ids)
    assert [r.at_s for r in read.rounds] == pytest.approx([r.at_s for r in before.rounds], abs=5e-7)


def test_intervals_hold_what_was_drawn_and_are_the_same_each_time() -> None:
    summary = summarize([record("plain", unit, 0.0) for unit in range(8)])[0]
    low, high = summary.decode_interval
    assert low < summary.decode_tokens_per_s < high
    assert interval([1.0, 2.0, 3.0], sum) == interval([1.0, 2.0, 3.0], sum)
    assert interval([2.0], sum) == (2.0, 2.0)


def test_the_floor_is_bytes_over_bandwidth() -> None:
    target, draft = (step_bytes(str(path), "bfloat16") for path in (TARGET_DIR, DRAFT_DIR))
    assert 2 * 14e6 < (target["weight_bytes"] or 0) < 2 * 14.3e6, "14.2 M parameters, the output layer is the embedding"
    assert (draft["weight_bytes"] or 0) < 4e6
    assert step_bytes(str(TARGET_DIR), "float32")["weight_bytes"] == 2 * (target["weight_bytes"] or 0)
    assert step_bytes("some/hub-id", "bfloat16") == {}
    found = {"read_bytes_per_s": 2e9, "target": {"weight_bytes": 1_000_000, "kv_bytes_per_token": 500}}
    assert floor_s(found, "target", 2000) == pytest.approx(1e-3)
    assert floor_s(found, "draft", 1) is None
    assert floor_s({}, "target", 1) is None


def test_bandwidth_is_measured_where_it_is_asked_for() -> None:
    found = bandwidth(None, 1 << 24)
    assert found.read_bytes_per_s > 2e8
    assert found.copy_bytes_per_s > 1e8


def test_devices_are_those_that_a_method_is_given() -> None:
    assert {mode.value: devices(mode.value) for mode in Mode} == {"plain": 1, "sequential": 2, "overlapped": 2}
    assert [devices(mode) for mode in ("replicated", "colocated", "assisted", "continuous")] == [2, 2, 1, 1]
