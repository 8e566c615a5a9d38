// Requests to the client API. The browser sends the session cookie by itself, and scripts cannot read it.

/** An answer of the runtime that is not a success, or no answer (status 0). */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Called when the runtime no longer accepts the session. */
export const signedOut = new EventTarget();

export async function request(method, path, body, { signal, headers = {} } = {}) {
  const options = { method, signal, headers: { ...headers }, cache: 'no-store', redirect: 'error' };
  if (body !== undefined) {
    options.headers['content-type'] = 'application/json';
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ApiError(0, 'unreachable', 'The runtime does not answer. Check that rap serve is running.');
  }
  if (response.ok) return response.json();
  throw await problem(response);
}

async function problem(response) {
  let reason = { code: 'unknown', message: `The runtime answered ${response.status}.` };
  try {
    reason = (await response.json()).error ?? reason;
  } catch {
    // Not an answer of the runtime, perhaps one of a proxy.
  }
  if (response.status === 401) signedOut.dispatchEvent(new Event('signed-out'));
  return new ApiError(response.status, reason.code, reason.message);
}

export const get = (path, options) => request('GET', path, undefined, options);
export const post = (path, body, options) => request('POST', path, body, options);

/** Returns a path with its parts and parameters encoded. Parameters that are empty are left out. */
export function path(parts, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== undefined && value !== null && value !== '' && value !== false) query.set(name, value);
  }
  const text = query.toString();
  return `/v1/${parts.map(encodeURIComponent).join('/')}${text ? `?${text}` : ''}`;
}

// Event streams

const FIRST_PAUSE = 300;
const LONGEST_PAUSE = 10_000;
/** The runtime sends a comment every 15 seconds. A stream that is silent for longer is dead. */
const SILENCE = 45_000;

/**
 * Follows an event stream until `signal` aborts. It reconnects by itself, from the last event that had an id, so that no
 * such event is lost or repeated. `handlers.event(name, data)` gets each event; `handlers.state(live)` tells whether the
 * stream is connected.
 */
export async function follow(address, handlers, { signal, lastId } = {}) {
  let id = lastId;
  let pause = FIRST_PAUSE;
  while (!signal.aborted) {
    try {
      await readStream(address, id, signal, (name, data, eventId) => {
        pause = FIRST_PAUSE;
        if (eventId !== undefined) id = eventId;
        handlers.event(name, data);
      }, handlers);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && [401, 403, 404].includes(error.status)) {
        handlers.failed?.(error);
        return;
      }
    }
    if (signal.aborted) return;
    handlers.state?.(false);
    await sleep(pause * (0.75 + Math.random() / 2), signal);
    pause = Math.min(pause * 2, LONGEST_PAUSE);
  }
}

async function readStream(address, lastId, signal, deliver, handlers) {
  const attempt = new AbortController();
  const stop = () => attempt.abort();
  signal.addEventListener('abort', stop);
  let silent = setTimeout(stop, SILENCE);
  try {
    const headers = { accept: 'text/event-stream' };
    if (lastId !== undefined) headers['last-event-id'] = String(lastId);
    const response = await fetch(address, { headers, signal: attempt.signal, cache: 'no-store' });
    if (!response.ok) throw await problem(response);
    handlers.state?.(true);
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    let rest = '';
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(silent);
      silent = setTimeout(stop, SILENCE);
      rest += decoder.decode(value, { stream: true });
      const blocks = rest.split('\n\n');
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parseEvent(block);
        if (event) deliver(event.name, JSON.parse(event.data), event.id);
      }
    }
  } finally {
    clearTimeout(silent);
    signal.removeEventListener('abort', stop);
    attempt.abort();
  }
}

function parseEvent(block) {
  const event = { name: 'message', data: '', id: undefined };
  const data = [];
  for (const line of block.split('\n')) {
    const colon = line.indexOf(':');
    if (colon <= 0) continue;
    const field = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, '');
    if (field === 'event') event.name = value;
    else if (field === 'data') data.push(value);
    else if (field === 'id') event.id = value;
  }
  event.data = data.join('\n');
  return data.length ? event : undefined;
}

export function sleep(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener('abort', () => {
      clearTimeout(timer);
      resolve();
    }, { once: true });
  });
}
