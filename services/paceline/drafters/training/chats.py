"""Chats that a target writes itself: it gets the opening of a user's turn, and its continuation becomes the question.

A drafter has to guess the target's own text, and the supply is unlimited. ``FeatureCache`` makes the answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from paceline.checkpoint.chat import ChatTemplate
from paceline.errors import ConfigError

_BATCH = 64
_TEMPERATURE = 0.8
"""Temperature of the users' turns. At 1 a small model asks for nonsense."""
_MARK = "\x1a"
_LEAST_SHARE = 0.02
"""Minimum share of new prompts in a batch."""


def written_chats(
    target: PreTrainedModel,
    chat: ChatTemplate,
    count: int,
    longest: int,
    seed: int,
    path: Path,
    done: Callable[[int], None] = lambda count: None,
) -> list[tuple[int, ...]]:
    """Prompts of one user's message each, all different, as the template renders them.

    Args:
        target: writes them.
        chat: its template.
        count: prompts.
        longest: tokens of a prompt at most.
        seed: of the messages.
        path: file that keeps them, one a line; an interrupted run continues after its content.
        done: called with the number of prompts, after each batch.

    Raises:
        ConfigError: the template has no turns of users, or the target rarely ends one.
    """
    opening, _, closing = _rendered(chat, _MARK).partition(_MARK)
    first, last = chat.encode(opening), chat.encode(closing)
    room = longest - len(first) - len(last)
    if not first or not last or room < 1:
        raise ConfigError(
            f"--prompt-tokens is {longest}: {len(first) + len(last)} of a prompt are the chat template's, and a user's "
            "message needs more"
        )
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found: dict[tuple[int, ...], None] = {tuple(json.loads(line)): None for line in lines}
    end_ids = [last[0], *chat.tokenizer.eos_token_ids]
    path.parent.mkdir(parents=True, exist_ok=True)
    while len(found) < count:
        before = len(found)
        torch.manual_seed(seed * 1_000_003 + before)
        messages = _messages(target, chat, first, end_ids, room)
        prompts = [chat.encode(_rendered(chat, message)) for message in messages]
        new = [prompt for prompt in dict.fromkeys(prompts) if len(prompt) <= longest and prompt not in found]
        found |= dict.fromkeys(new)
        if len(found) - before < _LEAST_SHARE * _BATCH:
            raise ConfigError("--chats is given for a target that writes no messages of users: name --data")
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(prompt) + "\n" for prompt in new)
        done(min(count, len(found)))
    return [*found][:count]


def _rendered(chat: ChatTemplate, message: str) -> str:
    return chat.render([{"role": "user", "content": message}], None, {"add_generation_prompt": True})


@torch.no_grad()
def _messages(
    target: PreTrainedModel, chat: ChatTemplate, opening: Sequence[int], end_ids: Sequence[int], room: int
) -> list[str]:
    """Returns the users' turns that the target writes and ends."""
    ids = torch.tensor([opening] * _BATCH, device=target.device)
    written = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=room + 1,
        do_sample=True,
        temperature=_TEMPERATURE,
        top_k=0,
        top_p=1.0,
        eos_token_id=[*end_ids],
        pad_token_id=end_ids[0],
    )[:, len(opening) :].tolist()
    texts = []
    for row in written:
        end = next((i for i, token_id in enumerate(row) if token_id in end_ids), None)
        if end is not None:
            texts.append(chat.tokenizer.decode(row[:end]).strip())
    return [text for text in texts if text]
