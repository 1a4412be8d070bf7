"""What the chat checkpoint of the client tests is trained to say: chats, tool calls, JSON and plain sentences."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

THOUGHT = "The user wants a short answer, so I will give one."
HELLO = "Hello! It is good to see you here today. Please tell me what you need, and I will help you with it at once."
SUNNY = "It is sunny in Rome today, so take a hat with you and drink enough water on your way."
CALL = {"name": "get_weather", "arguments": {"city": "Rome"}}
SECOND = {"name": "get_weather", "arguments": {"city": "Oslo"}}

ANSWERS = {
    "weather": [CALL],
    "compare": [CALL, SECOND],
}
"""A word of the last message -> the calls that it leads to, where there are tools."""

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
    "again",
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
    described = {"description": named} if rng.random() < 0.8 else {}
    found = {**described, "parameters": parameters, **rng.choice(({}, {}, {"strict": True}, {"strict": False}))}
    return dict(rng.sample(list(found.items()), len(found)))


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
        if kind < 0.25:
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
        elif kind < 0.7:
            word = rng.choice(list(ANSWERS))
            asked = rng.choice(
                (word, f"How is the {word} in Rome?", f"{word} Rome and Oslo", f"What's the {word} like?")
            )
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
