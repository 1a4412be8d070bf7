"""Processes that tests start: forked from one that has imported torch and transformers, once for a whole run."""

import multiprocessing

context = multiprocessing.get_context("forkserver")
"""Its processes have the environment of the first of them: what a test sets later they are told as arguments."""
context.set_forkserver_preload(
    ["paceline.target.build", "paceline.draft.build", "transformers.models.llama.modeling_llama", "grpc"]
)
