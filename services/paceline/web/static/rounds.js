// The rounds of one stream, from its events: tokens by origin, times, and the draft's tree at each outcome. Pure.

const KEPT_TREES = 200;
export const MISSES = ["token", "k", "late", "draft_down"];

/** Who proposed a text of a round; `index`: of how many accepted ones it comes behind. The draft's come first. */
export function originOf(round, drafted, index) {
  if (!drafted) return "target";
  const { accepted = 0, head_accepted: headed = 0, lookup_accepted: lookedUp = 0 } = round ?? {};
  if (headed + lookedUp === 0 || index < accepted - headed - lookedUp) return "draft";
  return index < accepted - lookedUp ? "head" : "lookup";
}

/** A copy of the draft's tree, which walks along the decided tokens as the target's does. */
export class Tree {
  constructor() {
    this.open([]);
  }

  /** Begins anew; `behind`: ids of the tokens that have been decided since the draft was opened. */
  open(behind) {
    this.nodes = new Map([[0, { id: 0, parent: null, text: "", prob: 1, children: [] }]]);
    this.anchor = 0;
    this.behind = [...behind]; // decided tokens for which no node has come yet
  }

  /** Adds a node `[id, parent, token, text, prob]` that arrived at `at`; one whose parent is gone is dropped. */
  add([id, parent, token, text, prob], at) {
    if (!this.nodes.has(parent)) return;
    this.nodes.set(id, { id, parent, token, text, prob, at, children: [] });
    this.nodes.get(parent).children.push(id);
    this.walk([]);
  }

  child(id, token) {
    return this.nodes.get(id).children.find((one) => this.nodes.get(one).token === token);
  }

  walk(tokens) {
    this.behind.push(...tokens);
    for (let next; this.behind.length && (next = this.child(this.anchor, this.behind[0])) !== undefined; ) {
      this.anchor = next;
      this.behind.shift();
    }
  }

  /** The nodes below the anchor, parents first; the anchor comes first, with parent null. */
  below() {
    const found = [];
    const visit = (id, parent) => {
      const node = this.nodes.get(id);
      found.push({ ...node, parent });
      for (const child of node.children) visit(child, id);
    };
    visit(this.anchor, null);
    return found;
  }

  /** Forgets what the anchor has left behind. */
  prune() {
    const kept = this.below();
    this.nodes = new Map(kept.map((node) => [node.id, node]));
  }
}

/** All rounds of one stream. */
export class Rounds {
  constructor() {
    this.list = [];
    this.tokens = [];
    this.tree = new Tree();
  }

  /** Takes a choice of an event; returns the text pieces `{text, origin}` that it adds. */
  take(choice) {
    const { round, earlier_rounds: earlier = [], trace, segments = [] } = choice.speculation ?? {};
    const all = round ? [...earlier, round] : earlier;
    const origins = all.flatMap((one) => Array.from({ length: one.accepted }, (_, i) => originOf(one, true, i)));
    const pieces = segments.map(({ text, drafted }) => {
      return { text, origin: drafted ? (origins.shift() ?? "draft") : "target" };
    });
    const tokens = choice.token_ids ?? [];
    let at = 0;
    for (const one of earlier) this.add(one, null, tokens.slice(at, (at += one.accepted + 1)), []);
    if (round) this.add(round, trace, tokens.slice(at), pieces);
    this.tokens.push(...tokens);
    return pieces;
  }

  add(round, trace, tokens, pieces) {
    const added = { number: this.list.length + 1, ...round, tokens, pieces };
    this.list.push(added);
    if (!trace) return;
    Object.assign(added, { began: trace.began_s, ended: trace.ended_s });
    added.steps = trace.draft
      .filter((step) => step.step_s > 0)
      .map((step) => ({ began: step.at_s - step.step_s, ended: step.at_s, nodes: step.nodes.length }));
    if (trace.draft_opened_at !== null) this.tree.open(this.tokens.slice(trace.draft_opened_at));
    for (const step of trace.draft) for (const node of step.nodes) this.tree.add(node, step.at_s);
    added.tree = this.snapshot(trace, tokens, round.accepted, pieces);
    const old = this.list[this.list.length - 1 - KEPT_TREES];
    if (old) old.tree = null;
    this.tree.walk(tokens);
    this.tree.prune();
  }

  /** The tree when the outcome arrived; null where the draft had none that fits. */
  snapshot(trace, tokens, accepted, pieces) {
    if (this.tree.behind.length || !this.tree.nodes.get(this.tree.anchor).children.length) return null;
    const inFlight = new Set(trace.in_flight);
    const path = [];
    let at = this.tree.anchor;
    for (const token of tokens) {
      at = this.tree.child(at, token);
      if (at === undefined) break;
      path.push(at);
    }
    const won = new Set(path.slice(0, accepted));
    const next = path[accepted] ?? null;
    const nodes = this.tree.below().map((node) => {
      let state = node.at > trace.began_s ? "ahead" : "other";
      if (inFlight.has(node.id)) state = "rejected";
      if (won.has(node.id)) state = "accepted";
      if (node.id === next) state = "next";
      return { ...node, state: node.parent === null ? "root" : state };
    });
    const missed = next === null && path.length === accepted && tokens.length > accepted;
    return {
      nodes,
      next,
      missed: missed ? { parent: path.at(-1) ?? this.tree.anchor, text: pieces.at(-1)?.text ?? "" } : null,
    };
  }
}

/** Share of the draft's work, in time, that ran while the target verified; null where the draft did nothing. */
export function hiddenShare(rounds) {
  const timed = rounds.filter((round) => round.ended !== undefined);
  let worked = 0;
  let hidden = 0;
  timed.forEach(({ steps }, i) => {
    for (const step of steps) {
      worked += step.ended - step.began;
      for (let j = i; j >= 0 && timed[j].ended > step.began; j--) {
        hidden += Math.max(0, Math.min(step.ended, timed[j].ended) - Math.max(step.began, timed[j].began));
      }
    }
  });
  return worked > 0 ? Math.min(1, hidden / worked) : null;
}

/** Counts and means over rounds. */
export function figuresOf(rounds) {
  const sum = (value) => rounds.reduce((total, round) => total + value(round), 0);
  const drafted = sum((round) => round.drafted);
  const accepted = sum((round) => round.accepted);
  const hits = rounds.filter((round) => round.cause === "hit").length;
  const misses = rounds.filter((round) => MISSES.includes(round.cause)).length;
  return {
    drafted,
    accepted,
    hits,
    misses,
    down: rounds.filter((round) => round.cause === "draft_down").length,
    acceptance: drafted ? accepted / drafted : null,
    tokensPerRound: rounds.length ? sum((round) => round.tokens.length) / rounds.length : null,
    hitRate: hits + misses ? hits / (hits + misses) : null,
  };
}

/** Number of leading tokens that two lists share. */
export function commonLength(one, other) {
  const most = Math.min(one.length, other.length);
  for (let i = 0; i < most; i++) if (one[i] !== other[i]) return i;
  return most;
}
