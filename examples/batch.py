"""A list of prompts at once: results in the order of the prompts.

python examples/batch.py
"""

from paceline.checkpoint.files import embedded_paths
from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.local import LocalPipeline

PROMPTS = ["def read_file(path):", "class Stack:", "import os\n\n\ndef remove(", "for line in "]


def complete_all(pipeline: LocalPipeline, prompts: list[str]) -> list[str]:
    """The continuation of each prompt."""
    return [result.text for result in pipeline.generate(prompts, max_tokens=16, temperature=0.7, seed=1)]


def main() -> None:
    """Completes all prompts with the embedded pair."""
    target, draft = map(str, embedded_paths())
    with LocalPipeline(LocalConfig(target=TargetModel(path=target), draft=DraftModel(path=draft))) as pipeline:
        for prompt, text in zip(PROMPTS, complete_all(pipeline, PROMPTS), strict=True):
            print(f"{prompt!r} -> {text!r}")


if __name__ == "__main__":
    main()
