// The view of a prompt that is continued twice, overlapped and plain, and what comes of it.

import { capital, draw, onDraw, redraw, show } from "./panel.js";
import { asked, compared, drawnSeed, Run, salt, tokenElement } from "./run.js";

const PYTHON = "def read_file(path):\n";
const PROSE = "The three most important inventions of the nineteenth century were";
const WAYS = ["overlapped", "plain"];
const $ = (id) => document.getElementById(id);

let runs = {};
let running = null; // AbortController of the run in progress

/** A prompt that suits a model, unless one is there. */
export function suggest(model) {
  if (!$("prompt").value) $("prompt").value = model.startsWith("paceline/embedded") ? PYTHON : PROSE;
}

function drawRates() {
  for (const name of WAYS) {
    const run = runs[name];
    if (run?.rounds.tokens.length) $(`${name}-rate`).textContent = `${run.rounds.tokens.length} tokens, ${run.rate.toFixed(0)} tokens/s`;
  }
}

function judge() {
  const { differ, words } = compared(runs.overlapped, runs.plain);
  $("verdict").className = `verdict ${differ ? "bad" : "good"}`;
  $("verdict").textContent = words;
}

async function run(event, { fail, refuse }) {
  event.preventDefault();
  if (running) return;
  fail(null);
  if (!$("seed").value) $("seed").value = `${drawnSeed()}`;
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
  runs = { overlapped: new Run(), plain: new Run() };
  for (const name of WAYS) {
    $(name).replaceChildren();
    $(`${name}-rate`).textContent = "";
  }
  show({ run: runs.overlapped, plain: () => runs.plain, running: () => running !== null });
  onDraw(drawRates);
  busy(true);
  $("verdict").className = "verdict";
  $("verdict").textContent = "Running …";
  try {
    const one = (name) => {
      const body = asked({ ...given, cache_salt: salt() }, name === "overlapped" ? { mode } : { enabled: false });
      return runs[name].stream("v1/completions", body, signal, (pieces) => {
        const { number } = runs[name].rounds.list.at(-1) ?? { number: null };
        $(name).append(...pieces.map(({ text, origin }) => tokenElement(text, { origin, round: number })));
        redraw();
      });
    };
    if ($("order").value === "together") await Promise.all(WAYS.map(one));
    else for (const name of WAYS) await one(name);
    judge();
  } catch (error) {
    if (error.name === "AbortError") $("verdict").textContent = "Stopped.";
    else {
      $("verdict").textContent = "No text: the service has refused, or has failed.";
      refuse(error);
    }
  } finally {
    running.abort(); // the other stream, if one has failed
    running = null;
    draw();
    busy(false);
  }
}

function busy(now) {
  $("run").disabled = now;
  $("stop").disabled = !now;
  document.body.classList.toggle("busy", now);
  for (const name of WAYS) $(name).setAttribute("aria-busy", now);
}

/** Connects the view. `page`: `fail(words)` and `refuse(error)`. */
export function connect(page) {
  $("ask").addEventListener("submit", (event) => run(event, page));
  $("stop").addEventListener("click", () => running?.abort());
}
