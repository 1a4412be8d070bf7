// The pools, replicas and sessions, asked for every second while the page is seen.

import { drawSessions } from "./draw.js";
import { get } from "./stream.js";

const PERIOD_MS = 1000;
const KEPT = 120;
const ORDER = ["router", "target", "draft"];
const $ = (id) => document.getElementById(id);

const running = [];
const waiting = [];
const seen = new Set(); // the kinds of replicas that have been up

/** What is said about a draft that is away; "" while one is there, or none is meant to be. */
export function draftNote(status, seen) {
  const starting = status.starting.find((one) => one.kind === "draft");
  if (status.pools.draft?.length || !(starting || seen.has("draft"))) return "";
  const doing = starting ? `${starting.doing} (${Math.round(starting.elapsed_s)} s)` : "none is up";
  return `The draft is away: ${doing}. The text goes on by plain decoding, unchanged.`;
}

/** A replica as it is shown: with its kind, which the ids of a service on Ray do not tell. */
const nameOf = (kind, id) => (id.startsWith(kind) ? id : `${kind} ${id}`);

/** Rows `[kind, replica, state, sessions, KV]` of the table of replicas. A kind that has been up always has one. */
export function rowsOf(status, seen) {
  const kinds = new Set([...ORDER, ...seen, ...Object.keys(status.pools), ...status.starting.map((one) => one.kind)]);
  return [...kinds].flatMap((kind) => {
    const up = status.pools[kind] ?? [];
    const rows = up.map((one) => [
      kind,
      nameOf(kind, one.replica_id),
      one.draining ? "draining" : "up",
      kind === "router" ? `${one.num_sessions}` : `${one.num_sessions} / ${one.max_sessions}`,
      one.kv_pages ? `${Math.round((100 * one.kv_pages_used) / one.kv_pages)} %` : "–",
    ]);
    const starting = status.starting.filter((one) => one.kind === kind);
    rows.push(...starting.map((one) => [kind, nameOf(kind, one.replica_id), "starting", "–", "–"]));
    if (!rows.length && (seen.has(kind) || kind in status.pools)) rows.push([kind, kind, "none up", "–", "–"]);
    return rows;
  });
}

function cell(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

function show(status) {
  for (const [kind, up] of Object.entries(status.pools)) if (up.length) seen.add(kind);
  const drafts = seen.has("draft") || "draft" in status.pools || status.starting.some((one) => one.kind === "draft");
  document.body.dataset.drafts = drafts ? "some" : "none";
  const rows = rowsOf(status, seen).map(([, replica, state, sessions, kv]) => {
    const row = document.createElement("tr");
    const head = cell("th", replica);
    head.scope = "row";
    const pill = cell("span", state, `pill ${state === "up" ? "good" : "bad"}`);
    const second = document.createElement("td");
    second.append(pill);
    row.append(head, second, cell("td", sessions, "number"), cell("td", kv, "number"));
    return row;
  });
  $("replicas").replaceChildren(...rows);
  running.push(status.sessions_running);
  waiting.push(status.sessions_queued);
  if (running.length > KEPT) running.shift(), waiting.shift();
  $("sessions-now").textContent = `${status.sessions_running} running, ${status.sessions_queued} waiting`;
  drawSessions($("sessions"), running, waiting, KEPT);
  const percent = (share) => `${Math.round(100 * share)} %`;
  $("service-words").textContent =
    `Since the start: ${percent(status.acceptance_rate)} of drafted tokens accepted, ` +
    `mean acceptance length ${status.acceptance_length.toFixed(2)}` +
    (drafts || status.hit_rate ? `, ${percent(status.hit_rate)} hits.` : ".");
  const up = Boolean(status.pools.target?.length);
  say($("health"), up ? "serving" : "no target is up", up);
  const note = draftNote(status, seen);
  if ($("draft-note").textContent !== note) $("draft-note").textContent = note; // told once, not every second
  $("draft-note").hidden = !note;
}

function say(pill, words, good) {
  if (pill.textContent !== words) pill.textContent = words;
  pill.className = `pill ${good ? "good" : "bad"}`;
}

/** Asks again and again. `onKey` is called, and asking ends, when a key is needed. */
export async function watch(onKey) {
  for (;;) {
    if (!document.hidden) {
      try {
        show(await get("v1/status"));
      } catch (error) {
        if (error.status === 401) return onKey();
        say($("health"), error.type ?? "error", false);
        if (error.status === 404) return;
      }
    }
    await new Promise((resume) => setTimeout(resume, PERIOD_MS));
  }
}
