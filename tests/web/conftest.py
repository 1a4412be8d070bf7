"""One pipeline of thread workers for all tests here, its application, and OpenAI's own clients."""

from __future__ import annotations

import pytest
from tests.support.models import save_pair
from tests.web.support import edge_over, served

from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.local import LocalPipeline


@pytest.fixture(scope="session")
def web_pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("web"))


@pytest.fixture(scope="session")
def pipeline(web_pair):
    run = {"dtype": "float32", "compile": False}
    config = LocalConfig(
        target=TargetModel(path=str(web_pair / "target"), adaptive=False, max_sessions=8, **run),
        draft=DraftModel(path=str(web_pair / "draft"), **run),
        worker="thread",
        pin_cores=False,
    )
    with LocalPipeline(config) as started:
        yield started


@pytest.fixture(scope="session")
def url(pipeline):
    with served(edge_over(pipeline)) as at:
        yield at


@pytest.fixture(scope="session")
def client(url):
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made
