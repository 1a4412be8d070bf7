// Where things stand in the figures: pure functions from rounds to coordinates in pixels.

const CHAR = 7.3;
const LONGEST = 12;
export const ROW = 26;

/** A token as it is shown: white space visible, and not too long. */
export function shown(text) {
  const visible = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
  const chars = [...visible];
  return chars.length > LONGEST ? chars.slice(0, LONGEST - 1).join("") + "…" : visible;
}

const IMPORTANT = { root: 4, accepted: 3, next: 3, rejected: 2, ahead: 0, other: 0 };

/** The nodes of a snapshot that are worth showing, at most about `most`: what was verified or decided, what stands
 *  ready behind the next token, and the likeliest of the rest. */
export function chosen(tree, most) {
  const byId = new Map(tree.nodes.map((node) => [node.id, node]));
  const likely = new Map();
  for (const node of tree.nodes) {
    likely.set(node.id, node.parent === null ? 1 : (likely.get(node.parent) ?? 0) * node.prob);
  }
  const kept = new Set();
  const keep = (id) => {
    for (let at = id; at !== null && !kept.has(at); at = byId.get(at).parent) kept.add(at);
  };
  for (const node of tree.nodes) if (IMPORTANT[node.state] > 1) keep(node.id);
  for (let at = tree.next; at !== null; ) {
    const children = byId.get(at).children.filter((id) => byId.has(id));
    at = children.length ? children.reduce((a, b) => (byId.get(b).prob > byId.get(a).prob ? b : a)) : null;
    if (at !== null) keep(at);
  }
  for (const node of [...tree.nodes].sort((a, b) => likely.get(b.id) - likely.get(a.id))) {
    if (kept.size >= most) break;
    keep(node.id);
  }
  return tree.nodes.filter((node) => kept.has(node.id));
}

/** Boxes and edges of a tree: depth to the right, one row per leaf, the decided path on top. */
export function layoutTree(tree, most = 26) {
  const nodes = chosen(tree, most).map((node) => ({ ...node, label: node.parent === null ? "●" : shown(node.text) }));
  if (tree.missed) {
    const { parent, text } = tree.missed;
    nodes.push({ id: -1, parent, prob: 2, state: "missed", label: shown(text), text, children: [] });
  }
  const children = new Map(nodes.map((node) => [node.id, []]));
  for (const node of nodes) if (node.parent !== null) children.get(node.parent).push(node);
  const decided = (node) => ["accepted", "next", "missed"].includes(node.state);
  const widths = [];
  let rows = 0;
  const place = (node, depth) => {
    node.depth = depth;
    node.width = Math.max(24, [...node.label].length * CHAR + 14 + (["other", "ahead", "root"].includes(node.state) ? 0 : 14));
    widths[depth] = Math.max(widths[depth] ?? 0, node.width);
    const below = children.get(node.id).sort((a, b) => decided(b) - decided(a) || b.prob - a.prob);
    node.row = rows;
    below.forEach((child, i) => {
      if (i > 0) rows += 1;
      place(child, depth + 1);
    });
  };
  const root = nodes.find((node) => node.parent === null);
  place(root, 0);
  const starts = [];
  widths.reduce((x, width, depth) => ((starts[depth] = x), x + width + 22), 2);
  const byId = new Map(nodes.map((node) => [node.id, node]));
  for (const node of nodes) Object.assign(node, { x: starts[node.depth], y: node.row * ROW + 2, height: ROW - 6 });
  const edges = nodes
    .filter((node) => node.parent !== null)
    .map((node) => {
      const from = byId.get(node.parent);
      return {
        x1: from.x + from.width,
        y1: from.y + from.height / 2,
        x2: node.x,
        y2: node.y + node.height / 2,
        state: node.state,
      };
    });
  const width = starts.at(-1) + widths.at(-1) + 2;
  return { nodes, edges, width, height: (rows + 1) * ROW };
}

/** Bars of target and draft within the time of `rounds`, and ticks, on `width` pixels. */
export function layoutTimeline(rounds, width, left = 52) {
  const timed = rounds.filter((round) => round.ended !== undefined);
  if (!timed.length) return { target: [], draft: [], ticks: [] };
  const steps = timed.flatMap((round) => round.steps);
  const from = Math.min(timed[0].began, ...steps.map((step) => step.began));
  const to = Math.max(timed.at(-1).ended, from + 1e-6);
  const x = (at) => left + ((Math.max(at, from) - from) / (to - from)) * (width - left - 2);
  const bar = (item) => ({ x: x(item.began), width: Math.max(1, x(item.ended) - x(item.began)) });
  const raw = (to - from) / Math.max(2, Math.floor(width / 110));
  const power = 10 ** Math.floor(Math.log10(raw));
  const every = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= raw);
  const ticks = [];
  for (let at = Math.ceil(from / every) * every; at <= to; at += every) ticks.push({ x: x(at), ms: Math.round(at * 1e4) / 10 });
  return {
    target: timed.map((round) => ({ ...bar(round), round })),
    draft: steps.filter((step) => step.ended >= from).map((step) => ({ ...bar(step), nodes: step.nodes })),
    ticks,
  };
}

/** Bars of what was verified and accepted, one per round, on `width` x `height` pixels. */
export function layoutLengths(rounds, width, height) {
  const most = Math.max(4, ...rounds.map((round) => round.drafted));
  const each = Math.min(22, (width - 24) / Math.max(1, rounds.length));
  const y = (count) => height - (count / most) * height;
  return {
    most,
    bars: rounds.map((round, i) => ({
      round,
      x: 22 + i * each,
      width: Math.max(1, each - (each > 5 ? 2 : 0.5)),
      verified: y(round.drafted),
      accepted: y(round.accepted),
    })),
  };
}

/** Points of a line through `values` on `width` x `height` pixels, the newest at the right. */
export function layoutLine(values, length, most, width, height) {
  const step = width / Math.max(1, length - 1);
  const first = length - values.length;
  return values.map((value, i) => [(first + i) * step, height - (value / most) * height]);
}
