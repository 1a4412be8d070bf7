"""A client of a running service over gRPC: text as it comes, drafted parts in green.

paceline serve                                        # in another terminal
python examples/streaming_client.py localhost:9000
"""

import sys

from paceline import Client

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def stream(address: str, prompt: str) -> str:
    """Prints the continuation of a prompt, what a draft proposed in green, and returns it."""
    with Client(address) as client, client.generate(prompt, max_tokens=48, temperature=0.0) as running:
        for chunk in running:
            for text, drafted in chunk.segments:
                print(f"{GREEN}{text}{PLAIN}" if drafted else text, end="", flush=True)
        result = running.result
    print(f"\n{result.usage.completion_tokens} tokens, finish reason {result.finish_reason.value}")
    return result.text


if __name__ == "__main__":
    stream(sys.argv[1] if len(sys.argv) > 1 else "localhost:9000", "def read_file(path):")
