"""The chat of the page at ``/`` in a real browser, over a model of random weights with a chat template."""

import asyncio
import time
from functools import partial

import pytest
from tests.web.browser import complaints, prefer, resize
from tests.web.chats import save_chat
from tests.web.support import edge_over, served
from tests.web.test_browser import CHANGED, CONTRAST, fill, have_names, text, until

from paceline.checkpoint.chat import load_chat
from paceline.target.engine import TargetEngine

pytest.importorskip("selenium")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

pytestmark = pytest.mark.slow

BODIES = """
window.bodies = [];
const fetched = window.fetch;
window.fetch = (path, options) => {
  if (options?.body) window.bodies.push(JSON.parse(options.body));
  return fetched(path, options);
};
"""
"""Keeps what the page sends."""

SCRIPTED = """
const fetched = window.fetch;
window.fetch = async (path, options) => {
  if (!options?.body) return fetched(path, options);
  const heads = { head_accepted: 0, lookup_accepted: 0, head: false, lookup: false };
  const round = { cause: "start", drafted: 2, accepted: 1, ...heads };
  const event = (delta, segments, more = {}) => `data: ${JSON.stringify({ choices: [
    { index: 0, delta, token_ids: segments.map((_, i) => i), speculation: { round, segments }, ...more }] })}\\n\\n`;
  const [thought, words] = arguments_of;
  const segments = (words) => words.match(/[^]{1,7}/g).map((text, i) => ({ text, drafted: i % 2 === 0 }));
  const result = { finish_reason: "stop", speculation: { timing: { tokens_per_s: 100 } } };
  const body = event({ reasoning_content: thought }, segments(`<think>${thought}</think>`))
    + event({ content: words }, segments(words)) + event({}, [], result) + "data: [DONE]\\n\\n";
  return new Response(body, { status: 200 });
};
"""
"""Answers each chat with a thought and a text."""

MARKDOWN = """# Title

Some **bold, *and em* text**, `code <b>`, ~~gone~~ and [a link](https://example.org/a_(b)).
A line more: https://example.org/x.

1. one
   - two
     deeper

   more
2. three

> quoted
> *words*

| a | b |
|---|:-:|
| 1 | `2` |

```python
def very_long_name_of_a_function(first_argument, second_argument, third_argument):
    return "<script>alert(1)</script>"
```
"""

SHOWN = (
    "<h3>Title</h3>"
    "<p>Some <strong>bold, <em>and em</em> text</strong>, <code>code &lt;b&gt;</code>, <del>gone</del> and "
    '<a href="https://example.org/a_(b)" rel="noopener noreferrer nofollow" target="_blank">a link</a>.\n'
    'A line more: <a href="https://example.org/x" rel="noopener noreferrer nofollow" target="_blank">'
    "https://example.org/x</a>.</p>"
    '<ol start="1"><li><p>one</p><ul><li><p>two\ndeeper</p></li></ul><p>more</p></li><li><p>three</p></li></ol>'
    "<blockquote><p>quoted\n<em>words</em></p></blockquote>"
    '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
    "<tbody><tr><td>1</td><td><code>2</code></td></tr></tbody></table></div>"
    "<pre><code>def very_long_name_of_a_function(first_argument, second_argument, third_argument):\n"
    '    return "&lt;script&gt;alert(1)&lt;/script&gt;"</code></pre>'
)

HOSTILE = [
    ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
    ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
    ("[a](data:text/html,x) [b]( JaVaScRiPt:x)", "<p>[a](data:text/html,x) [b]( JaVaScRiPt:x)</p>"),
    ("![a](http://example.org/x.png)", None),
    ("```<script>\nx", "<pre><code>x</code></pre>"),
    (
        "\\*no em\\* 2 * 3 * 4 snake_case_name __init__.py",
        "<p>*no em* 2 * 3 * 4 snake_case_name <strong>init</strong>.py</p>",
    ),
    ("**open `and *more", "<p>**open `and *more</p>"),
    ("- a\n- b\n\n\nplain", "<ul><li><p>a</p></li><li><p>b</p></li></ul><p>plain</p>"),
    ("* * *\n", "<hr>"),
    ("", ""),
]

RENDER = """
const [sources, done] = arguments;
import("/playground/markdown.js").then(({ blocksOf, elementOf }) => {
  done(sources.map((source) => {
    const box = document.createElement("div");
    const leaf = (text, places) => {
      const there = [...places].map((place) => source[place]).join("");
      if (there !== text) throw new Error(`${JSON.stringify(text)} is not ${JSON.stringify(there)}`);
      return [document.createTextNode(text)];
    };
    box.append(...blocksOf(source).map((block) => elementOf(source, block, leaf)));
    return box.innerHTML;
  }));
}).catch((error) => done(String(error)));
"""
"""HTML of sources; that each character knows its place is checked on the way."""

RANDOM = """
const [count, done] = arguments;
import("/playground/markdown.js").then(({ blocksOf, elementOf }) => {
  let state = 1;
  const draw = (n) => (state = (state * 48271) % 2147483647) % n;
  const parts = ["*", "**", "_", "__", "`", "```", "\\n", "\\n\\n", "  ", "    ", "- ", "1. ", "> ", "# ", "|", "|-|",
    "[a](", "https://e.org/", ")", "<b onclick=x>", "javascript:", "\\\\", "word", "é😀", "~~", "~~~", "\\t"];
  const blocks = "P,H3,H4,H5,H6,UL,OL,LI,BLOCKQUOTE,HR,PRE,DIV,TABLE,THEAD,TBODY,TR,TH,TD".split(",");
  const allowed = new Set([...blocks, "CODE", "STRONG", "EM", "DEL", "A"]);
  const attributes = new Set(["href", "rel", "target", "start", "class"]);
  for (let i = 0; i < count; i += 1) {
    const source = Array.from({ length: 1 + draw(40) }, () => parts[draw(parts.length)]).join("");
    const box = document.createElement("div");
    const leaf = (text, places) => {
      if ([...places].map((place) => source[place]).join("") !== text) throw new Error(JSON.stringify([source, text]));
      return [Object.assign(document.createTextNode(text), { places })];
    };
    box.append(...blocksOf(source).map((block) => elementOf(source, block, leaf)));
    const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
    for (let last = -1, node; (node = walker.nextNode()); last = node.places.at(-1)) {
      if (node.places.some((place, i) => place <= (i ? node.places[i - 1] : last))) throw new Error(source);
    }
    for (const one of box.querySelectorAll("*")) {
      const strange = one.getAttributeNames().some((name) => !attributes.has(name)) || !allowed.has(one.tagName);
      if (strange || (one.href && !/^https?:/.test(one.href))) throw new Error(source);
    }
    for (const word of ["word", "é😀"]) {
      const count = (text) => text.split(word).length;
      if (count(box.textContent) > count(source)) throw new Error(JSON.stringify(source));
    }
  }
  done("fine");
}).catch((error) => done(String(error)));
"""


@pytest.fixture(scope="module")
def chats(pipeline, tmp_path_factory):
    chat = load_chat(str(save_chat(tmp_path_factory.mktemp("chat"), response=False)))
    with served(edge_over(pipeline, chat=chat, status=partial(asyncio.to_thread, pipeline.server_info))) as url:
        yield url


@pytest.fixture
def page(browser, chats):
    """The page, just opened, wide and in the light, with short answers."""
    resize(browser, 1280, 900)
    prefer(browser, color_scheme="light")
    browser.get_log("browser")
    browser.get(chats)
    until(browser, lambda: text(browser, "health") == "serving")
    browser.find_element(By.CSS_SELECTOR, ".settings summary").click()
    fill(browser, "chat-tokens", "24")
    yield browser
    browser.get("about:blank")


def idle(page):
    until(page, lambda: page.find_element(By.ID, "send").is_displayed())
    return text(page, "chat-status")


def say(page, words):
    fill(page, "say", words + Keys.ENTER)
    return idle(page)


def said(page, role="assistant"):
    where = f".message.{role} > {'.prose' if role == 'assistant' else '.said'}"
    return page.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", where
    )


def press(page, label, at=-1):
    """Presses a button of a message."""

    def pressed():
        found = [one for one in page.find_elements(By.CSS_SELECTOR, ".actions button") if one.text == label]
        found[at].click()
        return True

    until(page, pressed)


def sent(page):
    """Roles and contents of the last request."""
    return [(one["role"], one["content"]) for one in page.execute_script("return window.bodies.at(-1).messages")]


def seeds(page):
    return page.execute_script("return window.bodies.map((one) => one.seed)")


def test_a_chat_with_its_history_compared_asked_again_and_edited(page):
    page.execute_script(BODIES)
    assert page.find_element(By.ID, "chat").is_displayed()
    assert not page.find_element(By.ID, "completion").is_displayed()
    fill(page, "chat-system", "be brief")
    Select(page.find_element(By.ID, "chat-mode")).select_by_value("sequential")
    assert say(page, "abc") == "The answer is complete."
    assert not page.find_element(By.ID, "welcome").is_displayed()
    (first,) = said(page)
    assert first.strip()
    assert sent(page) == [("system", "be brief"), ("user", "abc")]
    origins = "return [...new Set([...document.querySelectorAll('.prose .token')].map((one) => one.dataset.origin))]"
    assert {"draft", "target"} <= set(page.execute_script(origins))
    drawn = "#tree svg[aria-label], #lengths svg[aria-label]"  # some time after the text
    until(page, lambda: page.find_elements(By.CSS_SELECTOR, drawn))

    press(page, "Compare with plain")
    assert idle(page).startswith("✓ The same text: all 24 tokens are equal")
    assert page.execute_script("return window.bodies.at(-1).speculation") == {"enabled": False}
    assert len({*seeds(page)}) == 1

    say(page, "def")
    history = sent(page)
    assert history[1:] == [("user", "abc"), ("assistant", history[2][1]), ("user", "def")]
    assert history[2][1].strip() == first.strip()
    assert len(said(page)) == 2

    press(page, "Ask again")
    idle(page)
    assert sent(page) == history
    assert seeds(page)[-1] != seeds(page)[-2]
    press(page, "Edit", at=0)
    area = page.find_element(By.CSS_SELECTOR, ".editing textarea")
    area.clear()
    area.send_keys("other")
    press(page, "Ask again", at=0)
    idle(page)
    assert sent(page) == [("system", "be brief"), ("user", "other")]
    assert said(page, "user") == ["other"]
    assert len(said(page)) == 1

    page.find_element(By.ID, "clear").click()
    assert said(page) == said(page, "user") == []
    assert page.find_element(By.ID, "welcome").is_displayed()
    assert complaints(page) == []


def test_an_answer_that_plain_decoding_does_not_give_is_said_to_differ(page):
    say(page, "abc")
    page.execute_script(CHANGED)
    press(page, "Compare with plain")
    assert idle(page).startswith("The texts differ at token 1.")
    assert "bad" in page.find_element(By.CSS_SELECTOR, ".message .verdict").get_attribute("class")


def test_an_answer_is_stopped_and_what_has_come_stays(page, monkeypatch):
    step = TargetEngine.step  # one that takes its time: the answer is not at its end before it is stopped
    monkeypatch.setattr(TargetEngine, "step", lambda engine: (time.sleep(0.02), step(engine))[1])
    page.execute_script(BODIES)
    fill(page, "chat-tokens", "1500")
    fill(page, "chat-seed", "5")
    fill(page, "say", "abc" + Keys.ENTER)
    until(page, lambda: said(page) and said(page)[0])
    page.find_element(By.ID, "chat-stop").click()
    assert idle(page) == "Stopped."
    (stopped,) = said(page)
    assert stopped.strip()
    fill(page, "chat-tokens", "4")
    say(page, "def")
    assert sent(page)[1][1].strip() == stopped.strip()


def test_a_refused_question_goes_back_to_where_it_was_typed(page):
    fill(page, "chat-temperature", "0")
    page.execute_script("document.getElementById('say').value = 'a '.repeat(9000)")
    page.find_element(By.ID, "send").click()
    assert idle(page).startswith("No answer")
    assert text(page, "error").startswith("invalid_request_error: ")
    assert said(page, "user") == []
    assert page.execute_script("return document.getElementById('say').value.length") == 18000


def test_markdown_is_shown_and_html_in_it_is_text(page):
    sources = [MARKDOWN, *(source for source, _ in HOSTILE)]
    shown = page.execute_async_script(RENDER, sources)
    assert not isinstance(shown, str), shown
    assert shown[0] == SHOWN
    for (source, expected), found in zip(HOSTILE, shown[1:], strict=True):
        assert "<img" not in found, source
        assert expected is None or found == expected, source
    assert page.execute_async_script(RANDOM, 3000) == "fine"


def test_a_long_answer_of_marks_alone_is_shown_in_linear_time(page):
    sources = [mark * 20_000 for mark in ("*a ", "_a ", "[a](", "`a", "> ", "- ", "**a", "|")]
    shown = page.execute_async_script(RENDER, sources)  # within the time of a script
    assert not isinstance(shown, str), shown


def test_thoughts_colors_and_a_phone_in_light_and_dark(page):
    fill(page, "chat-tokens", "64")
    page.execute_script(SCRIPTED.replace("arguments_of", repr(["a *thought*", MARKDOWN])))
    say(page, "abc")
    assert page.find_element(By.CSS_SELECTOR, ".thought").is_displayed()
    assert "Title" not in page.find_element(By.CSS_SELECTOR, ".thought .prose").get_attribute("textContent")
    tokens = "return [...document.querySelectorAll('.message > .prose .token')]"
    tokens += ".map((one) => [one.textContent, one.dataset.origin])"
    colored = page.execute_script(tokens)
    assert "".join(piece for piece, _ in colored).startswith("Title")
    assert {origin for _, origin in colored} == {"draft", "target"}
    background = "return getComputedStyle(document.querySelector('.prose .token.draft')).backgroundColor"
    before = page.execute_script(background)
    page.find_element(By.ID, "chat-colors").click()
    assert page.execute_script(background) == "rgba(0, 0, 0, 0)" != before
    page.find_element(By.ID, "chat-colors").click()
    for width in (360, 1280):
        resize(page, width, 740)
        for scheme in ("light", "dark"):
            prefer(page, color_scheme=scheme)
            assert page.execute_script("return document.documentElement.scrollWidth") <= width
            assert page.execute_script(CONTRAST) == [], (scheme, width)
    until(page, lambda: have_names(page))


def test_the_completion_of_prompts_is_one_press_away(page):
    page.find_element(By.ID, "to-completion").click()
    assert page.find_element(By.ID, "ask").is_displayed()
    assert not page.find_element(By.ID, "chat").is_displayed()
    page.find_element(By.ID, "to-chat").click()
    assert page.find_element(By.ID, "say").is_displayed()
