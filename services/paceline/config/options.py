"""Options of the engines, each declared here and nowhere else. Knows nothing of Ray Serve and of files.

    ModelOptions ──▶ TargetOptions
         └─────────▶ DraftOptions ◀── Growing ──▶ NgramOptions, SuffixOptions, PluginOptions, CascadeOptions,
                                                  HeadDraftOptions

YAML holds them as ``engine_kwargs``, ``LocalConfig`` with a path, and the builders take them inside a TargetSetup or
DraftSetup, which are what one engine is built from.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from paceline.config.base import Strict
from paceline.config.devices import Device, gpu_number
from paceline.config.loading import resolve
from paceline.errors.refusals import Fault
from paceline.types import MAX_DRAFT_TOKENS, restored

DType = Literal["auto", "float32", "bfloat16"]
"""``auto``: bfloat16 where the device multiplies it natively (AMX, AVX512-BF16, CUDA), else float32."""

Quantization = Literal["int8", "int4"]
"""Weights of linear layers as integers of 8 or 4 bits, rounded while they are loaded. CPUs: in blocks of 32 inputs with
a scale each, multiplied by inputs that are rounded to 8 bits. GPUs: ``int8`` alone, with one scale for each output."""


class ModelOptions(Strict):
    """Options of a model's execution. A new option of both models costs one edit: a field of this class."""

    dtype: DType = "auto"
    """The number format. ``auto``: bfloat16 where the device multiplies it natively, else float32."""
    compile: bool | Literal["auto"] = "auto"
    """On the CPU, compile ahead of time, once per machine and checkpoint (half a minute to two); on CUDA, compile what
    lies between the matrix products. ``auto``: where it can be."""
    background_compilation: bool | Literal["auto", "detached"] = "auto"
    """Serve a model that is to be compiled eagerly at first, and compile it meanwhile in a process of low priority;
    later sessions are compiled. ``auto``: if ``compile`` is ``auto``, on one rank, with memory for both. ``detached``:
    as ``auto``; the process finishes even if the engine ends first."""
    device: Device = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``. ``auto``: a GPU where there is one, else the CPU. ``cuda:N``: GPU N
    and, for several ranks, the GPUs after it; not under Ray, which chooses GPUs. A draft without a number
    takes the first GPU that its target leaves free."""
    quantization: Quantization | None = None
    """None: the weights as they are in the checkpoint, which may come quantized."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Ranks that share the weights and the KV cache, each a process with a core or an accelerator of its own."""
    cpu_threads: int = Field(default=1, ge=1, le=64)
    """Cores that share the products and the attention of a compiled bfloat16 model on the CPU; no bit depends on their
    number."""
    rank_timeout_s: float = Field(default=10.0, gt=0)
    """Longest delay of a rank at an exchange; a rank that is later counts as hung, and the engine as dead."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Record decoding and verification at start-up and replay them. ``auto``: on CUDA, where the model allows it."""
    max_cuda_graphs: int = Field(default=256, ge=1, le=1024)
    """Step shapes that are recorded, as far as the memory reaches; steps beyond run eagerly."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the checkpoint and its tokenizer (``auto_map``), with all rights of the
    service. False: such a checkpoint is refused, without a question."""
    attention: Literal["auto", "sdpa", "native", "triton"] = "auto"
    """The attention kernel (``model/attention/kernels.py``). ``auto``: native on CPUs and triton on GPUs that can run
    it, else sdpa."""

    @model_validator(mode="after")
    def _has_products_to_share(self) -> Self:
        if self.cpu_threads == 1:
            return self
        if self.tensor_parallel_size > 1:
            raise Fault(
                "cpu_threads",
                f"is {self.cpu_threads} beside tensor_parallel_size {self.tensor_parallel_size}: a model is shared by "
                "threads or by ranks, so one of them must be 1",
            )
        others = {"device": ("cuda", "auto' or 'cpu"), "dtype": ("float32", "auto' or 'bfloat16")}
        for key, (refused, allowed) in others.items():
            if (value := getattr(self, key)).startswith(refused):
                raise Fault("cpu_threads", f"is {self.cpu_threads} beside {key} {value!r}: {key} must be '{allowed}'")
        if self.compile is False:
            raise Fault("cpu_threads", f"is {self.cpu_threads} beside compile false: only compiled steps are shared")
        return self

    @model_validator(mode="after")
    def _can_compile_later(self) -> Self:
        if self.background_compilation is not True:
            return self
        if self.compile is False:
            raise Fault("background_compilation", "is true beside compile false: leave one out")
        if self.tensor_parallel_size > 1:
            raise Fault(
                "background_compilation",
                f"is true with tensor_parallel_size {self.tensor_parallel_size}, whose ranks are compiled before they "
                "serve: 'auto' or false is allowed",
            )
        return self


HeadMethod = Literal[
    "medusa",
    "mlp_speculator",
    "mtp",
    "eagle",
    "eagle3",
    "peagle",
    "dflash",
    "dspark",
    "jetspec",
    "early_exit",
    "speculative_streaming",
    "gemma4_assistant",
    "lookahead",
    "suffix",
    "draft_model",
]
"""The kinds of heads, by the names of vLLM's ``speculative_config``."""

_WITHOUT_WEIGHTS = ("lookahead", "suffix")
"""Methods without weights; the field of ``HeadOptions`` that has their options is of the same name."""
_OF_LAYERS = ("eagle3", "peagle", "dflash", "dspark", "jetspec")
_OF_TARGET_LAYERS = ("early_exit", "speculative_streaming")
"""Methods that draft with layers of the target itself."""
_OF_TARGET_KV = (*_OF_TARGET_LAYERS, "gemma4_assistant")
"""Methods that attend to the target's keys and values."""
_BESIDE = 8
"""Maximum tokens that a draft model with ``placement: auto`` proposes at once as a head."""
REMOTE_METHODS = ("mtp", "eagle", *_OF_LAYERS)
"""Methods that the states of each position suffice for, wherever they run."""


class LookaheadOptions(Strict):
    """Sizes of lookahead decoding, as W, N and G of its paper (Fu et al. 2024). A new option costs one edit: a field of
    this class."""

    window: int = Field(default=5, ge=1, le=32)
    """Columns of guesses, W: a step has W (N - 1) - 1 further tokens per session."""
    ngram: int = Field(default=4, ge=3, le=8)
    """Tokens of an n-gram, the one that it is found by included: at most N - 1 are proposed from one."""
    guesses: int = Field(default=5, ge=1, le=32)
    """N-grams kept for each first token; the least recently seen are dropped."""

    @property
    def num_tokens(self) -> int:
        """Further tokens that a step computes for one session."""
        return self.window * (self.ngram - 1) - 1


class SuffixMatching(Strict):
    """Options of suffix decoding: what it matches, and how far it proposes from a match (Oliaro et al. 2024). A new
    option costs one edit: a field of this class."""

    max_tree_depth: int = Field(default=24, ge=1, le=256)
    """The longest match, in tokens."""
    min_match: int = Field(default=1, ge=1, le=256)
    """The shortest match, in tokens."""
    max_spec_factor: float = Field(default=4.0, gt=0, le=64)
    """Tokens that are proposed for each token of the context that matches."""
    min_token_prob: float = Field(default=0.1, ge=0, le=1)
    """The least frequency of a candidate among all that have followed the match."""
    shared_tokens: int = Field(default=0, ge=0, le=1 << 24)
    """Tokens of outputs that are kept for other sessions of the same ``cache_salt``, about 0.4 KB each. 0: none, as
    sessions then learn nothing of one another."""
    corpus: list[str] = Field(default_factory=list)
    """Text files (``.jsonl``: one text or one list of token ids per line), read at start-up, that all sessions may be
    continued from, whatever their salt."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match > self.max_tree_depth:
            depth = self.max_tree_depth
            raise Fault("min_match", f"is {self.min_match}: it must be at most max_tree_depth, which is {depth}")
        return self


class HeadOptions(Strict):
    """A head: a drafter inside each target replica. The keys are named as in vLLM's ``speculative_config``. A new
    option of all heads costs one edit: a field of this class."""

    method: HeadMethod
    """``draft_model``: a smaller model with the target's tokenizer, in the target's process. ``early_exit``: the first
    layers of the target itself. ``speculative_streaming``: its last layers, on rows with weights of their own.
    ``gemma4_assistant``: the drafter that Google publishes for each Gemma 4.
    ``lookahead``: n-grams that the target makes up on rows that ride in its steps. ``suffix``: what followed the
    longest end of the text before. The others read the target's hidden states."""
    model: str | None = Field(default=None, min_length=1)
    """Directory of the head's checkpoint, or an id that transformers resolves; for ``early_exit`` an exit head that
    ``paceline train-head early_exit`` writes. None: the target's own files suffice; for ``mtp``, ``early_exit``,
    ``lookahead`` and ``suffix`` only."""
    boundaries: list[int] | None = Field(default=None, min_length=1)
    """Hidden states to read instead of the ones that the checkpoint names (``eagle3``, ``peagle``, ``dflash``,
    ``dspark``, ``jetspec``): b for the residual stream before layer b, the number of layers for the stream after the
    last one. ``early_exit`` needs one: the layers below it draft; None: its exit head's."""
    num_speculative_tokens: int = Field(default=4, ge=1, le=MAX_DRAFT_TOKENS)
    """Maximum tokens that the head proposes in a round. With ``adaptive`` it proposes only tokens with positive
    expected gain."""
    lookahead: LookaheadOptions | None = None
    """Sizes of method ``lookahead``. None: the defaults."""
    suffix: SuffixMatching | None = None
    """Texts of method ``suffix``. None: the session's own."""
    probe: bool = True
    """Test the head when the target starts, on some text that the target writes. A head that predicts almost none of
    it is refused. A warning names a setting with which the head would predict more. False: no test. Draft models, early
    exits, streams, Gemma 4's drafter, lookahead and suffixes are not tested."""
    probe_file: str | None = Field(default=None, min_length=1)
    """A text file from whose first four paragraphs the target goes on for this. None: sentences of our own."""

    @property
    def source(self) -> str | None:
        """Directory or id of the checkpoint. None: it comes with the target's."""
        return None if self.model is None else resolve(self.model)

    def __str__(self) -> str:
        if self.method == "early_exit" and self.boundaries and self.model is None:
            return f"early_exit at {self.boundaries[0]}"
        return self.method if self.model is None else f"{self.method} {self.model}"

    @model_validator(mode="after")
    def _of_method(self) -> Self:
        if self.method == "early_exit":
            self._check_exit()
        elif self.method in _WITHOUT_WEIGHTS:
            if self.model is not None:
                raise Fault("model", f"is {self.model!r} beside method {self.method!r}, which has no weights")
        elif self.method != "mtp" and self.model is None:
            raise Fault("model", f"is null: method {self.method!r} needs the directory or id of its checkpoint")
        for method in _WITHOUT_WEIGHTS:
            if getattr(self, method) is not None and self.method != method:
                raise Fault(method, f"is given beside method {self.method!r}: it is for method {method!r}")
        choosing = (*_OF_LAYERS, "early_exit")
        if self.boundaries is not None and self.method not in choosing:
            raise Fault(
                "boundaries",
                f"is {self.boundaries} beside method {self.method!r}: only {', '.join(choosing)} have them to choose",
            )
        if self.probe_file is not None and not (self.probe and self.probed):
            why = "probe false" if self.probed else f"method {self.method!r}, which is not asked"
            raise Fault("probe_file", f"is {self.probe_file!r} beside {why}: leave it out")
        return self

    @property
    def probed(self) -> bool:
        """True if a head of this method can be asked about what its target writes."""
        return self.method not in ("draft_model", *_OF_TARGET_KV, *_WITHOUT_WEIGHTS)

    def _check_exit(self) -> None:
        if self.boundaries is None and self.model is not None:
            return
        if self.boundaries is None or len(self.boundaries) != 1 or self.boundaries[0] < 1:
            raise Fault("boundaries", f"is {self.boundaries}: method 'early_exit' needs one, of at least 1")


class HintOptions(Strict):
    """Hints to overlapped drafts while the target's upper layers run (Mirror speculative decoding): the likeliest
    tokens of an early exit, which the draft then grows below sooner. The text does not depend on them."""

    boundary: int = Field(ge=1)
    """Layers below it run before the hint, by the final norm and the LM head; fewer than the target has."""
    model: str | None = Field(default=None, min_length=1)
    """Directory of an exit head of that boundary, which ``paceline train-head early_exit`` writes, or an id that
    transformers resolves: it makes of the state what the final norm is to have. None: that has the state as it is."""
    top: int = Field(default=8, ge=1, le=64)
    """Tokens for each place of a proposal."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Weight w of a hint: an outcome counts with q^(1 - w) e^w, q the draft's probability, e the hint's."""

    @property
    def head(self) -> HeadOptions | None:
        """The exit head, as if it drafted; None: there is none."""
        if self.model is None:
            return None
        return HeadOptions(method="early_exit", model=self.model, boundaries=[self.boundary])


class TargetOptions(ModelOptions):
    """Options of a target engine. A new option costs one edit: a field of this class."""

    max_sessions: int = Field(default=16, ge=1, le=1024)
    """Sessions that are in progress at once on one replica; further ones wait."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest context in tokens. None: what the target was trained for."""
    max_step_tokens: int = Field(default=256, ge=32, le=65536)
    """Tokens of one forward, prefill chunks and proposals together."""
    batch_invariant: Literal["auto", "require", "off"] = "auto"
    """Compare the bits of verification and of decoding when the target starts. ``auto``: and warn where they differ;
    ``require``: and refuse to start then; ``off``: start sooner, and promise nothing."""
    adaptive: bool = True
    """Verify the draft tokens per step with positive expected gain by measured times, and use no draft where none
    have. False: always as many as a request allows."""
    tree_verification: Literal["auto", "off"] = "auto"
    """Verify alternative tokens in addition to the likeliest one of a position. ``auto``: with ``adaptive``, where
    they have positive expected gain; ``off``: chains only. Sessions under the rejection rule always have chains."""
    kv_pages: int | None = Field(default=None, ge=1)
    """KV pages of 64 tokens. None: kv_fraction, else enough for max_sessions at 1024 positions, or one at
    max_model_len."""
    kv_fraction: float | None = Field(default=None, gt=0, le=1)
    """Instead of kv_pages: the share of the memory that weights and workspace leave free which becomes KV pages."""
    heads: list[HeadOptions] = Field(default=[], max_length=8)
    """Drafters inside the target replica. A session whose draft has nothing, or that has no draft, is given the tokens
    of the first one that is ready for it."""
    mtp_modules: Literal["auto", "off"] = "auto"
    """MTP modules in the target's own files. ``auto``: with ``adaptive`` they are a head if no other is configured,
    here or in the draft pool; where that is impossible, the target runs without them, and the log says why. ``off``:
    only the heads of ``heads`` draft."""
    hints: HintOptions | None = None
    """Hints to the drafts while a step runs. None: none, and nothing is computed for them."""

    @model_validator(mode="after")
    def _fits_hints(self) -> Self:
        if self.hints is None:
            return self
        if self.tensor_parallel_size > 1:
            raise Fault(
                "hints", f"needs whole layers while tensor_parallel_size is {self.tensor_parallel_size}: 1 is allowed"
            )
        if self.quantization is not None:
            raise Fault("hints", f"needs plain weights while quantization is {self.quantization!r}: null is allowed")
        return self

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.kv_pages is not None and self.kv_fraction is not None:
            raise Fault("kv_fraction", f"is {self.kv_fraction} while kv_pages is {self.kv_pages}: give one of them")
        return self

    @model_validator(mode="after")
    def _fits_heads(self) -> Self:
        if sum(head.method == "lookahead" for head in self.heads) > 1:
            raise Fault("heads", "has method 'lookahead' more than once: one is allowed")
        for head in self.heads:
            needed = (head.lookahead or LookaheadOptions()).num_tokens + 1
            if head.method == "lookahead" and needed > self.max_step_tokens:
                raise Fault("max_step_tokens", f"is {self.max_step_tokens}: method 'lookahead' needs {needed} at least")
        method = next((head.method for head in self.heads if head.method in _OF_TARGET_KV), None)
        if method is None:
            return self
        if self.tensor_parallel_size > 1:
            raise Fault(
                "tensor_parallel_size",
                f"is {self.tensor_parallel_size} beside a head of method {method!r}, which needs whole layers: "
                "1 is allowed",
            )
        method = next((head.method for head in self.heads if head.method in _OF_TARGET_LAYERS), None)
        if method is not None and self.quantization is not None:
            raise Fault(
                "quantization",
                f"is {self.quantization!r} beside a head of method {method!r}, whose layers are plain weights: "
                "null is allowed",
            )
        return self


class Growing(Strict):
    """Options of how any drafter grows its speculation trees. A new option of all drafters costs one edit: a field of
    this class."""

    tree_budget: int = Field(default=256, ge=1, le=4096)
    """Nodes kept per session beyond the context."""
    tree_step_tokens: int | None = Field(default=None, ge=1, le=1024)
    """Tree nodes in one step, all sessions together. None: 64 for n-grams; for a model, the number that costs little
    more per forward than one, measured at start-up."""
    fan_out: int = Field(default=6, ge=1, le=32)
    """F, alternative next tokens prepared at a position."""
    min_path_prob: float = Field(default=0.02, gt=0, lt=1)
    """Best-first growth leaves alone what the text goes through with a lower probability before the next outcome. Lower
    where a step of the draft takes several milliseconds on a device of its own: fewer rounds then begin without a
    proposal. Every node also costs its target some microseconds."""


class DraftOptions(Growing, ModelOptions):
    """Options of the engine of a draft model. A new option costs one edit: a field of this class."""

    max_sessions: int | None = Field(default=None, ge=1, le=16384)
    """Sessions that the KV pages are sized for; one draft may serve several targets. None: the target's number."""
    draft_top_m: int = Field(default=256, ge=1, le=65536)
    """Candidates of the distribution that are ranked; the rest of its tail is never proposed. Where the draft shares
    the target's noise and a native pass on the CPU finds them, ``fan_out`` candidates of the whole vocabulary are
    enough."""
    parallel_tokens: int | None = Field(default=None, ge=1, le=MAX_DRAFT_TOKENS)
    """Tokens that a PARD model predicts with one forward. None: 8 if the checkpoint is one (its config.json names a
    ``pard_token``), else 1."""
    vocabulary: Literal["same", "shared"] = "same"
    """``same``: a draft whose tokenizer differs from the target's is refused. ``shared``: such a draft proposes the
    tokens that both have; it is refused if these are too few."""
    placement: Literal["apart", "auto"] = "apart"
    """``apart``: replicas of their own, which draft ahead. ``auto``: each target also loads the model as a head, and
    each load is served in the way measured to be faster: by separate drafts, or without them, by the head where it has
    positive expected gain. In ``paceline.local`` an idle draft's cores share the target's products."""

    @model_validator(mode="after")
    def _has_the_tokens_of_a_head(self) -> Self:
        if self.placement == "auto" and self.vocabulary != "same":
            raise Fault(
                "placement",
                f"is 'auto' beside vocabulary {self.vocabulary!r}: a draft model in the target has the target's "
                "tokenizer, so one must be 'apart' or the other 'same'",
            )
        return self


class NgramOptions(Growing):
    """Options of the n-gram drafter, which copies continuations from earlier occurrences of the last tokens in the
    session's own context. A new option costs one edit: a field of this class."""

    min_match: int = Field(default=1, ge=1, le=16)
    """The shortest suffix that is looked up, in tokens."""
    max_match: int = Field(default=4, ge=1, le=16)
    """The longest suffix that is looked up, in tokens; longer ones are tried first."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match > self.max_match:
            raise Fault("min_match", f"is {self.min_match}: it must be at most max_match, which is {self.max_match}")
        return self


class SuffixOptions(Growing, SuffixMatching):
    """Options of the suffix drafter, which continues the longest end of the text that has occurred before, in the
    session's own context, in outputs of other sessions, or in a corpus."""


class PluginOptions(Growing):
    """Options of a drafter that an installed package offers as an entry point of the group ``paceline.drafters``."""

    drafter: str = Field(min_length=1)
    """Name of the entry point."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""


class CascadeDrafter(Strict):
    """One drafter of a cascade."""

    kind: Literal["model", "ngram", "suffix"] = "model"
    model: str | None = Field(default=None, min_length=1)
    """Directory of the checkpoint of a draft model, or an id that transformers resolves."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The engine_kwargs of a pool of this kind of drafter, without the cascade's own."""

    def full_options(self, cascade: CascadeOptions) -> DraftOptions | NgramOptions | SuffixOptions:
        """Returns the options of this drafter, including the ones that it shares with the cascade."""
        kinds: dict[str, type[DraftOptions | NgramOptions | SuffixOptions]]
        kinds = {"model": DraftOptions, "ngram": NgramOptions, "suffix": SuffixOptions}
        return kinds[self.kind](**self.options, **{key: getattr(cascade, key) for key in Growing.model_fields})

    @model_validator(mode="after")
    def _of_kind(self) -> Self:
        if (self.model is None) == (self.kind == "model"):
            allowed = "needs the directory or id of its checkpoint" if self.model is None else "has none"
            raise Fault(
                "model", f"is {'null' if self.model is None else repr(self.model)}: kind {self.kind!r} {allowed}"
            )
        for key in (*Growing.model_fields, "max_sessions", "tensor_parallel_size", "placement"):
            if key in self.options:
                raise Fault("options", f"has {key}: the drafters of a cascade share the cascade's own, in one process")
        return self


class CascadeOptions(Growing):
    """Options of drafters that draft together in one replica, the largest one first. A new option costs one edit: a
    field of this class."""

    drafters: list[CascadeDrafter] = Field(min_length=2, max_length=4)
    """Each verifies the guesses of the next one, so all but the last are draft models."""
    lengths: list[int] | None = None
    """Tokens, 1 to 16, that the next drafter guesses for one forward: an entry for each drafter but the last. None: 4
    for each."""

    @property
    def all_lengths(self) -> tuple[int, ...]:
        """``lengths``, or the ones that stand for None."""
        return tuple(self.lengths or [4] * (len(self.drafters) - 1))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        num = len(self.drafters) - 1
        if self.lengths is not None and len(self.lengths) != num:
            raise Fault("lengths", f"has {len(self.lengths)} entries beside {num + 1} drafters: {num} are needed")
        if wrong := [length for length in self.lengths or () if not 1 <= length <= 16]:
            raise Fault("lengths", f"holds {wrong[0]}: 1 to 16 are allowed")
        gpus: dict[str, int] = {}
        for i, drafter in enumerate(self.drafters):
            if i < num and drafter.kind != "model":
                raise Fault(
                    f"drafters[{i}].kind", f"is {drafter.kind!r}: only a model verifies what others guess for it"
                )
            try:
                options = drafter.full_options(self)
            except ValidationError as error:
                problem = error.errors()[0]
                key = ".".join(str(part) for part in problem["loc"])
                raise Fault(f"drafters[{i}].options", f"has a wrong {key}: {problem['msg']}") from None
            if isinstance(options, DraftOptions) and options.device != "cpu":
                gpus.setdefault(options.device, i)
        if len(gpus) > 1 and any(gpu_number(device) is not None for device in gpus):
            (one, first), (other, second) = [*gpus.items()][:2]
            raise Fault(
                f"drafters[{second}].options.device",
                f"is {other!r} and that of drafters[{first}] is {one!r}: the drafters of a cascade share one GPU, so "
                "name the same one",
            )
        return self


class HeadDraftOptions(Growing):
    """Options of a head in the draft pool: a drafter that reads the target's hidden states, which the target sends
    after every outcome. A new option costs one edit: a field of this class."""

    method: HeadMethod
    """``mtp``, ``eagle``, ``eagle3``, ``peagle``, ``dflash``, ``dspark`` or ``jetspec``; the others are served in the
    target only (``target_config.engine_kwargs.heads``)."""
    model: str | None = Field(default=None, min_length=1)
    """Directory of the head's checkpoint, or an id that transformers resolves, on the machines of targets and of
    drafts. None, for ``mtp`` only: the modules are in the target's own files."""
    boundaries: list[int] | None = Field(default=None, min_length=1)
    """Hidden states to read instead of the ones that the checkpoint names, as for a head in the target."""
    num_speculative_tokens: int = Field(default=16, ge=1, le=MAX_DRAFT_TOKENS)
    """Maximum tokens that a head predicts by one pass after the last token with a received state (``peagle``,
    ``dflash``, ``dspark``, ``jetspec``)."""
    ahead: bool | Literal["auto"] = "auto"
    """Draft for future outcomes, with the head's own guesses of their states. ``auto``: if the measured share of
    tokens that is still accepted then outweighs the time saved; False: only once an outcome and its states have
    arrived."""
    dtype: DType = "auto"
    """The number format of the head."""
    device: Device = "auto"
    """As of a model."""
    max_sessions: int | None = Field(default=None, ge=1, le=16384)
    """Sessions that the KV pages are sized for; one draft may serve several targets. None: the target's number."""
    draft_top_m: int = Field(default=256, ge=1, le=65536)
    """Candidates of the distribution that are ranked; the rest of its tail is never proposed."""

    @property
    def head(self) -> HeadOptions:
        """Returns the same head inside a target, where ``method`` allows it."""
        return HeadOptions(
            method=self.method,
            model=self.model,
            boundaries=self.boundaries,
            num_speculative_tokens=self.num_speculative_tokens,
        )

    @model_validator(mode="after")
    def _of_method(self) -> Self:
        if self.method not in REMOTE_METHODS:
            allowed = ", ".join(repr(method) for method in REMOTE_METHODS)
            needs = "needs the target's keys and values and " if self.method in _OF_TARGET_KV else ""
            raise Fault(
                "method",
                f"is {self.method!r}, which {needs}is served in the target only (target_config.engine_kwargs.heads): "
                f"in the draft pool {allowed} are allowed",
            )
        try:
            self.head  # noqa: B018
        except ValidationError as error:
            fault = error.errors()[0]["ctx"]["error"]
            raise fault if isinstance(fault, Fault) else error from None
        return self


ModellessOptions = NgramOptions | SuffixOptions | PluginOptions | CascadeOptions | HeadDraftOptions
"""Options of a drafter that is not a draft model alone."""


@dataclass(frozen=True, slots=True)
class TargetSetup:
    """Everything that a target engine is built from: its slice of the configuration, validated."""

    __setstate__ = restored

    source: str
    """Directory of the checkpoint, or an id that transformers resolves (cache, then hub)."""
    options: TargetOptions = field(default_factory=TargetOptions)
    tree_budget: int = 0
    """Nodes per session that its drafts may send. 0: there is no draft."""
    link: HeadDraftOptions | None = None
    """The head in the draft pool that it sends hidden states to. None: its drafts read none."""
    lent_cores: int = 0
    """Cores of idle drafts that share the target's products while no session has a draft."""

    @classmethod
    def with_draft(
        cls,
        source: str,
        options: TargetOptions,
        draft: DraftOptions | ModellessOptions | None = None,
        draft_source: str | None = None,
    ) -> Self:
        """The setup of a target with this draft, whose model it loads, too, if that may serve in either place."""
        link = draft if isinstance(draft, HeadDraftOptions) else None
        if isinstance(draft, DraftOptions) and draft.placement == "auto":
            head = HeadOptions(method="draft_model", model=draft_source, num_speculative_tokens=_BESIDE)
            options = options.model_copy(update={"heads": [*options.heads, head]})
        return cls(source, options, 0 if draft is None else draft.tree_budget, link)

    @property
    def speculates(self) -> bool:
        """True if sessions may be given draft tokens, from a draft or from a head."""
        return self.tree_budget > 0 or bool(self.options.heads)


def require_placement(target: TargetOptions, draft: object, key: str) -> None:
    """Refuses a draft with placement ``auto`` if its target cannot choose; ``key``: of the placement.

    Raises:
        Fault: names the refused value and the allowed ones.
    """
    if not isinstance(draft, DraftOptions) or draft.placement != "auto":
        return
    if not target.adaptive:
        raise Fault(key, "is 'auto' while the target's adaptive is false: what is not measured is not chosen")
    if any(head.method == "draft_model" for head in target.heads):
        raise Fault(key, "is 'auto' beside a head of method 'draft_model': 'auto' makes one of this draft itself")


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """Everything that a draft engine is built from: its slice of the configuration, validated, and the few values of
    its target that it follows."""

    __setstate__ = restored

    source: str | None
    """Directory or id of the draft model's checkpoint. None: a drafter without a model."""
    options: DraftOptions | ModellessOptions
    target_source: str
    """Directory or id of the target's checkpoint, whose vocabulary and context length the drafts share."""
    num_sessions: int
    """Sessions that the engine is sized for."""
    max_model_len: int | None
    """Longest context in tokens. None: what the models were trained for."""
    max_step_tokens: int
    """Prompt tokens of one forward."""
    trusts_target: bool = False
    """True if code that comes with the target's checkpoint may run."""
    tokenizers: tuple[str, str] | None = None
    """Directories or ids of the target's and the draft model's tokenizers. None: their checkpoints'."""
    target_gpus: tuple[int, ...] = ()
    """Numbers of the GPUs that the target owns, if both engines see the same ones. The draft prefers others."""

    @classmethod
    def for_target(cls, target: TargetSetup, source: str | None, options: DraftOptions | ModellessOptions) -> Self:
        """The setup of a draft for this target."""
        num_sessions = options.max_sessions if isinstance(options, DraftOptions | HeadDraftOptions) else None
        return cls(
            source,
            options,
            target.source,
            num_sessions or target.options.max_sessions,
            target.options.max_model_len,
            target.options.max_step_tokens,
            target.options.trust_remote_code,
        )

    @property
    def parts(self) -> tuple[DraftSetup, ...]:
        """The setups of the drafters of a cascade, as if each were alone; () for any other drafter."""
        options = self.options
        if not isinstance(options, CascadeOptions):
            return ()
        return tuple(
            replace(self, source=drafter.model and resolve(drafter.model), options=drafter.full_options(options))
            for drafter in options.drafters
        )

    @property
    def runs_model(self) -> bool:
        """True if there is a draft model, alone or in a cascade, or a head."""
        if isinstance(self.options, HeadDraftOptions):
            return True
        return self.source is not None or any(part.source is not None for part in self.parts)

    @property
    def model(self) -> tuple[str, DraftOptions]:
        """Source and options of the draft model. Must not be asked of a drafter without one."""
        assert self.source is not None
        assert isinstance(self.options, DraftOptions)
        return self.source, self.options
