"""OpenAI's own client against a running service: `pip install openai`.

paceline serve --local                                # in another terminal
python examples/openai_client.py http://localhost:8000/v1
"""

import sys

from openai import OpenAI


def complete(base_url: str, prompt: str) -> str:
    """Prints the continuation of a prompt as it comes, then how many tokens it took, and returns it."""
    text = ""
    with OpenAI(base_url=base_url, api_key="none") as client:
        model = client.models.list().data[0].id
        options = {"include_usage": True}
        asked = client.completions.create(
            model=model, prompt=prompt, max_tokens=48, temperature=0.0, stream=True, stream_options=options
        )
        for event in asked:
            if event.choices:
                print(event.choices[0].text, end="", flush=True)
                text += event.choices[0].text
            if event.usage is not None:
                print(f"\n{event.usage.completion_tokens} tokens of {model}")
    return text


if __name__ == "__main__":
    complete(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1", "def read_file(path):")
