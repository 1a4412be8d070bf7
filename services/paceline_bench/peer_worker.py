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
import subprocess
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


LLAMA_CPP = """
import {createInterface} from "node:readline";
import {getLlama} from "node-llama-cpp";
const start = JSON.parse(process.argv[2]), count = start.cores.length, threads = {ideal: count, min: count};
const llama = await getLlama({gpu: false, build: "never", maxThreads: count, progressLogs: false, logLevel: "error"});
const model = await llama.loadModel({modelPath: start.target, gpuLayers: 0});
const context = await model.createContext(
  {contextSize: start.context, sequences: start.sessions, batchSize: start.context, threads});
const sequences = Array.from({length: start.sessions}, () => context.getSequence());
console.log(JSON.stringify(llama.systemInfo));
for await (const line of createInterface({input: process.stdin})) {
  const unit = JSON.parse(line);
  for (const sequence of sequences) await sequence.clearHistory();
  const began = performance.now();
  const answers = await Promise.all(unit.prompts.map(async (prompt, i) => {
    const found = {token_ids: [], sizes: [], times_s: []};
    const how = {temperature: unit.temperature, topK: 0, topP: 1, seed: unit.seed + i, yieldEogToken: true};
    for await (const token of sequences[i].evaluate(prompt, how)) {
      found.token_ids.push(token);
      found.sizes.push(1);
      found.times_s.push((performance.now() - began) / 1000);
      if (found.sizes.length === unit.max_tokens[i]) break;
    }
    return found;
  }));
  console.log(JSON.stringify(answers));
}
process.exit(0);
"""
"""One sequence of a context for each session. The package's binaries are llama.cpp's own; it loads the one that is for
the processor."""


def llama_cpp(start: dict[str, Any]) -> tuple[str, Answer]:
    """llama.cpp by the package node-llama-cpp, which npm has put into this environment's folder; it drafts nothing."""
    script = Path(sys.prefix) / "paceline-peer.mjs"  # there its import is found; the package starts it again
    script.write_text(LLAMA_CPP, encoding="utf-8")
    command = ["node", str(script), json.dumps(start | {"context": MAX_LEN // 2})]
    process = subprocess.Popen(
        command,
        cwd=sys.prefix,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_end_with_parent,
    )

    def receive() -> Any:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise RuntimeError(f"node ended with status {process.wait()}")
        return json.loads(line)

    def answer(unit: dict[str, Any]) -> list[dict[str, Any]]:
        assert process.stdin is not None
        process.stdin.write(json.dumps(unit) + "\n")
        process.stdin.flush()
        answers: list[dict[str, Any]] = receive()
        return answers

    return str(receive()), answer


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
