// What the page asks the service: JSON, and streams of server-sent events.

/** A refusal of the service, by its own name. */
export class ServiceError extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.type = error.type ?? `status ${status}`;
  }

  toString() {
    return `${this.type}: ${this.message}`;
  }
}

let key = null; // in memory alone

/** Sets the API key of all later requests. */
export function useKey(value) {
  key = value;
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key !== null) headers.authorization = `Bearer ${key}`;
  let reply;
  try {
    reply = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError(0, { type: "no answer", message: "the service cannot be reached" });
  }
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => ({}));
  throw new ServiceError(reply.status, body.error ?? { message: reply.statusText });
}

/** The object at a path. Throws ServiceError. */
export async function get(path, signal) {
  return (await ask(path, { signal })).json();
}

/** Yields the events of a stream, parsed. Throws ServiceError, also for one that comes within the stream. */
export async function* events(path, body, signal) {
  const reply = await ask(path, {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "content-type": "application/json" },
    signal,
  });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServiceError(0, { type: "broken stream", message: "the stream ended before its end" });
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.slice(part.indexOf("data: ") + 6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServiceError(reply.status, event.error);
      yield event;
    }
  }
}
