// The figures, as SVG elements. Sizes come from layout.js, colors from style.css.

import { layoutLengths, layoutLine, layoutTimeline, layoutTree } from "./layout.js";
import { MISSES } from "./rounds.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const LABEL_CHAR = 7; // at most, of the labels of ticks
const MARKS = { accepted: "✓", rejected: "✕", next: "➜", missed: "➜" };
const STATES = {
  root: "the last token of the context",
  accepted: "verified and accepted",
  rejected: "verified and rejected",
  next: "the target’s next token, foreseen",
  missed: "the target’s next token, not foreseen",
  ahead: "grown while the target verified",
  other: "another branch",
};

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function titled(shape, words) {
  shape.prepend(svg("title", {}, words));
  return shape;
}

function picture(into, width, height, label, ...children) {
  into.replaceChildren(svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...children));
}

function empty(into, words) {
  const note = document.createElement("p");
  note.className = "hint";
  note.textContent = words;
  into.replaceChildren(note);
}

const widthOf = (into) => Math.max(200, Math.floor(into.clientWidth));

/** The class of a round's verification. */
export function kindOf(round) {
  if (round.cause === "hit" || (round.cause === "own" && round.drafted)) return "hit";
  return MISSES.includes(round.cause) ? "miss" : "other";
}

/** Two lanes, target above draft, for these rounds; `selected` is marked. */
export function drawTimeline(into, rounds, selected) {
  const width = widthOf(into);
  const { target, draft, ticks } = layoutTimeline(rounds, width);
  if (!target.length) return empty(into, "Nothing has run yet.");
  const drafts = document.body.dataset.drafts !== "none";
  const bottom = drafts ? 96 : 52;
  const parts = ticks.flatMap(({ x, ms }) => {
    const label = `${ms} ms`;
    return [
      svg("line", { x1: x, x2: x, y1: 8, y2: bottom, class: "tick" }),
      svg("text", { x: Math.min(x, width - LABEL_CHAR * label.length), y: bottom + 16, class: "tick-label" }, label),
    ];
  });
  parts.push(svg("text", { x: 0, y: 32, class: "lane" }, "target"));
  if (drafts) parts.push(svg("text", { x: 0, y: 78, class: "lane" }, "draft"));
  for (const { x, width: wide, round } of target) {
    const mark = round === selected ? " selected" : "";
    const group = svg("g", { class: `verification ${kindOf(round)}${mark}` });
    group.append(svg("rect", { x, y: 12, width: wide, height: 32, rx: 3 }));
    if (wide > 26 && round.drafted) group.append(svg("text", { x: x + wide / 2, y: 33 }, `${round.accepted}/${round.drafted}`));
    parts.push(titled(group, `round ${round.number}: ${round.accepted} of ${round.drafted} accepted, ${round.cause}`));
  }
  for (const { x, width: wide, nodes } of draft) {
    parts.push(titled(svg("rect", { x, y: 60, width: wide, height: 28, rx: 2, class: "step" }), `${nodes} nodes`));
  }
  const label = `Rounds ${rounds[0].number} to ${rounds.at(-1).number}: ${target.length} verifications of the target, ${draft.length} steps of the draft`;
  picture(into, width, bottom + 22, label, ...parts);
}

/** The draft's tree at the outcome of a round. */
export function drawTree(into, round) {
  if (!round?.tree) {
    const why = round?.cause === "draft_down" ? "no draft serves the session" : "the draft had grown nothing that fits";
    return empty(into, round ? `No tree in this round: ${why}.` : "No round yet.");
  }
  const { nodes, edges, width, height } = layoutTree(round.tree);
  const parts = edges.map(({ x1, y1, x2, y2, state }) => {
    const bend = (x1 + x2) / 2;
    return svg("path", { d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`, class: `edge ${state}` });
  });
  for (const node of nodes) {
    const mark = MARKS[node.state] ? `${MARKS[node.state]} ` : "";
    const group = svg("g", { class: `node ${node.state}` });
    group.append(svg("rect", { x: node.x, y: node.y, width: node.width, height: node.height, rx: 5 }));
    group.append(svg("text", { x: node.x + node.width / 2, y: node.y + 14.5 }, mark + node.label));
    const odds = node.prob <= 1 && node.state !== "root" ? `, probability ${Math.round(node.prob * 100)} %` : "";
    parts.push(titled(group, `${JSON.stringify(node.text)}: ${STATES[node.state]}${odds}`));
  }
  const words = (state) => nodes.filter((node) => node.state === state).map((node) => node.label).join(" ") || "none";
  picture(into, width, height, `Accepted: ${words("accepted")}. Rejected: ${words("rejected")}. Next token: ${round.tree.missed ? `${words("missed")}, not in the tree` : words("next")}.`, ...parts);
}

/** K and accepted tokens of each round. */
export function drawLengths(into, rounds, selected) {
  if (!rounds.length) return empty(into, "No round yet.");
  const width = widthOf(into);
  const shown = rounds.slice(-Math.floor((width - 24) / 4));
  const height = 84;
  const { most, bars } = layoutLengths(shown, width, height);
  const parts = [0, most].map((count) => svg("text", { x: 0, y: count ? 12 : height + 4, class: "tick-label" }, `${count}`));
  for (const { round, x, width: wide, verified, accepted } of bars) {
    const group = svg("g", { class: `length ${round === selected ? "selected" : ""}` });
    group.append(svg("rect", { x, y: verified + 4, width: wide, height: height - verified, class: "verified" }));
    group.append(svg("rect", { x, y: accepted + 4, width: wide, height: height - accepted, class: "accepted" }));
    if (kindOf(round) === "miss") group.append(svg("text", { x: x + wide / 2, y: height + 18, class: "cross" }, "×"));
    parts.push(titled(group, `round ${round.number}: K ${round.drafted}, ${round.accepted} accepted, ${round.cause}`));
  }
  parts.push(svg("line", { x1: 20, x2: width, y1: height + 4, y2: height + 4, class: "tick" }));
  const mean = shown.reduce((sum, round) => sum + round.drafted, 0) / shown.length;
  picture(into, width, height + 24, `K of the last ${shown.length} rounds, ${mean.toFixed(1)} on average`, ...parts);
}

/** Running and waiting sessions over time, each a list of at most `length` numbers. */
export function drawSessions(into, running, waiting, length) {
  const width = widthOf(into);
  const most = Math.max(2, ...running.map((count, i) => count + waiting[i]));
  const line = (values) =>
    layoutLine(values, length, most, width - 24, 80)
      .map(([x, y]) => `${(x + 22).toFixed(1)},${(y + 6).toFixed(1)}`)
      .join(" ");
  picture(
    into,
    width,
    110,
    `Sessions over the last two minutes: ${running.at(-1)} running, ${waiting.at(-1)} waiting now, at most ${Math.max(...running)} running`,
    svg("text", { x: 0, y: 12, class: "tick-label" }, `${most}`),
    svg("text", { x: 0, y: 90, class: "tick-label" }, "0"),
    svg("line", { x1: 20, x2: width, y1: 86, y2: 86, class: "tick" }),
    svg("text", { x: 22, y: 104, class: "tick-label" }, "2 min ago"),
    svg("text", { x: width, y: 104, class: "tick-label end" }, "now"),
    svg("polyline", { points: line(running.map((count, i) => count + waiting[i])), class: "waiting" }),
    svg("polyline", { points: line(running), class: "running" }),
  );
}
