// One answer of the service as it comes: its text with the origin of each character, and its rounds.

import { commonLength, figuresOf, Rounds } from "./rounds.js";
import { events } from "./stream.js";

export class Run {
  constructor() {
    this.rounds = new Rounds();
    this.result = null;
    this.began = null;
    this.text = "";
    this.pieces = []; // {text, origin, round}
    this.said = { content: "", reasoning: "" };
    this.places = { content: [], reasoning: [] }; // of each character of what is said: its piece
    this.pending = []; // places of the text that no part of what is said has taken yet
  }

  /** Takes a choice of an event. Returns the pieces that it adds. */
  take(choice) {
    const now = performance.now();
    const told = choice.speculation?.round;
    if (told?.cause === "disabled" && told.drafted) told.cause = "own"; // the target drafts by itself
    const pieces = this.rounds.take(choice);
    const round = this.rounds.list.at(-1)?.number ?? null;
    for (const { text, origin } of pieces) {
      for (let i = 0; i < text.length; i += 1) this.pending.push(this.pieces.length);
      this.pieces.push({ text, origin, round });
      this.text += text;
    }
    this.say("content", choice.delta?.content ?? "");
    this.say("reasoning", choice.delta?.reasoning_content ?? "");
    this.began ??= now;
    this.first ??= this.rounds.tokens.length;
    this.seconds = (now - this.began) / 1000;
    if (choice.finish_reason) this.result = choice.speculation;
    return pieces;
  }

  /** Adds what is said of the text; marks between its parts, which nobody says, are left out. */
  say(kind, words) {
    if (!words) return;
    const left = this.text.slice(this.text.length - this.pending.length);
    const at = left.indexOf(words);
    const places = at < 0 ? Array(words.length).fill(null) : this.pending.slice(at, at + words.length);
    if (at >= 0) this.pending.splice(0, at + words.length);
    this.said[kind] += words;
    this.places[kind].push(...places);
  }

  /** Tokens per second after the first outcome: the service's figure, or ours until it comes. */
  get rate() {
    if (this.result) return this.result.timing.tokens_per_s;
    return this.seconds > 0 ? (this.rounds.tokens.length - this.first) / this.seconds : 0;
  }

  /** Asks, and takes what comes; `changed(pieces)` is called after each. */
  async stream(path, body, signal, changed) {
    for await (const event of events(path, body, signal)) {
      for (const choice of event.choices) changed(this.take(choice));
    }
  }
}

/** A cache salt of its own: no run gains by what another has left behind. */
export function salt() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16)).join("-");
}

/** What every request has, with or without speculation. */
export function asked(given, speculation) {
  const traced = speculation.enabled !== false;
  return {
    ...given,
    speculation,
    stream: true,
    return_token_ids: true,
    stream_options: { include_speculation: true, include_trace: traced },
  };
}

/** Whether two runs have the same tokens, and the words for it; of one that was stopped, as far as it has come. */
export function compared(run, plain, stopped = false) {
  const [one, other] = [run.rounds.tokens, plain.rounds.tokens];
  const common = commonLength(one, other);
  if (common < one.length || (!stopped && common < other.length)) {
    const words = `The texts differ at token ${common + 1}. This must not be: see docs/lossless.md for what to check.`;
    return { differ: true, words };
  }
  const { down } = figuresOf(run.rounds.list);
  const without = down ? ` ${down} rounds had no draft, and no token changed.` : "";
  const ratio = plain.rate > 0 ? `, ${(run.rate / plain.rate).toFixed(2)} times the speed of plain decoding` : "";
  return { differ: false, words: `✓ The same text: all ${one.length} tokens are equal${ratio}.${without}` };
}

/** The element of a piece of text, with its origin. */
export function tokenElement(text, piece) {
  const token = document.createElement("span");
  token.className = `token ${piece.origin}`;
  token.dataset.origin = piece.origin;
  token.title = `${piece.origin}, round ${piece.round ?? "–"}`;
  token.textContent = text;
  return token;
}

export const drawnSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];
