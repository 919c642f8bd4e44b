// The lab's JSON and event streams, with the API key of this tab where the gateway wants one.

const KEY = "quire-api-key";

/** What the server said, or that it could not be reached (status 0). */
export class ApiError extends Error {
  constructor(status, message, retryAfterS = null) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export function useKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key === null ? more : { ...more, authorization: `Bearer ${key}` };
}

async function answered(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the gateway cannot be reached");
  }
  if (!response.ok) throw await refused(response);
  return response;
}

async function refused(response) {
  const body = await response.json().catch(() => ({}));
  const retry = response.headers.get("retry-after");
  return new ApiError(response.status, body.error?.message ?? response.statusText, retry === null ? null : Number(retry));
}

/** GET as JSON. */
export async function get(path, signal) {
  return (await answered(path, { headers: headers(), signal })).json();
}

/** Events of GET `path`: calls `tell(kind, value)` for each until the stream ends. */
export async function follow(path, tell, signal) {
  const response = await answered(path, { headers: headers({ accept: "text/event-stream" }), signal });
  for await (const event of events(response.body)) tell(event.kind, JSON.parse(event.data));
}

/** Posts JSON and yields the data of the events that come back; `onStart(response)` before the first. */
export async function* post(path, body, signal, onStart) {
  const response = await answered(path, {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  onStart(response);
  for await (const event of events(response.body)) yield event.data;
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const event = parsed(part);
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

function parsed(part) {
  const event = { kind: "message", data: "" };
  for (const line of part.split("\n")) {
    if (line.startsWith("event: ")) event.kind = line.slice(7);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}
