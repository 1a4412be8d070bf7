// What speculation did in one run: figures, and its rounds one by one.

import { drawLengths, drawTimeline, drawTree } from "./draw.js";
import { figuresOf, hiddenShare } from "./rounds.js";

const SEEN = 8; // rounds in the timeline
const DRAWN_MS = 150;
const CAUSES = {
  hit: "hit: this proposal was ready when the previous round ended",
  token: "miss: the draft had not foreseen the token before it",
  k: "miss: the draft had not grown where the proposal was cut",
  late: "miss: the continuation came too late",
  draft_down: "no draft serves the session: the text goes on without",
  own: "the target drafts by itself",
  disabled: "the draft is not used in this round",
  sequential: "drafted after the previous outcome",
  start: "the first round",
};
const $ = (id) => document.getElementById(id);

const nothing = { run: { rounds: { list: [] }, result: null }, plain: () => null, running: () => false };
let shown = nothing;
let follow = true;
let due = null; // the timer of the next drawing
let listener = () => {};

/** Shows a run: `{run, running(), plain()}`; `plain()`: the same by plain decoding, or null. */
export function show(what) {
  shown = what;
  follow = true;
  redraw();
}

/** Calls `draw` whenever something is drawn anew. */
export function onDraw(draw) {
  listener = draw;
}

/** Draws soon, and not for every token: service and page may share a machine, and drawing costs. */
export function redraw() {
  due ??= setTimeout(draw, DRAWN_MS);
}

/** Draws at once. */
export function draw() {
  clearTimeout(due);
  due = null;
  listener();
  drawFigures(shown.run, shown.plain());
  drawRound(shown.run.rounds.list);
}

function drawFigures(run, plain) {
  const figures = figuresOf(run.rounds.list);
  const hidden = hiddenShare(run.rounds.list);
  const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);
  const drafts = document.body.dataset.drafts !== "none";
  const done = run.result && plain?.result && plain.rate > 0;
  const found = [
    ["Against plain", done ? `${(run.rate / plain.rate).toFixed(2)}×` : "–"],
    ["Accepted", percent(figures.acceptance)],
    ["Tokens per verification", figures.tokensPerRound?.toFixed(2) ?? "–"],
    ...(drafts ? [["Hits", percent(figures.hitRate)], ["Drafting hidden", percent(hidden)]] : []),
    ["Rounds", `${run.rounds.list.length} / ${plain?.rounds.list.length || "–"}`],
  ];
  if (figures.down) found.push(["Rounds without draft", `${figures.down}`]);
  $("figures").replaceChildren(
    ...found.map(([name, value]) => {
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
  if (follow && rounds.length) pick.value = shown.running() ? pick.max : lastTree(rounds);
  const selected = rounds[Number(pick.value) - 1];
  $("round-number").textContent = selected ? `${selected.number} of ${rounds.length}` : "–";
  if (selected) $("round-words").textContent = wordsOf(selected);
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

export const capital = (words) => words[0].toUpperCase() + words.slice(1);

$("round").addEventListener("input", () => {
  follow = $("round").value === $("round").max;
  draw();
});
new ResizeObserver(redraw).observe($("timeline"));
