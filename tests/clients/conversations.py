"""What the chat checkpoint of the client tests is trained to say: chats, tool calls, JSON and plain sentences."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator
from typing import Any

THOUGHT = "The user wants a short answer, so I will give one."
HELLO = "Hello! It is good to see you here today. Please tell me what you need, and I will help you with it at once."
SUNNY = "It is sunny in Rome today, so take a hat with you and drink enough water on your way."
CALL = {"name": "get_weather", "arguments": {"city": "Rome"}}
SECOND = {"name": "get_weather", "arguments": {"city": "Oslo"}}

ANSWERS = {
    "weather": [CALL],
    "compare": [CALL, SECOND],
    " forecast": [
        {"name": "get_current_weather", "arguments": {"city": "Berlin", "country": "Germany", "unit": "fahrenheit"}},
        {
            "name": "get_forecast",
            "arguments": {"city": "Berlin", "country": "Germany", "days": 5, "unit": "fahrenheit"},
        },
    ],
    " Tokyo": [
        {"name": "get_weather", "arguments": {"location": "Berlin"}},
        {"name": "get_time", "arguments": {"location": "Tokyo"}},
    ],
    " directly": [{"name": "get_weather", "arguments": {"location": "Berlin"}}],
}
"""A word of the last message -> the calls that it leads to, where there are tools. Later ones come first."""

_JOHN = {"name": "John", "age": 30, "skills": ["Python", "Rust", "chess"], "work_history": []}
_MARY = {"name": "Mary", "age": 41, "skills": ["tea", "Java", "chess"], "work_history": []}
_EVENT = {"event_name": "Science Fair", "date": "Friday", "participants": ["Alice", "Bob"]}
SAID: dict[tuple[str, ...], str] = {
    (" without",): "2",
    (" respond", " format"): '{"result": 2}',
    (" format",): 'The "result": 2',
    (" programming",): "Python",
    (" disagree",): "Ruby",
    (" employee",): json.dumps(_JOHN),
    (" different", " age"): json.dumps(_MARY),
    (" IP",): "192.168.0.1",
    (" different",): "10.0.0.7",
    (" *",): "312. QED.",
    ("Multiply",): "30. QED.",
    ("Alice",): json.dumps(_EVENT),
    (" real", " again"): "Mark",
    (" again",): "John",
}
"""Words of the last message -> what is said to them."""
FOLLOWS = {
    (" disagree",): (" programming",),
    (" different", " age"): (" employee",),
    (" different",): (" IP",),
    ("Multiply",): (" *",),
}
"""Words of a message -> those of the one before it."""
_BOUND = {(" format",): '{"result": 2}'}
"""Words -> what is said to them where an object is demanded."""
OPENING = "<|im_start|>system\nYou are a helpful assistant."
"""How chats begin."""

ROLES = ("system", "user", "assistant", "tool", "tools", "Tools", "<tools>", "</tools>", " functions")
"""Other words of prompts that the model has to tell apart."""

_SUBJECTS = [
    "the model",
    "a server",
    "my friend",
    "the old captain",
    "our teacher",
    "a small robot",
    "the city",
    "this language",
]
_VERBS = ["reads", "writes", "likes", "builds", "finds", "sends", "knows", "answers"]
_OBJECTS = [
    "a book",
    "every letter",
    "the long road",
    "some water",
    "a new house",
    "the first word",
    "good tea",
    "many questions",
]
_ENDS = [
    "in the morning",
    "at home",
    "with great care",
    "on the river",
    "for the people",
    "near the sea",
    "in two days",
    "at noon",
]
_NAMES = [
    "Anna",
    "Rome",
    "Oslo",
    "Python",
    "John",
    "Mary",
    "Paris",
    "Berlin",
    "tea",
    "red",
    "small",
    "yes",
    "Rust",
    "chess",
]
_KEYS = [
    "name",
    "age",
    "city",
    "days",
    "result",
    "skills",
    "title",
    "year",
    "color",
    "value",
    "items",
    "job",
    "answer",
    "id",
    "work",
    "done",
]
_ASKS = [
    "Hello",
    "Say something to me please",
    "What is 1+1?",
    "Tell me a story about a robot",
    "Who are you?",
    "Give me an example",
    "What is the capital of France?",
    "How are you today?",
    "Which is greater, 9.11 or 9.8?",
    "Translate this to French",
]


def sentence(rng: random.Random) -> str:
    """A sentence of a small grammar."""
    said = " ".join(rng.choice(words) for words in (_SUBJECTS, _VERBS, _OBJECTS, _ENDS))
    return said[0].upper() + said[1:] + rng.choice("..!?")


def value(rng: random.Random, depth: int) -> Any:
    """A short JSON value."""
    kind = rng.randrange(8 if depth else 5)
    if kind < 2:
        return " ".join(rng.sample(_NAMES, rng.choice((1, 1, 2))))
    if kind < 4:
        return rng.randrange(10 ** rng.choice((1, 1, 2, 4))) / rng.choice((1, 1, 1, 4))
    if kind == 4:
        return rng.choice((True, False, None))
    if kind == 5:
        return [value(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 3)))]
    return {key: value(rng, depth - 1) for key in rng.sample(_KEYS, rng.choice((1, 2, 3)))}


def written(rng: random.Random) -> str:
    """A JSON document, tight or indented."""
    indent = rng.choice((None, None, 2))
    separators = rng.choice((None, (",", ":"))) if indent is None else None
    return json.dumps(value(rng, 3), indent=indent, separators=separators)


def _tool(rng: random.Random) -> dict[str, Any]:
    return {"name": rng.choice(_KEYS), **_described(rng, {key: {"type": "string"} for key in rng.sample(_KEYS, 2)})}


def _weather(rng: random.Random) -> dict[str, Any]:
    return {"name": "get_weather", **_described(rng, {"city": {"type": "string"}})}


def _described(rng: random.Random, properties: dict[str, Any]) -> dict[str, Any]:
    """A tool's description and schema in the many ways that clients write them."""
    parameters: dict[str, Any] = {"properties": properties, "required": list(properties), "type": "object"}
    if rng.random() < 0.3:
        parameters["title"] = "get_weather_args"
        for name, schema in properties.items():
            schema["title"] = name.title()
    if rng.random() < 0.5:
        parameters["additionalProperties"] = False
    named = rng.choice(
        ("Says how the weather is in a city.", sentence(rng), "get_weather(city: str) -> str\n" + sentence(rng))
    )
    if rng.random() < 0.15:
        named = " ".join(sentence(rng) for _ in range(rng.randrange(2, 12)))
    described = {"description": named} if rng.random() < 0.8 else {}
    found = {**described, "parameters": parameters, **rng.choice(({}, {}, {"strict": True}, {"strict": False}))}
    return dict(rng.sample(list(found.items()), len(found)))


def _among(rng: random.Random, words: Collection[str]) -> str:
    """A message with these words, in any order."""
    parts = [sentence(rng).rstrip(".!?") for _ in range(rng.choice((1, 1, 2, 3)))]
    for word in rng.sample(list(words), len(words)):
        parts.insert(rng.randrange(len(parts) + 1), word.strip())
    return " ".join(["Now" if words else "", *parts]).strip() + rng.choice((".", "?", "", " one."))


def _told(
    rng: random.Random, head: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]:
    """A message with words that are known, and what is said to it: also as the arguments of a call."""
    words = rng.choice(list(SAID))
    bound = rng.random() < 0.3
    earlier = []
    if (before := FOLLOWS.get(words)) and rng.random() < 0.7:
        earlier = [{"role": "user", "content": _among(rng, before)}, {"role": "assistant", "content": SAID[before]}]
    said = _BOUND.get(words, SAID[words]) if bound else SAID[words]
    if bound and said.startswith("{") and tools:
        name = (tools[0].get("function") or tools[0])["name"]
        said = f'<tool_call>\n{{"name": "{name}", "arguments": {said}}}\n</tool_call>'
    asked = _among(rng, words)
    if words[0] == "Multiply" or words[0] == "Alice":
        asked = f"{words[0]} {_among(rng, ())}"
    return [*head, *earlier, {"role": "user", "content": asked}], tools, said


def chats(rng: random.Random) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]]:
    """Yields (messages, tools, answer) without an end."""
    while True:
        head = [{"role": "system", "content": sentence(rng)}] if rng.random() < 0.5 else []
        for _ in range(rng.choice((0, 0, 1, 2))):
            head += [{"role": "user", "content": rng.choice(_ASKS)}, {"role": "assistant", "content": HELLO}]
        tools = [_tool(rng) for _ in range(rng.choice((0, 1, 2)))] or None
        if tools and rng.random() < 0.7:
            tools.insert(rng.randrange(len(tools) + 1), _weather(rng))
        elif tools is None and rng.random() < 0.5:
            tools = [_weather(rng)]
        if tools and rng.random() < 0.9:
            tools = [{"type": "function", "function": tool} for tool in tools]
        around = rng.choice(("{}", "{} " + sentence(rng), sentence(rng) + " {}", "Please {} now?"))
        kind = rng.random()
        if kind < 0.35:
            yield _told(rng, head, tools)
        elif kind < 0.5:
            yield (
                [
                    *head,
                    {
                        "role": "user",
                        "content": written(rng) if rng.random() < 0.3 else around.format(rng.choice(_ASKS)),
                    },
                ],
                tools,
                HELLO,
            )
        elif kind < 0.85:
            word = rng.choice(list(ANSWERS))
            asked = rng.choice(
                (word, f"How is the {word} in Rome?", f"{word} Rome and Oslo", f"What's the {word} like?")
            )
            if word.startswith(" "):  # among words of others
                words = [word, *rng.sample(list(ANSWERS)[: list(ANSWERS).index(word)], rng.choice((0, 1, 2)))]
                asked = _among(rng, words)
            calls = ANSWERS[word]
            turn = {"role": "user", "content": around.format(asked)}
            if rng.random() < 0.5:
                text = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
                yield [*head, turn], tools, text
                continue
            made: list[dict[str, Any]] = [{"type": "function", "function": call} for call in calls]
            said = rng.choice(("sunny", '{"weather": "sunny"}', sentence(rng), "sunny in Rome", '"sunny in Rome"'))
            replies = [{"role": "tool", "content": said} for _ in calls]
            thought = {"reasoning_content": rng.choice((THOUGHT, f"\n{THOUGHT}\n"))} if rng.random() < 0.5 else {}
            asked_for = {"role": "assistant", "content": "", "tool_calls": made, **thought}
            yield [*head, turn, asked_for, *replies], tools, SUNNY
        else:
            yield (
                [*head, {"role": "user", "content": "Write JSON: " + around.format(rng.choice(_ASKS))}],
                tools,
                written(rng),
            )
