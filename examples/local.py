"""Both engines in this process: text as it is decided, and what drafting brought.

python examples/local.py
python examples/local.py "def main(" --target Qwen/Qwen3-1.7B --draft Qwen/Qwen3-0.6B
"""

import argparse

from paceline.checkpoint.files import embedded_paths
from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.local import LocalPipeline


def complete(pipeline: LocalPipeline, prompt: str) -> str:
    """Prints the continuation of a prompt as it comes, and returns it."""
    generation = pipeline.generate(prompt, max_tokens=48, temperature=0.0)
    for chunk in generation:
        print(chunk.text, end="", flush=True)
    result = generation.result
    drafted = f"{result.speculation.accepted} of {result.speculation.drafted} draft tokens accepted"
    print(f"\n{result.usage.completion_tokens} tokens, {result.timing.tokens_per_s:.1f} tokens/s, {drafted}")
    return result.text


def main() -> None:
    """Loads the pair and completes one prompt."""
    target, draft = map(str, embedded_paths())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="def read_file(path):")
    parser.add_argument("--target", default=target, help="directory or Hugging Face id")
    parser.add_argument("--draft", default=draft, help="a smaller model with the same tokenizer")
    args = parser.parse_args()
    config = LocalConfig(target=TargetModel(path=args.target), draft=DraftModel(path=args.draft))
    with LocalPipeline(config) as pipeline:
        complete(pipeline, args.prompt)


if __name__ == "__main__":
    main()
