"""Chats at the edges: odd templates and prefixes, marks, stop strings, several choices; and never status 500."""

import contextlib
import itertools
import json
import random

import pytest
from tests.support import zoo
from tests.web.chats import Scripted
from tests.web.support import call, edge_over, events, served

from paceline.checkpoint.chat import load_chat
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.messages import Outcome
from paceline.router.admission import TargetInfo
from paceline.router.session import Session
from paceline.types import Cause, FinishReason, Round

USER = [{"role": "user", "content": "what does <think> mean? <tool_call>"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
READS_TOOLS = "{% if tools %}{% endif %}"
TURNS = READS_TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATES = {
    "plain": TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "no newline": TURNS + "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
    "opens the thought": TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "no option": TURNS + "<|im_start|>assistant\n<think>\n",
    "tools with marks": "{% if tools %}call as <tool_call>\n{<name>}\n</tool_call>{% endif %}"
    + TURNS
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "users alone": READS_TOOLS + "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{{ raise_exception('users alone') }}{% endif %}{% endfor %}",
    "nothing": READS_TOOLS + "{{ '' }}x",
}


class Speaking(Scripted):
    """Says tokens of a tokenizer, as a router's session sends them, in chunks of ``step`` tokens."""

    def __init__(self, folder):
        super().__init__()
        tokenizer = load_tokenizer(str(folder))
        self.info = TargetInfo(tokenizer, 4000, tokenizer.eos_token_ids)

    async def run(self, request, owner="", on_usage=None):
        self.requests.append(request)
        tokenizer, prompt = self.info.tokenizer, request.prompt
        ids = [*tokenizer.encode_text(self.says), tokenizer.eos_token_ids[0]]
        special = not request.sampling.skip_special_tokens
        session = Session(
            *("s", prompt, request.sampling, request.speculation),
            decode=tokenizer.decode,
            detokenizer=tokenizer.detokenizer(prompt, special=special),
            stop=request.stop,
            eos_token_ids=tokenizer.eos_token_ids,
        )
        session.open()
        for at in range(0, len(ids), self.step):
            some = tuple(ids[at : at + self.step])
            reason = FinishReason.STOP if at + self.step >= len(ids) else None
            round_ = Round(len(some), len(some) - 1, Cause.HIT)
            session.on_target(Outcome("s", 0, len(prompt) + at, some, (-0.5,) * len(some), round_, reason))
            actions = session.digest()
            for chunk in actions.chunks:
                yield chunk
            if actions.result is not None:
                yield actions.result
                return


@pytest.fixture(scope="module")
def speaking_chats(tmp_path_factory):
    """(service, address) of each template over a tokenizer whose marks are added tokens."""
    found = {}
    with contextlib.ExitStack() as stack:
        for name, template in TEMPLATES.items():
            folder = tmp_path_factory.mktemp("chat")
            zoo.copy_tokenizer("plain_marks", folder, chat_template=template)
            service = Speaking(folder)
            edge = edge_over(service, chat=load_chat(str(folder)))
            found[name] = service, stack.enter_context(served(edge)) + "/v1/chat/completions"
        yield found


def message_of(at, service, says, body, step=3):
    """(content, reasoning, calls) whole, once the stream is known to say the same in each of its choices."""
    service.says, service.step = says, step
    status, _, answer = call(at, body)
    assert status == 200, answer
    whole = [choice["message"] for choice in answer["choices"]]
    said = [{"content": "", "reasoning": "", "calls": []} for _ in whole]
    for event in events(at, body | {"stream": True})[:-1]:
        for choice in event["choices"]:
            delta, one = choice["delta"], said[choice["index"]]
            one["content"] += delta.get("content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            one["reasoning"] += delta.get("reasoning") or ""
            one["calls"] += [(c["function"]["name"], c["function"]["arguments"]) for c in delta.get("tool_calls") or ()]
    for message, one in zip(whole, said, strict=True):
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
        assert message.get("reasoning") == message.get("reasoning_content")
        assert (message["content"] or "", message.get("reasoning") or "", calls) == tuple(one.values())
    return said[0]["content"], said[0]["reasoning"], [(n, json.loads(a)) for n, a in said[0]["calls"]]


SAID = [
    ("plain", f"<think>hm</think>so{CALL}", {"tools": TOOLS}, ("so", "hm", [("f", {"a": "x"})])),
    ("plain", f"so{CALL}", {}, (f"so{CALL}", "", [])),
    ("plain", f"<think>hm</think>so STOP {CALL}", {"tools": TOOLS, "stop": ["STOP"]}, ("so ", "hm", [])),
    ("plain", f"<think>hm STOP</think>so{CALL}", {"tools": TOOLS, "stop": "STOP"}, ("", "hm ", [])),
    ("plain", f"{CALL}{CALL}", {"tools": TOOLS, "n": 3}, ("", "", [("f", {"a": "x"})] * 2)),
    ("plain", "so<|im_start|>on", {}, ("soon", "", [])),
    (
        "plain",
        "<think>h</think>so<|im_start|>",
        {"skip_special_tokens": False},
        ("<think>h</think>so<|im_start|>", "", []),
    ),
    ("no newline", f"so{CALL}", {"tools": TOOLS}, ("so", "", [("f", {"a": "x"})])),
    ("no newline", "\nso", {"tools": TOOLS}, ("\nso", "", [])),
    ("opens the thought", "hm</think>so", {"tools": TOOLS}, ("so", "hm", [])),
    ("opens the thought", "hm", {"n": 2}, ("", "hm", [])),
    ("opens the thought", "so", {"add_generation_prompt": False}, ("so", "", [])),
    ("no option", "hm</think>so", {}, ("so", "hm", [])),
    ("tools with marks", f"so{CALL}", {"tools": TOOLS}, ("so", "", [("f", {"a": "x"})])),
]


@pytest.mark.parametrize(("template", "says", "more", "wanted"), SAID)
def test_an_answer_is_what_its_parts_are(speaking_chats, template, says, more, wanted):
    service, at = speaking_chats[template]
    for step in (1, 4, 1000):
        assert message_of(at, service, says, {"messages": USER, **more}, step) == wanted


@pytest.mark.parametrize("stop", ['"f"', '"arguments"', '{"a"', '"x', '"}', "}}", "}\n", "</tool", "STOP"])
def test_a_call_that_a_stop_string_cuts_is_no_whole_call(speaking_chats, stop):
    """Also one of which a demanded answer has sent its name and the first of its arguments."""
    service, at = speaking_chats["plain"]
    service.says, service.step = f"{CALL}STOP", 2
    body = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "stop": stop}
    choice = call(at, body)[2]["choices"][0]
    calls = choice["message"].get("tool_calls", [])
    whole = stop in ("</tool", "STOP")
    assert len(calls) == (stop not in ('"f"', '"arguments"', '{"a"'))
    assert choice["finish_reason"] == ("tool_calls" if whole else "stop")
    assert [e["choices"][0]["finish_reason"] for e in events(at, body | {"stream": True})[:-1]][-1] == (
        choice["finish_reason"]
    )
    items = {"input": "a", "tools": [{"type": "function", **TOOLS[0]["function"]}], "tool_choice": "required"}
    answer = call(at.replace("chat/completions", "responses"), items | {"stop": stop})[2]
    said = [(one["arguments"], one["status"]) for one in answer["output"] if one["type"] == "function_call"]
    states = ["completed" if whole else "incomplete"] * len(calls)
    assert said == [(one["function"]["arguments"], state) for one, state in zip(calls, states, strict=True)]


CONTINUED = [
    ("<think>\nhalf", " of it</think>so", ("so", " of it", [])),
    ('<tool_call>\n{"name": "f", "argu', 'ments": {"a": "x"}}\n</tool_call>', ("", "", [("f", {"a": "x"})])),
    ("<tool_call>", "oops", ("oops", "", [])),
    ("<tool_call>", '{"name": "f"}</tool_call>', ("", "", [("f", {})])),
    ("half of", " it", (" it", "", [])),
    (CALL, "\nso", ("\nso", "", [])),
]


@pytest.mark.parametrize(("begun", "says", "wanted"), CONTINUED)
@pytest.mark.parametrize("template", ["plain", "no newline", "opens the thought"])
def test_an_answer_goes_on_where_the_last_message_ends(speaking_chats, template, begun, says, wanted):
    service, at = speaking_chats[template]
    messages = [*USER, {"role": "assistant", "content": begun}]
    body = {"messages": messages, "tools": TOOLS, "continue_final_message": True, "add_generation_prompt": False}
    assert message_of(at, service, says, body) == wanted


BEGINNINGS = ["", "so", "<think>", "</think>", "<tool_call>", '<tool_call>{"name": "f"', CALL, "<|im_end|>", " ", "é"]


def test_no_template_and_no_prefix_gives_an_internal_error(speaking_chats):
    rng = random.Random(5)
    for (service, at), begun in itertools.product(speaking_chats.values(), BEGINNINGS):
        service.says = "".join(rng.choices([*BEGINNINGS, "x", "\n"], k=4))
        for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
            flags = rng.choice(({}, {"add_generation_prompt": False}, {"continue_final_message": True}))
            messages = [*USER, *([{"role": "assistant", "content": begun}] if rng.random() < 0.7 else ())]
            status, _, answer = call(at, {"messages": messages, **more, **flags})
            assert status in (200, 400), answer


HARMONY = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>"


def test_of_gpt_oss_the_final_channel_alone_is_content(tmp_path, monkeypatch):
    """A checkpoint without a response template; its ends are marks, too."""
    monkeypatch.setitem(zoo._MAKERS, "harmony", lambda: zoo._byte_level(specials=HARMONY))
    monkeypatch.setattr(zoo, "MADE", (*zoo.MADE, "harmony"))
    template = READS_TOOLS + "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    zoo.copy_tokenizer("harmony", tmp_path, chat_template=template)
    service = Speaking(tmp_path)
    user = [{"role": "user", "content": "hi"}]
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    with served(edge_over(service, chat=load_chat(str(tmp_path)))) as url:
        at = f"{url}/v1/chat/completions"
        for step in (1, 3, 1000):
            final = f"{thought}<|channel|>final<|message|>Hello!"
            assert message_of(at, service, final, {"messages": user}, step) == ("Hello!", "hm", [])
            called = thought + '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}<|call|>'
            body = {"messages": user, "tools": TOOLS}
            assert message_of(at, service, called, body, step) == ("", "hm", [("f", {"a": "x"})])
            raw = message_of(at, service, final, {"messages": user, "skip_special_tokens": False}, step)
            assert raw == (final, "", [])
