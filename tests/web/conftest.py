"""One pipeline of thread workers for all tests here, its application, and OpenAI's own clients."""

from __future__ import annotations

import pytest
from tests.support.local import local_config
from tests.support.models import save_pair
from tests.web.chats import Scripted, save_chat, save_speaking_pair
from tests.web.support import edge_over, served

from paceline.checkpoint.chat import load_chat
from paceline.local import LocalPipeline


@pytest.fixture(scope="session")
def web_pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("web"))


def started(folder):
    return LocalPipeline(local_config(folder / "target", folder / "draft", max_sessions=8))


@pytest.fixture(scope="session")
def pipeline(web_pair):
    with started(web_pair) as running:
        yield running


@pytest.fixture(scope="session")
def speaking(tmp_path_factory):
    """A pipeline whose tokens can write JSON, and its chat template."""
    folder = save_speaking_pair(tmp_path_factory.mktemp("speaking"))
    with started(folder) as running:
        yield running, load_chat(str(folder / "target"))


@pytest.fixture(scope="session")
def at(speaking):
    """Its application."""
    pipeline, chat = speaking
    with served(edge_over(pipeline, chat=chat)) as url:
        yield url


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """(a service that says what it is told, its application)"""
    service = Scripted()
    with served(edge_over(service, chat=load_chat(str(save_chat(tmp_path_factory.mktemp("chat")))))) as at:
        yield service, at


@pytest.fixture(scope="module")
def browser():
    from tests.web.browser import chromium

    with chromium() as driver:
        yield driver


@pytest.fixture(scope="session")
def url(pipeline):
    with served(edge_over(pipeline)) as at:
        yield at


@pytest.fixture(scope="session")
def client(url):
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made
