"""Each example does what it says, on the embedded pair; the gRPC client against a scripted service."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from tests.support.fake_service import WORDS, FakeService
from tests.support.local import local_config
from tests.web.support import edge_over, served

from paceline.checkpoint.files import embedded_paths
from paceline.local import LocalPipeline

ROOT = Path(__file__).parents[2]
PROMPT = "def read_file(path):"


def example(name):
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pipeline():
    with LocalPipeline(local_config(*embedded_paths())) as started:
        yield started


def test_every_example_is_run_here_and_named_in_the_docs():
    text, docs = Path(__file__).read_text(), (ROOT / "docs" / "quickstart.md").read_text()
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert len(names) == 5
    assert {name for name in names if f'example("{name}")' not in text or f"examples/{name}.py" not in docs} == set()


def test_local(pipeline, capsys):
    text = example("local").complete(pipeline, PROMPT)
    printed = capsys.readouterr().out
    assert text
    assert printed.startswith(text)
    assert re.search(r"\n\d+ tokens, [\d.]+ tokens/s, \d+ of \d+ draft tokens accepted\n$", printed)


def test_batch(pipeline):
    module = example("batch")
    texts = module.complete_all(pipeline, module.PROMPTS)
    assert len(texts) == len(module.PROMPTS)
    alone = pipeline.generate(module.PROMPTS[0], max_tokens=16, temperature=0.7, seed=1).result.text
    assert texts[0] == alone


def test_structured_output(pipeline):
    module = example("structured_output")
    assert module.choose(pipeline, "def is_even(n):\n    return n % 2 ", ["== 0", "!= 0"]) in ("== 0", "!= 0")
    version = r'"[0-9]\.[0-9]\.[0-9]"'
    assert re.fullmatch(version, module.match(pipeline, "VERSION = ", version))


def test_openai_client(pipeline, capsys):
    with served(edge_over(pipeline)) as url:
        text = example("openai_client").complete(f"{url}/v1", PROMPT)
    assert text == pipeline.generate(PROMPT, max_tokens=48, temperature=0.0).result.text
    assert re.search(r"\n\d+ tokens of tests/target\n$", capsys.readouterr().out)


def test_streaming_client(capsys):
    module = example("streaming_client")
    with FakeService() as server:
        text = module.stream(server.address, PROMPT)
    assert text == "".join(WORDS)
    printed = capsys.readouterr().out
    assert printed.count(module.GREEN) == printed.count(module.PLAIN) == len(WORDS)
