// The page: what is served, which view suits it, and the key that it may want.

import * as chat from "./chat.js";
import * as completion from "./completion.js";
import { watch } from "./service.js";
import { get, useKey } from "./stream.js";

const $ = (id) => document.getElementById(id);
let watching = false;

function fail(words) {
  $("error").hidden = words === null;
  $("error").textContent = words ?? "";
}

function refuse(error) {
  if (error.status === 401) return needKey(error);
  fail(String(error));
}

function needKey(error) {
  const given = $("key").value !== "";
  $("key-form").hidden = false;
  $("model").textContent = "a key is needed";
  fail(given ? String(error) : null);
  $("key").focus();
}

/** Shows the chat or the completion of prompts. */
function view(name) {
  document.body.dataset.view = name;
  for (const one of ["chat", "completion"]) {
    $(one).hidden = one !== name;
    $(`to-${one}`).setAttribute("aria-pressed", one === name);
  }
}

async function start() {
  try {
    const { data } = await get("v1/models");
    const { chat_template: template } = await get("tokenizer_info");
    $("model").textContent = data[0].id;
    $("tokens").max = $("chat-tokens").max = data[0].max_model_len;
    $("views").hidden = !template;
    completion.suggest(data[0].id);
    view(template && location.hash !== "#completion" ? "chat" : "completion");
    $("key-form").hidden = true;
    fail(null);
  } catch (error) {
    return refuse(error);
  }
  if (watching) return;
  watching = true;
  watch(() => {
    watching = false;
    start();
  });
}

for (const part of [chat, completion]) part.connect({ fail, refuse });
for (const name of ["chat", "completion"]) $(`to-${name}`).addEventListener("click", () => view(name));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  start();
});
start();
