// The page: runs one prompt twice, overlapped and plain, and shows what comes.

import { drawLengths, drawTimeline, drawTree } from "./draw.js";
import { commonLength, figuresOf, hiddenShare, Rounds } from "./rounds.js";
import { watch } from "./service.js";
import { events, get, useKey } from "./stream.js";

const SEEN = 8; // rounds in the timeline
const DRAWN_MS = 150;
const CAUSES = {
  hit: "hit: this proposal was ready when the previous round ended",
  token: "miss: the draft had not foreseen the token before it",
  k: "miss: the draft had not grown where the proposal was cut",
  late: "miss: the continuation came too late",
  draft_down: "no draft serves the session: the text goes on without",
  disabled: "the draft is not used in this round",
  sequential: "drafted after the previous outcome",
  start: "the first round",
};
const $ = (id) => document.getElementById(id);

let runs = {};
let follow = true;
let running = null; // AbortController of the run in progress
let due = false;
let watching = false;

/** One of the two streams. */
class Run {
  constructor(name) {
    this.name = name;
    this.rounds = new Rounds();
    this.result = null;
    this.began = null;
    this.text = "";
    $(name).replaceChildren();
    $(`${name}-rate`).textContent = "";
  }

  take(choice) {
    const now = performance.now();
    const pieces = this.rounds.take(choice);
    const round = this.rounds.list.at(-1);
    for (const { text, origin } of pieces) {
      const token = document.createElement("span");
      token.className = `token ${origin}`;
      token.dataset.origin = origin;
      token.title = `${origin}, round ${round?.number ?? "–"}`;
      token.textContent = text;
      $(this.name).append(token);
      this.text += text;
    }
    this.began ??= now;
    this.first ??= this.rounds.tokens.length;
    this.seconds = (now - this.began) / 1000;
    if (choice.finish_reason) this.result = choice.speculation;
    redraw();
  }

  /** Tokens per second after the first outcome: the service's figure, or ours until it comes. */
  get rate() {
    if (this.result) return this.result.timing.tokens_per_s;
    return this.seconds > 0 ? (this.rounds.tokens.length - this.first) / this.seconds : 0;
  }
}

/** Draws soon, and not for every token: service and page may share a machine, and drawing costs. */
function redraw() {
  if (due) return;
  due = true;
  setTimeout(() => {
    due = false;
    draw();
  }, DRAWN_MS);
}

function draw() {
  const { overlapped, plain } = runs;
  if (!overlapped) return;
  for (const run of [overlapped, plain]) {
    if (run.rounds.tokens.length) $(`${run.name}-rate`).textContent = `${run.rounds.tokens.length} tokens, ${run.rate.toFixed(0)} tokens/s`;
  }
  drawFigures(overlapped, plain);
  drawRound(overlapped.rounds.list);
}

function drawFigures(overlapped, plain) {
  const figures = figuresOf(overlapped.rounds.list);
  const hidden = hiddenShare(overlapped.rounds.list);
  const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);
  const done = overlapped.result && plain.result && plain.rate > 0;
  const shown = [
    ["Against plain", done ? `${(overlapped.rate / plain.rate).toFixed(2)}×` : "–"],
    ["Accepted", percent(figures.acceptance)],
    ["Tokens per verification", figures.tokensPerRound?.toFixed(2) ?? "–"],
    ["Hits", percent(figures.hitRate)],
    ["Drafting hidden", percent(hidden)],
    ["Rounds", `${overlapped.rounds.list.length} / ${plain.rounds.list.length || "–"}`],
  ];
  if (figures.down) shown.push(["Rounds without draft", `${figures.down}`]);
  $("figures").replaceChildren(
    ...shown.map(([name, value]) => {
      const group = document.createElement("div");
      const term = document.createElement("dt");
      const number = document.createElement("dd");
      term.textContent = name;
      number.textContent = value;
      group.append(number, term);
      return group;
    }),
  );
}

function drawRound(rounds) {
  const pick = $("round");
  pick.max = Math.max(1, rounds.length);
  pick.disabled = !rounds.length;
  if (follow) pick.value = running ? pick.max : lastTree(rounds);
  const selected = rounds[Number(pick.value) - 1];
  $("round-number").textContent = selected ? `${selected.number} of ${rounds.length}` : "–";
  if (selected) {
    $("round-words").textContent = wordsOf(selected);
  }
  const end = Math.min(rounds.length, Math.max(SEEN, (selected?.number ?? 0) + 2));
  drawTimeline($("timeline"), rounds.slice(Math.max(0, end - SEEN), end), selected);
  drawTree($("tree"), selected);
  drawLengths($("lengths"), rounds, selected);
}

/** Number of the last round whose draft was accepted and foresaw the next token, or had a tree at all. */
function lastTree(rounds) {
  const telling = (round) => round.tree?.next != null && round.accepted && !round.lookup && !round.head;
  const found = rounds.findLast(telling) ?? rounds.findLast((round) => round.tree);
  return found?.number ?? rounds.length;
}

/** What a round was, in a sentence. */
function wordsOf(round) {
  const { drafted, accepted, tree } = round;
  const verified = drafted ? `${drafted} verified, ${accepted} accepted` : "Nothing to verify: one token";
  const own = round.lookup ? ", and the target looked this up in its own text" : round.head ? ", and a head of the target drafted" : "";
  const next = tree?.missed ? " The next token was in no branch." : tree?.next ? " The next token was foreseen." : "";
  return `${verified}. ${capital(CAUSES[round.cause] ?? round.cause)}${own}.${next}`;
}

const capital = (words) => words[0].toUpperCase() + words.slice(1);

/** Says whether the texts are the same; of runs that are in progress, as far as both have come. */
function judge(done) {
  const { overlapped, plain } = runs;
  const [one, other] = [overlapped.rounds.tokens, plain.rounds.tokens];
  const common = commonLength(one, other);
  const differ = common < Math.min(one.length, other.length) || (done && one.length !== other.length);
  const verdict = $("verdict");
  verdict.className = `verdict ${differ ? "bad" : done ? "good" : ""}`;
  if (differ) {
    verdict.textContent = `The texts differ at token ${common + 1}. This must not be: see docs/lossless.md for what to check.`;
  } else if (done && overlapped.text === plain.text) {
    const down = figuresOf(overlapped.rounds.list).down;
    const without = down ? ` ${down} rounds had no draft, and no token changed.` : "";
    const ratio = plain.rate > 0 ? `, ${(overlapped.rate / plain.rate).toFixed(2)} times the speed of plain decoding` : "";
    verdict.textContent = `✓ The same text: all ${one.length} tokens are equal${ratio}.${without}`;
  }
}

async function stream(run, body, signal) {
  for await (const event of events("v1/completions", body, signal)) {
    for (const choice of event.choices) run.take(choice);
  }
}

function bodyFor(name, given, mode) {
  const salt = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16)).join("-");
  const overlapped = name === "overlapped";
  return {
    ...given,
    stream: true,
    return_token_ids: true,
    cache_salt: salt, // neither run gains by what the other has left behind
    speculation: overlapped ? { mode } : { enabled: false },
    stream_options: { include_speculation: true, include_trace: overlapped },
  };
}

async function run(event) {
  event.preventDefault();
  if (running) return;
  fail(null);
  if (!$("seed").value) $("seed").value = `${crypto.getRandomValues(new Uint32Array(1))[0]}`;
  const given = {
    prompt: $("prompt").value,
    temperature: Number($("temperature").value),
    max_tokens: Number($("tokens").value),
    seed: Number($("seed").value),
  };
  const mode = $("mode").value;
  $("mode-name").textContent = capital(mode);
  running = new AbortController();
  const { signal } = running;
  runs = { overlapped: new Run("overlapped"), plain: new Run("plain") };
  follow = true;
  busy(true);
  $("verdict").className = "verdict";
  $("verdict").textContent = "Running …";
  try {
    const one = (name) => stream(runs[name], bodyFor(name, given, mode), signal);
    if ($("order").value === "together") await Promise.all([one("overlapped"), one("plain")]);
    else for (const name of ["overlapped", "plain"]) await one(name);
    judge(true);
  } catch (error) {
    if (error.name === "AbortError") $("verdict").textContent = "Stopped.";
    else refuse(error);
  } finally {
    running.abort(); // the other stream, if one has failed
    running = null;
    busy(false);
    draw();
  }
}

function refuse(error) {
  $("verdict").textContent = "No text: the service has refused, or has failed.";
  if (error.status === 401) return needKey(error);
  fail(String(error));
}

function busy(now) {
  $("run").disabled = now;
  $("stop").disabled = !now;
  document.body.classList.toggle("busy", now);
  for (const name of ["overlapped", "plain"]) $(name).setAttribute("aria-busy", now);
}

function fail(words) {
  $("error").hidden = words === null;
  $("error").textContent = words ?? "";
}

function needKey(error) {
  const given = $("key").value !== "";
  $("key-form").hidden = false;
  $("model").textContent = "a key is needed";
  fail(given ? String(error) : null);
  $("key").focus();
}

async function start() {
  try {
    const { data } = await get("v1/models");
    $("model").textContent = data[0].id;
    $("tokens").max = data[0].max_model_len;
    $("key-form").hidden = true;
    fail(null);
  } catch (error) {
    if (error.status === 401) return needKey(error);
    return fail(String(error));
  }
  if (watching) return;
  watching = true;
  watch(() => {
    watching = false;
    start();
  });
}

$("ask").addEventListener("submit", run);
$("stop").addEventListener("click", () => running?.abort());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  start();
});
$("round").addEventListener("input", () => {
  follow = $("round").value === $("round").max;
  draw();
});
new ResizeObserver(redraw).observe($("timeline"));
start();
