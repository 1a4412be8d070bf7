"""Another engine on the CPU, in the environment that it is installed in: ``python peer_worker.py '{"engine": ...}'``.

``peers.py`` starts this file by its path; it imports nothing of Paceline, and the engine only once its threads are
bound. The argument is an object with the fields of ``peers.Start``. Each line of standard input is a unit of requests,
each line of standard output its answers (or the reason why there are none); the first says that the engine is up. What
libraries print goes to standard error.

All engines get what they need to answer fast, and what makes them comparable: bfloat16 or float32 weights and KV as
asked for, no prefix cache, no end-of-sequence token, temperature alone. llama.cpp reads a GGUF file as it is stored.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_LEN = 2048
"""Maximum tokens of a prompt and its answer, if the target's context allows."""
DTYPES = ("bfloat16", "float32")
"""Weights and KV that are asked for."""
Answer = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""From a unit to an answer for each of its prompts: ``token_ids``, and the ``sizes`` that came at ``times_s``."""


def openvino(start: dict[str, Any]) -> tuple[str, Answer]:
    """OpenVINO GenAI's continuous batching, with a draft model where tokens of it are asked for."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    precision = dict(zip(DTYPES, ("bf16", "f32"), strict=True))[start["dtype"]]
    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": len(start["cores"]),
        "ENABLE_CPU_PINNING": False,
    }
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = start["sessions"] * (MAX_LEN // 32)  # of 32 tokens
    scheduler.max_num_seqs = start["sessions"]
    scheduler.max_num_batched_tokens = 4096
    scheduler.enable_prefix_caching = False
    whole = dict(options, PERFORMANCE_HINT="LATENCY")
    if start["draft"]:
        whole["draft_model"] = genai.draft_model(_exported(start["draft"], start["cache"]), "CPU", **options)
    pipeline = genai.ContinuousBatchingPipeline(_exported(start["target"], start["cache"]), scheduler, "CPU", whole)
    number = 0

    def answer(unit: dict[str, Any]) -> list[dict[str, Any]]:
        nonlocal number
        handles: list[Any] = []
        answers: list[dict[str, Any]] = []
        began = time.perf_counter()
        for i, (prompt, max_tokens) in enumerate(zip(unit["prompts"], unit["max_tokens"], strict=True)):
            config = genai.GenerationConfig()
            config.max_new_tokens = max_tokens
            config.ignore_eos = True
            config.do_sample = unit["temperature"] > 0
            if config.do_sample:
                config.temperature = float(unit["temperature"])
                config.rng_seed = unit["seed"] + i
            if unit["draft_tokens"]:
                config.num_assistant_tokens = unit["draft_tokens"]
            number += 1
            handles.append(pipeline.add_request(number, ov.Tensor(np.array([prompt], np.int64)), config))
            answers.append({"token_ids": [], "sizes": [], "times_s": []})
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - began
            for handle, found in zip(handles, answers, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        _add(found, list(output.generated_ids), now)
        return answers

    return str(genai.__version__), answer


def _exported(checkpoint: str, cache: str) -> str:
    """The directory of a checkpoint in OpenVINO's own form, made once."""
    folder = Path(cache) / f"openvino-{Path(checkpoint).name}"
    if not (folder / "openvino_model.xml").is_file():
        import openvino as ov
        import torch
        from openvino_tokenizers import convert_tokenizer
        from optimum.intel import OVModelForCausalLM
        from transformers import AutoTokenizer

        # In float32, which holds bfloat16 weights to the bit; they are read in INFERENCE_PRECISION_HINT.
        model = OVModelForCausalLM.from_pretrained(
            checkpoint,
            export=True,
            compile=False,
            load_in_8bit=False,
            torch_dtype=torch.float32,
            trust_remote_code=False,
        )
        read = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
        tokenizer, detokenizer = convert_tokenizer(read, with_detokenizer=True)
        ov.save_model(tokenizer, folder / "openvino_tokenizer.xml")
        ov.save_model(detokenizer, folder / "openvino_detokenizer.xml")
        model.save_pretrained(folder)
    return str(folder)


def vllm(start: dict[str, Any]) -> tuple[str, Answer]:
    """Starts vLLM's engine, with a draft model if its tokens are requested."""
    import vllm

    config = json.loads((Path(start["target"]) / "config.json").read_text(encoding="utf-8"))
    max_len = min(MAX_LEN, config.get("max_position_embeddings", MAX_LEN))
    options: dict[str, Any] = {}
    if start["draft"]:
        options["speculative_config"] = {
            "method": "draft_model",
            "model": start["draft"],
            "num_speculative_tokens": start["draft_tokens"],
            "max_model_len": max_len,
        }
    engine = vllm.LLM(
        model=start["target"],
        dtype=start["dtype"],
        max_model_len=max_len,
        max_num_seqs=start["sessions"],
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_cache_memory_bytes=1 << 29,
        **options,
    ).llm_engine
    number = 0

    def answer(unit: dict[str, Any]) -> list[dict[str, Any]]:
        nonlocal number
        answers: dict[str, dict[str, Any]] = {}
        began = time.perf_counter()
        for i, (prompt, max_tokens) in enumerate(zip(unit["prompts"], unit["max_tokens"], strict=True)):
            hot = unit["temperature"] > 0
            sampling = vllm.SamplingParams(
                max_tokens=max_tokens,
                temperature=unit["temperature"],
                seed=unit["seed"] + i if hot else None,
                ignore_eos=True,
                detokenize=False,
            )
            number += 1
            answers[str(number)] = {"token_ids": [], "sizes": [], "times_s": []}
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                found = answers[output.request_id.partition("-")[0]]
                _add(found, list(output.outputs[0].token_ids)[len(found["token_ids"]) :], time.perf_counter() - began)
        return list(answers.values())

    return str(vllm.__version__), answer


def llama_cpp(start: dict[str, Any]) -> tuple[str, Answer]:
    """llama.cpp by the package llama-cpp-python, which compiles it for this processor; it drafts nothing."""
    import llama_cpp as lib

    lib.llama_backend_init()
    files = lib.llama_model_default_params()
    files.n_gpu_layers = 0
    if not (model := lib.llama_model_load_from_file(start["target"].encode(), files)):
        raise RuntimeError(f"{start['target']} cannot be read")
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_seq_max = MAX_LEN // 2 * start["sessions"], start["sessions"]
    options.n_threads = options.n_threads_batch = len(start["cores"])
    if not (context := lib.llama_init_from_model(model, options)):
        raise RuntimeError("no memory for its context")
    width = lib.llama_n_batch(context)
    batch = lib.llama_batch_init(width, 0, 1)

    def sampler_of(temperature: float, seed: int) -> Any:
        if temperature == 0:
            return lib.llama_sampler_init_greedy()
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed))
        return chain

    def fill(waiting: list[list[int]], known: list[int]) -> dict[int, int]:
        """Puts the tokens that wait into the batch, short sequences first; returns rows by the sequences that
        have none left."""
        rows, batch.n_tokens = {}, 0
        for i in sorted(range(len(waiting)), key=lambda i: len(waiting[i])):
            taken = waiting[i][: width - batch.n_tokens]
            del waiting[i][: len(taken)]
            for token in taken:
                row = batch.n_tokens
                batch.token[row], batch.pos[row], batch.logits[row] = token, known[i], False
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, i
                known[i] += 1
                batch.n_tokens += 1
            if taken and not waiting[i]:
                rows[i], batch.logits[batch.n_tokens - 1] = batch.n_tokens - 1, True
        return rows

    def answer(unit: dict[str, Any]) -> list[dict[str, Any]]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        began, count = time.perf_counter(), len(unit["prompts"])
        waiting, known = [list(prompt) for prompt in unit["prompts"]], [0] * count
        samplers = [sampler_of(unit["temperature"], unit["seed"] + i) for i in range(count)]
        answers: list[dict[str, Any]] = [{"token_ids": [], "sizes": [], "times_s": []} for _ in range(count)]
        while any(waiting):
            rows = fill(waiting, known)
            if status := lib.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode: {status}")
            for i, row in rows.items():
                token = lib.llama_sampler_sample(samplers[i], context, row)
                _add(answers[i], [token], time.perf_counter() - began)
                if len(answers[i]["token_ids"]) < unit["max_tokens"][i]:
                    waiting[i].append(token)
        for sampler in samplers:
            lib.llama_sampler_free(sampler)
        return answers

    return f"{lib.__version__}, {lib.llama_print_system_info().decode()}", answer


def _add(found: dict[str, Any], token_ids: list[int], now: float) -> None:
    if token_ids:
        found["token_ids"] += token_ids
        found["sizes"].append(len(token_ids))
        found["times_s"].append(now)


ENGINES = ("openvino", "vllm")
"""Engines that read a checkpoint's directory, and draft with a model."""
_STARTS = {"openvino": openvino, "vllm": vllm, "llama.cpp": llama_cpp}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: ends with a benchmark that is killed


def main() -> None:
    """Answers units until standard input ends."""
    _end_with_parent()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to it
    start = json.loads(sys.argv[1])
    os.sched_setaffinity(0, start["cores"])
    try:
        version, answer = _STARTS[start["engine"]](start)
        print(json.dumps({"version": version}), file=out)
        for line in sys.stdin:
            print(json.dumps({"answers": answer(json.loads(line))}), file=out)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out)


if __name__ == "__main__":
    main()
