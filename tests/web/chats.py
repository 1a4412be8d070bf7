"""A chat model of the tests: a template, a response template, and a service that says what a test wants."""

import json
from typing import ClassVar

from tests.support.models import letters_tokenizer, save_pair
from tests.support.schemas import json_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from paceline.checkpoint.answer_formats import of_response
from paceline.checkpoint.answers import Reading
from paceline.checkpoint.chat import ChatTemplate
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.router.admission import TargetInfo
from paceline.types import (
    Cause,
    Chunk,
    FinishReason,
    RequestLimits,
    Result,
    Round,
    SpeculationStats,
    Timing,
    Usage,
)

TEMPLATE = """{%- for tool in tools or [] %}t{{ tool.function.name }}<3>{% endfor -%}
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('no such role') }}{% endif -%}
<1>{{ message.role }}<3>{{ message.content }}
{%- for call in message.tool_calls or [] %}c{{ call.function.name }}a{{ call.function.arguments.city }}{% endfor -%}
<2>
{%- endfor -%}
{%- if add_generation_prompt %}<1>assistant<3>{% if thinking %}<4>{% endif %}{% endif -%}"""

RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<1>assistant<3>",
    "fields": {
        "reasoning_content": {"open": "<4>", "close": "<5>", "content": "text"},
        "tool_calls": {
            "open_pattern": "<6>",
            "close": "<8>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<2>|<7>", "content": "text"},
    },
}
"""<4> thinks <5>, <6> calls <8>, <2> and <7> end."""


def save_chat(folder, response=True):
    """Gives a checkpoint's tokenizer the templates; returns the folder."""
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = TEMPLATE
    if response:
        tokenizer.response_template = RESPONSE
    tokenizer.save_pretrained(folder)
    return folder


SHORT = {str(i): -100 for text in ("<4>", " ", "\n") for i in json_tokenizer().encode(text)} | {"7": 20}
"""A bias of a model of random weights against thoughts and spaces, which it would not end, and for the end."""


def save_speaking_pair(folder):
    """A pair of random weights whose tokens can write JSON, with the templates; returns the folder."""
    save_pair(folder)
    for name in ("target", "draft"):
        backend = Backend.from_str(json_tokenizer().backend_json())
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<7>")
        tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
        tokenizer.save_pretrained(folder / name)
    return folder


class Bytes:
    """A tokenizer of characters: 0 to 9 are special, the others are code points less 20."""

    added_tokens_decoder: ClassVar[dict[int, AddedToken]] = {i: AddedToken(f"<{i}>", special=True) for i in range(10)}
    eos_token_id = 7

    def __len__(self):
        return 5000

    def get_vocab(self):
        return {chr(i): i for i in range(10, 5000)}

    def encode(self, text, add_special_tokens=True):
        ids, at = [], 0
        while at < len(text):
            special = text[at] == "<" and text[at + 2 : at + 3] == ">" and text[at + 1].isdigit()
            ids.append(int(text[at + 1]) if special else ord(text[at]))
            at += 3 if special else 1
        return ids

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=False):
        return "".join(chr(i) if i >= 10 else "" if skip_special_tokens else f"<{i}>" for i in ids)


class Scripted:
    """A service that says what it is told, a few tokens in each chunk."""

    ready = True
    limits = RequestLimits()

    def __init__(self):
        self.info = TargetInfo(Tokenizer("characters", Bytes()), 4000, (7,))
        self.says, self.requests = "", []
        self.finish_reason = FinishReason.STOP
        self.step = 3
        self.error = self.matched_stop = None

    async def run(self, request, owner="", on_usage=None):
        self.requests.append(request)
        ids = Bytes().encode(self.says)
        for at in range(0, len(ids), self.step):
            some = tuple(ids[at : at + self.step])
            text = Bytes().decode(some, skip_special_tokens=True)
            drafted = tuple(i % 2 == 0 for i in range(len(some)))
            usage = Usage(len(request.prompt), at + len(some), 0)
            last = at + len(some) == len(ids)
            yield Chunk(some, (-0.5,) * len(some), drafted, ((text, True),), Round(2, 1, Cause.HIT), usage, last=last)
        text = Bytes().decode(ids, skip_special_tokens=True)
        stats, usage = SpeculationStats(rounds=1, drafted=2, accepted=1), Usage(len(request.prompt), len(ids), 0)
        if self.error is not None:
            raise self.error
        yield Result(
            text, tuple(ids), (), self.finish_reason, usage, stats, Timing(0.1, 0.1, 1.0), 5, self.matched_stop
        )


def called(**arguments):
    """A call of ``weather`` as the model writes it."""
    return f"<6>{json.dumps({'name': 'weather', 'arguments': arguments})}<8>"


def told(answers, text, tools=None, *, begun="", added=None, cuts=(), fresh=True):
    """(content, reasoning, calls) of an answer of a format, fed in pieces that end at ``cuts``."""
    reading = Reading(answers.regions, added or {}, outside=answers.outside)
    parser = reading.parser(tools, begun, fresh=fresh)
    text, said, at = reading.marks.of_text(text), [], 0
    for cut in (*cuts, len(text)):
        said += parser.feed(text[at:cut])
        at = cut
    said += parser.feed("", ended=True)
    content, reasoning = ("".join(one.text for one in said if one.kind == kind) for kind in ("content", "reasoning"))
    return content, reasoning, [(one.call.name, json.loads(one.call.arguments)) for one in said if one.call]


def of_template(tokenizer, response):
    """A chat template whose answers are those of a response template."""
    return ChatTemplate(tokenizer, None, of_response(response))
