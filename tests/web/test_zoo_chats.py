"""Chats, stop strings and streamed text over tokenizers of every shape, each with its own template if it has one.

Mutants: a stop string that is looked for in each chunk alone; a detokenizer that decodes each token alone.
"""

import random

import pytest
from tests.support import zoo
from tests.support.rings import slow
from tests.web.support import edge_over, served
from tests.web.test_chat_edges import TEMPLATES, Speaking, message_of

from paceline.checkpoint.chat import load_chat

SAID = "Some naïve text, 世界 🙂👩‍👧:  two  spaces\n\tand "
TEXTS = (SAID, "a", " b ", "\n\n", "é", "👩‍👧", "12 345", "<not a mark>")
NAMES = [*zoo.MADE, *slow(zoo.PUBLISHED)]
USER = [{"role": "user", "content": "hi"}]


def chat_of(name, tmp_path):
    """The chat of a tokenizer, by its own template or by a plain one."""
    chat = load_chat(str(zoo.folder(name)))
    if chat is not None:
        return chat, zoo.folder(name)
    zoo.copy_tokenizer(name, tmp_path, chat_template=TEMPLATES["plain"])
    return load_chat(str(tmp_path)), tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_ends_before_its_stop_string_whole_and_streamed(name, tmp_path, monkeypatch):
    """In chunks of any size, where the stop string begins within a token and ends within another one."""
    chat, folder = chat_of(name, tmp_path)
    assert chat is not None
    monkeypatch.setattr("tests.web.test_chat_edges.load_tokenizer", lambda _: zoo.tokenizer(name))  # loaded once
    service = Speaking(folder)
    with served(edge_over(service, chat=chat)) as url:
        at = f"{url}/v1/chat/completions"
        for step in (1, 1000):
            content, _, calls = message_of(at, service, f"{SAID}the ENDing goes on", {"messages": USER}, step)
            expected = content.partition("ENDing")[0]
            assert (content.lstrip(), calls) == (f"{SAID}the ENDing goes on", [])
            stopped = message_of(at, service, f"{SAID}the ENDing goes on", {"messages": USER, "stop": ["ENDing"]}, step)
            assert stopped == (expected, "", [])


@pytest.mark.parametrize("name", NAMES)
def test_text_that_comes_token_by_token_is_that_of_all_tokens(name):
    """Texts with special tokens between them, which are shown or not."""
    tokenizer, rng = zoo.tokenizer(name), random.Random(name)
    prompt = tuple(tokenizer.encode_text("hi there"))
    added = sorted(tokenizer.added_tokens)
    for _ in range(6):
        texts = [tokenizer.encode_text(rng.choice(TEXTS)) for _ in range(4)]
        ids = [i for text in texts for i in (*text, rng.choice(added))]
        for special in (False, True):
            detokenizer = tokenizer.detokenizer(prompt, special=special)
            text = "".join([*map(detokenizer.add, ids), detokenizer.flush()])
            whole = tokenizer.decode((*prompt, *ids), special=special)
            assert whole == tokenizer.decode(prompt, special=special) + text, (ids, special)
