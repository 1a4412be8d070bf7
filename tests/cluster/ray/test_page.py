"""The page at ``/`` of a service on Ray: who reads there is told that the draft was killed, and reads on."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
from tests.cluster.ray.conftest import ON_RAY, letters
from tests.cluster.ray.test_app import assert_all_free
from tests.support.local import plain_results
from tests.web.browser import chromium, complaints, resize

from paceline.types import SamplingParams
from paceline_bench.processes import family

pytest.importorskip("selenium")
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from tests.support.loops import finish
from tests.web.test_browser import origins, run, text, until, verdict

pytestmark = ON_RAY

PROMPT, SEED, NUM_TOKENS = letters(14), 7, 300
"""A text that has no end before its last token."""
POOLS = ["draft", "router", "router", "target"]


@pytest.fixture
def expected(app):
    """The text by plain decoding in this process."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=SEED)
    (result,) = plain_results(app.pair / "target", [(PROMPT, sampling)])
    assert len(result.token_ids) == NUM_TOKENS
    return result.text


def pids(role):
    """Process ids of one kind of replica among the processes of this application, which descend from this one."""
    return [process.pid for process in family(os.getpid()) if process.role == role]


def shown(page, state="up"):
    """The kinds of the replicas that the page shows in a state."""
    script = (
        "return [...document.querySelectorAll('#replicas tr')].map((row) => [...row.cells].map((c) => c.innerText))"
    )
    return sorted(name.split()[0] for name, found, *_ in page.execute_script(script) if found == state)


@contextlib.contextmanager
def crawling(pid):
    """A process that stands still; yields what lets it run for an instant."""

    def advance():
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)
        os.kill(pid, signal.SIGSTOP)

    os.kill(pid, signal.SIGSTOP)
    try:
        yield advance
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_draft_that_is_killed_is_shown_as_away_while_the_text_goes_on_to_its_end(app, expected):
    (target,), (_,) = pids("target"), pids("draft")
    with chromium() as page:
        resize(page, 1280, 900)
        page.get(f"{app.url}/")
        until(page, lambda: shown(page) == POOLS)
        assert text(page, "health") == "serving"
        Select(page.find_element(By.ID, "mode")).select_by_value("sequential")  # the target waits: tokens are drafted
        Select(page.find_element(By.ID, "order")).select_by_value("together")
        run(page, prompt=PROMPT, temperature="1", tokens=str(NUM_TOKENS), seed=str(SEED))
        until(page, lambda: {"draft", "target"} <= set(origins(page, "overlapped")))
        note = page.find_element(By.ID, "draft-note")
        with crawling(target) as advance:  # so that the text is not at its end before the page has seen what happens
            while not note.is_displayed():
                for pid in pids("draft"):  # a successor as well, until the page has looked in between
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.5)
                advance()
            assert text(page, "draft-note").startswith("The draft is away: ")
            assert text(page, "draft-note").endswith("The text goes on by plain decoding, unchanged.")
            assert "draft" not in shown(page)
            num_tokens = len(origins(page, "overlapped"))
        assert num_tokens < NUM_TOKENS
        assert f"the same text: all {NUM_TOKENS} tokens are equal" in verdict(page).lower()
        assert text(page, "overlapped") == text(page, "plain") == expected
        assert "rounds had no draft, and no token changed" in verdict(page)
        until(page, lambda: shown(page) == POOLS)
        assert not note.is_displayed()
        assert complaints(page) == []
    finish(assert_all_free(app))
