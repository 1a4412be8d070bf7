"""The page at ``/`` in a real browser: ``paceline serve --local`` behind it, and a person's way through it."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from functools import partial

import pytest
from tests.security.conftest import digest, write_keys
from tests.web.browser import complaints, prefer, resize
from tests.web.support import edge_over, served

from paceline.cluster.ports import free_ports
from paceline.security.keys import KeyRing
from paceline_bench.processes import family

pytest.importorskip("selenium")
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

pytestmark = pytest.mark.slow

SERVE = """
from paceline.cli.local_service import serve_local
from paceline.config import DraftModel, LocalConfig, ServerConfig, TargetModel
from paceline.config.loading import EMBEDDED_DRAFT, EMBEDDED_TARGET, resolve

run = {"dtype": "float32", "compile": False}
target = TargetModel(path=resolve(EMBEDDED_TARGET), adaptive=False, max_sessions=4, **run)
draft = DraftModel(path=resolve(EMBEDDED_DRAFT), **run)
if __name__ == "__main__":
    serve_local(LocalConfig(target=target, draft=draft), ServerConfig(http_port=HTTP, grpc_port=GRPC))
"""
"""``paceline serve --local`` with a draft that is always used, however slow this machine is."""

CONTRAST = """
const parse = (color) => color.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
  .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const color = parse(getComputedStyle(at).backgroundColor);
    if (color.length === 3 || color[3] === 1) return color;
  }
  return [255, 255, 255];
};
const low = [];
for (const element of document.querySelectorAll("body *")) {
  const style = getComputedStyle(element);
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const drawn = element instanceof SVGElement;
  if (!own || drawn || element.disabled || element.matches("noscript, option") || !element.offsetParent) continue;
  const [a, b] = [light(parse(style.color)), light(behind(element))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) low.push(`${element.tagName}.${element.className}: ${element.textContent}`);
}
return low;
"""
"""Elements whose text has a contrast below 4.5 to what is behind it (WCAG 2.2, 1.4.3)."""


CHANGED = """
const fetched = window.fetch;
window.fetch = async (path, options) => {
  const reply = await fetched(path, options);
  if (!(options?.body ?? "").includes('"enabled":false')) return reply;
  const other = (part) => part.replace(/"token_ids":\\[(\\d+)/, (_, id) => `"token_ids":[${+id + 1}`);
  const changed = new TransformStream({ transform: (part, out) => out.enqueue(other(part)) });
  const body = reply.body.pipeThrough(new TextDecoderStream()).pipeThrough(changed);
  return new Response(body.pipeThrough(new TextEncoderStream()), reply);
};
"""
"""Changes the stream of plain decoding on its way: one token more of the vocabulary."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(URL, process) of the service; the process is the parent of both engines."""
    port, grpc_port = free_ports(2)
    script = tmp_path_factory.mktemp("serve") / "serve.py"
    script.write_text(SERVE.replace("HTTP", str(port)).replace("GRPC", str(grpc_port)))
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            lines = [process.stdout.readline() for _ in range(3)]  # HTTP, gRPC, ready
            assert lines[-1] == "ready\n", lines
            yield f"http://127.0.0.1:{port}/", process
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0


@pytest.fixture
def page(browser, server):
    """The page of the service, just opened, wide and in the light."""
    resize(browser, 1280, 900)
    prefer(browser, color_scheme="light")
    browser.get_log("browser")
    browser.get(server[0])
    until(browser, lambda: text(browser, "health") == "serving")
    return browser


def until(driver, condition, timeout_s=120):
    """What ``condition`` gives once it is true; an element that the page replaces meanwhile is looked up again."""
    wait = WebDriverWait(driver, timeout_s, poll_frequency=0.05, ignored_exceptions=[StaleElementReferenceException])
    return wait.until(lambda _: condition())


def text(driver, name):
    return driver.execute_script("return document.getElementById(arguments[0]).textContent", name)


def have_names(driver):
    """Whether each visible control has a name."""
    controls = driver.find_elements(By.CSS_SELECTOR, "input, select, textarea, button, [tabindex]")
    return all(control.accessible_name for control in controls if control.is_displayed())


def fill(driver, name, value):
    """Types a value into a field, as a person does."""
    field = driver.find_element(By.ID, name)
    field.clear()
    field.send_keys(value)


def run(driver, **fields):
    for name, value in fields.items():
        fill(driver, name, value)
    driver.find_element(By.ID, "run").click()


def verdict(driver):
    """The last words about a run."""
    until(driver, lambda: driver.find_element(By.ID, "run").is_enabled())
    return text(driver, "verdict")


def origins(driver, name):
    script = "return [...document.querySelectorAll(`#${arguments[0]} .token`)].map((one) => one.dataset.origin)"
    return driver.execute_script(script, name)


def figures(driver):
    """Name -> value of the figures above the texts."""
    words = "(name) => one.querySelector(name).innerText"
    script = f"[...document.querySelectorAll('#figures > div')].map((one) => ['dt', 'dd'].map({words}))"
    return dict(driver.execute_script(f"return {script}"))


def test_two_ways_to_one_text(page):
    assert page.find_element(By.ID, "model").text == "paceline/embedded-target"
    Select(page.find_element(By.ID, "mode")).select_by_value("sequential")  # the target waits: some tokens are drafted
    run(page, prompt="def read_file(path):\n", temperature="0.7", tokens="48", seed="3")
    assert "the same text: all " in verdict(page).lower()
    assert {"draft", "target"} <= set(origins(page, "overlapped"))
    assert set(origins(page, "plain")) == {"target"}
    assert text(page, "overlapped") == text(page, "plain") != ""
    assert text(page, "mode-name") == "Sequential"
    shown = figures(page)
    num_tokens, num_rounds = int(text(page, "overlapped-rate").split()[0]), int(shown["Rounds"].split()[0])
    assert shown["Tokens per verification"] == f"{num_tokens / num_rounds:.2f}"

    Select(page.find_element(By.ID, "mode")).select_by_value("overlapped")
    Select(page.find_element(By.ID, "order")).select_by_value("together")
    before = text(page, "plain")
    run(page)
    assert "the same text: all " in verdict(page).lower()
    assert text(page, "overlapped") == text(page, "plain") == before
    for figure in ("timeline", "tree", "lengths", "sessions"):
        until(page, lambda name=figure: page.find_elements(By.CSS_SELECTOR, f"#{name} svg[aria-label]"))
    assert page.find_elements(By.CSS_SELECTOR, "#timeline .verification")
    assert page.find_elements(By.CSS_SELECTOR, "#timeline .step")
    replicas = "return [...document.querySelectorAll('#replicas th')].map((row) => row.innerText)"
    assert page.execute_script(replicas) == ["target-0", "draft-0"]
    slider = page.find_element(By.ID, "round")
    slider.send_keys(Keys.HOME)
    assert text(page, "round-number").startswith("1 of ")
    assert "The first round" in text(page, "round-words")
    assert complaints(page) == []


def test_texts_that_differ_are_said_to(page):
    page.execute_script(CHANGED)
    run(page, tokens="8")
    assert verdict(page).startswith("The texts differ at token 1.")
    assert "bad" in page.find_element(By.ID, "verdict").get_attribute("class")


def test_it_fits_a_phone_in_light_and_dark(page):
    run(page, tokens="24")
    verdict(page)
    for width in (360, 1280):
        resize(page, width, 740)
        for scheme in ("light", "dark"):
            prefer(page, color_scheme=scheme)
            assert page.execute_script("return document.documentElement.scrollWidth") <= width
            assert page.execute_script(CONTRAST) == [], scheme
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 23)"
    page.execute_script("document.documentElement.style.setProperty('--soft', '#444b55')")
    assert page.execute_script(CONTRAST)  # what is too faint is found
    page.execute_script("document.getElementById('texts-title').style.width = '400vw'")
    assert page.execute_script("return document.documentElement.scrollWidth") > 1280


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(page):
    until(page, lambda: have_names(page))
    page.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    seen = []
    for _ in range(8):
        seen.append(page.switch_to.active_element.get_attribute("id"))
        page.switch_to.active_element.send_keys(Keys.TAB)
    assert seen[1:] == ["prompt", "temperature", "tokens", "seed", "mode", "order", "run"]
    assert page.find_element(By.ID, "verdict").get_attribute("aria-live") == "polite"


def test_a_refusal_is_shown_as_it_is_named(page):
    page.execute_script("document.getElementById('prompt').value = 'the '.repeat(9000)")
    run(page)
    until(page, lambda: page.find_element(By.ID, "error").is_displayed())
    assert text(page, "error").startswith("invalid_request_error: the prompt")
    assert "at most" in text(page, "error")


def test_it_asks_for_a_key_and_keeps_it_to_itself(browser, pipeline, tmp_path):
    keys = KeyRing(write_keys(tmp_path / "keys.yaml", {"name": "alice", "sha256": digest("key-of-alice")}))
    state = partial(asyncio.to_thread, pipeline.server_info)
    with served(edge_over(pipeline, keys=keys, status=state)) as url:
        browser.get(url)
        until(browser, lambda: browser.find_element(By.ID, "key-form").is_displayed())
        fill(browser, "key", "wrong" + Keys.ENTER)
        until(browser, lambda: text(browser, "error").startswith("authentication_error: "))
        fill(browser, "key", "key-of-alice" + Keys.ENTER)
        until(browser, lambda: text(browser, "health") == "serving")
        assert not browser.find_element(By.ID, "key-form").is_displayed()
        run(browser, tokens="4")
        assert "the same text" in verdict(browser).lower()
        stored = "return [localStorage.length, sessionStorage.length, document.cookie]"
        assert browser.execute_script(stored) == [0, 0, ""]
        browser.get("about:blank")


def engines(process):
    """Process ids of target and draft: the children that it has spawned, in the order of their starts."""
    found = [c for c in family(process.pid) if c.parent == process.pid and "spawn_main" in c.command]
    return [child.pid for child in sorted(found, key=lambda child: (child.started, child.pid))]


def test_the_draft_is_killed_and_the_text_goes_on(page, server):
    target, draft = engines(server[1])
    Select(page.find_element(By.ID, "order")).select_by_value("together")
    run(page, tokens="480", seed="5")
    until(page, lambda: origins(page, "overlapped"))
    os.kill(target, signal.SIGSTOP)  # so that the text is not at its end before the page has seen what happens
    try:
        os.kill(draft, signal.SIGKILL)
        until(page, lambda: page.find_element(By.ID, "draft-note").is_displayed())
    finally:
        os.kill(target, signal.SIGCONT)
    assert text(page, "draft-note").startswith("The draft is away")
    assert "goes on" in text(page, "draft-note")
    num_tokens = len(origins(page, "overlapped"))
    until(page, lambda: len(origins(page, "overlapped")) > num_tokens)
    assert "the same text: all " in verdict(page).lower()
    until(page, lambda: not page.find_element(By.ID, "draft-note").is_displayed())
    with urllib.request.urlopen(f"{server[0]}v1/status") as reply:
        assert b'"incarnation":1' in reply.read()
