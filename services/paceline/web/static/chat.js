// The view of a chat: what was said, and next to it what speculation did for an answer.

import { blocksOf, elementOf } from "./markdown.js";
import { onDraw, redraw, show } from "./panel.js";
import { figuresOf } from "./rounds.js";
import { asked, compared, drawnSeed, Run, salt, tokenElement } from "./run.js";

const PATH = "v1/chat/completions";
const COPIED_MS = 1500;
const NEAR_END = 80; // pixels
const $ = (id) => document.getElementById(id);

const messages = []; // {role, content} and of answers {run, body, note}
let running = null; // AbortController of the answer in progress
let cached = salt(); // of this page: a chat finds its own beginning again
let page = null;

function element(name, className, ...children) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...children);
  return made;
}

function button(label, act, words = label) {
  const made = element("button", "quiet small", label);
  made.type = "button";
  if (words !== label) made.setAttribute("aria-label", words);
  made.addEventListener("click", () => act(made));
  return made;
}

async function copy(text, from) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else {
    const area = element("textarea", "hidden"); // pages without encryption have no clipboard
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const label = from.textContent;
  from.textContent = "Copied";
  setTimeout(() => (from.textContent = label), COPIED_MS);
}

// -- what is said ------------------------------------------------------------------------------------------------------

/** Makes the nodes of characters of a text whose places in `run.places[kind]` tell who proposed them. */
function leafOf(run, kind) {
  return (text, places) => {
    const nodes = [];
    for (let from = 0; from < text.length; ) {
      const piece = run.places[kind][places[from]];
      let to = from + 1;
      while (to < text.length && run.places[kind][places[to]] === piece) to += 1;
      const part = text.slice(from, to);
      nodes.push(piece === null ? document.createTextNode(part) : tokenElement(part, run.pieces[piece]));
      from = to;
    }
    return nodes;
  };
}

function framed(pre, { name, text }) {
  const head = element("div", "code-head", element("span", "", name || "text"), button("Copy", (from) => copy(text, from), "Copy this code"));
  pre.tabIndex = 0;
  pre.setAttribute("aria-label", "Code");
  return element("div", "code", head, pre);
}

/** Shows a text as Markdown; blocks that have not changed since the last time stay as they are. */
function render(into, run, kind) {
  const source = run.said[kind];
  const blocks = blocksOf(source);
  const old = into.blocks ?? [];
  let same = 0;
  const unchanged = (i) => i < old.length - 1 && i < blocks.length && old[i].start === blocks[i].start && old[i].end === blocks[i].end;
  while (unchanged(same)) same += 1;
  while (into.childNodes.length > same) into.lastChild.remove();
  into.append(...blocks.slice(same).map((block) => elementOf(source, block, leafOf(run, kind), framed)));
  into.blocks = blocks;
}

function drawAnswer(message) {
  const { run, view } = message;
  view.thought.hidden = !run.said.reasoning;
  if (run.said.reasoning) render(view.reasoning, run, "reasoning");
  render(view.text, run, "content");
  const { acceptance, tokensPerRound } = figuresOf(run.rounds.list);
  const parts = [`${run.rounds.tokens.length} tokens`];
  if (run.rate > 0) parts.push(`${run.rate.toFixed(0)} tokens/s`);
  if (tokensPerRound !== null) parts.push(`${tokensPerRound.toFixed(2)} per verification`);
  if (acceptance !== null) parts.push(`${Math.round(100 * acceptance)} % of drafted tokens accepted`);
  view.figures.textContent = run.rounds.tokens.length ? parts.join(" · ") : "";
}

/** Draws while keeping the end in sight, if it was. */
function draw() {
  const log = $("log");
  const last = messages.at(-1);
  if (!last?.run) return;
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
  drawAnswer(last);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function viewOfUser(message) {
  const item = element("li", "message user");
  const text = element("p", "said", message.content);
  const edit = button("Edit", () => editing(message, item), "Edit this question and ask again");
  item.append(element("h3", "hidden", "You"), text, element("div", "actions", button("Copy", (from) => copy(message.content, from)), edit));
  return item;
}

function editing(message, item) {
  if (running) return;
  const area = element("textarea", "");
  area.value = message.content;
  area.rows = Math.min(12, message.content.split("\n").length + 1);
  area.setAttribute("aria-label", "The question");
  const cancel = button("Cancel", () => item.replaceWith(viewOfUser(message)));
  const send = button("Ask again", () => {
    if (!area.value.trim()) return;
    forgetFrom(messages.indexOf(message));
    ask(area.value);
  });
  send.classList.remove("quiet");
  item.classList.add("editing");
  item.replaceChildren(area, element("div", "actions", send, cancel));
  area.focus();
}

function viewOfAnswer(message) {
  const view = {
    item: element("li", "message assistant"),
    reasoning: element("div", "prose"),
    text: element("div", "prose"),
    figures: element("p", "rate"),
    note: element("p", "verdict"),
    actions: element("div", "actions"),
  };
  view.thought = element("details", "thought", element("summary", "", "Thoughts"), view.reasoning);
  view.note.hidden = view.thought.hidden = true;
  view.text.setAttribute("aria-busy", "true");
  view.actions.append(
    button("Copy", (from) => copy(message.content, from), "Copy this answer"),
    button("Ask again", () => again(message), "Ask again for this answer"),
    button("Compare with plain", () => compare(message)),
    button("Rounds", () => select(message), "Show the rounds of this answer"),
  );
  view.actions.hidden = true;
  view.item.append(element("h3", "hidden", "The model"), view.thought, view.text, view.figures, view.note, view.actions);
  return view;
}

function select(message) {
  show({ run: message.run, plain: () => message.plain, running: () => running !== null && message === messages.at(-1) });
  for (const one of messages) one.view?.item.classList.toggle("selected", one === message);
}

function forgetFrom(index) {
  for (const one of messages.splice(index)) (one.view?.item ?? one.item).remove();
  $("welcome").hidden = messages.length > 0;
}

// -- asking ------------------------------------------------------------------------------------------------------------

function settings() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  return { temperature: number("chat-temperature"), max_tokens: number("chat-tokens"), seed: number("chat-seed") ?? drawnSeed() };
}

async function ask(question) {
  if (running || !question.trim()) return;
  const message = { role: "user", content: question };
  message.item = viewOfUser(message);
  messages.push(message);
  $("messages").append(message.item);
  await answer();
}

function again(message) {
  if (running) return;
  forgetFrom(messages.indexOf(message));
  answer();
}

async function answer() {
  page.fail(null);
  const system = $("chat-system").value.trim();
  const said = messages.map(({ role, content }) => ({ role, content }));
  const history = system ? [{ role: "system", content: system }, ...said] : said;
  const message = { role: "assistant", content: "", run: new Run(), plain: null, given: { messages: history, ...settings() } };
  message.view = viewOfAnswer(message);
  messages.push(message);
  $("messages").append(message.view.item);
  $("welcome").hidden = true;
  select(message);
  onDraw(draw);
  running = new AbortController();
  busy(true, "The model answers …");
  $("log").scrollTop = $("log").scrollHeight;
  let words = "The answer is complete.";
  try {
    const body = asked({ ...message.given, cache_salt: cached }, { mode: $("chat-mode").value });
    await message.run.stream(PATH, body, running.signal, redraw);
  } catch (error) {
    if (error.name !== "AbortError") page.refuse(error);
    words = error.name === "AbortError" ? "Stopped." : "No answer: the service has refused, or has failed.";
  }
  running = null;
  message.content = message.run.said.content;
  message.stopped = words !== "The answer is complete.";
  if (!message.run.text) {
    const question = messages.at(-2);
    forgetFrom(messages.indexOf(question));
    if (!$("say").value) $("say").value = question.content;
  }
  drawAnswer(message);
  message.view.text.setAttribute("aria-busy", "false");
  message.view.actions.hidden = false;
  busy(false, words);
  redraw();
  $("say").focus();
}

/** Has an answer decoded plainly, with the same messages and seed, and says whether the tokens are the same. */
async function compare(message) {
  if (running) return;
  const { note } = message.view;
  const plain = (message.plain = new Run());
  page.fail(null);
  running = new AbortController();
  note.hidden = false;
  note.className = "verdict";
  busy(true, "Plain decoding answers …");
  select(message);
  try {
    const body = asked({ ...message.given, cache_salt: salt() }, { enabled: false });
    await plain.stream(PATH, body, running.signal, () => {
      note.textContent = `Plain decoding: ${plain.rounds.tokens.length} tokens …`;
      redraw();
    });
    judge(message);
  } catch (error) {
    note.hidden = true;
    message.plain = null;
    if (error.name !== "AbortError") page.refuse(error);
  }
  running = null;
  busy(false, note.hidden ? "Stopped." : note.textContent);
  redraw();
}

function judge({ run, plain, stopped, view: { note } }) {
  const { differ, words } = compared(run, plain, stopped);
  note.className = `verdict ${differ ? "bad" : "good"}`;
  note.textContent = words;
}

function busy(now, words) {
  $("send").hidden = now;
  $("chat-stop").hidden = !now;
  $("chat-status").textContent = words;
  document.body.classList.toggle("busy", now);
  for (const one of $("messages").querySelectorAll(".actions button")) one.disabled = now;
}

function fit() {
  const say = $("say");
  say.style.height = "auto";
  say.style.height = `${Math.min(say.scrollHeight + 2, 240)}px`;
}

function send() {
  const question = $("say").value;
  if (running || !question.trim()) return;
  $("say").value = "";
  fit();
  ask(question);
}

/** Connects the view. `given`: `fail(words)` and `refuse(error)`. */
export function connect(given) {
  page = given;
  $("speak").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("say").addEventListener("input", fit);
  $("say").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("chat-stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    if (running) return;
    forgetFrom(0);
    cached = salt();
    $("say").focus();
  });
  $("chat-colors").addEventListener("change", () => document.body.classList.toggle("colorless", !$("chat-colors").checked));
  for (const example of $("examples").querySelectorAll("button")) example.addEventListener("click", () => ask(example.textContent));
}
