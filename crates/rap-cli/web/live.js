// The stream of all threads, which every view shares: one connection for each window.

import { follow, get } from './api.js';

/** Events: `status`, `question`, `notice` and `delivery` with `detail`; `reset` after the stream was interrupted. */
export const live = new EventTarget();

/** State of the connection. */
export const connection = { live: false };

let controller;
let wanted = false;
let connectedBefore = false;

function emit(name, detail) {
  live.dispatchEvent(new CustomEvent(name, { detail }));
}

function connect() {
  if (controller) return;
  controller = new AbortController();
  follow('/v1/events', {
    event(name, data) {
      if (name === 'choice' || name === 'oauth') emit('question', data);
      else emit(name, data);
    },
    state(isLive) {
      connection.live = isLive;
      emit('connection', isLive);
      // Events may have been missed in between, so views read their rows again.
      if (isLive && connectedBefore) emit('reset');
      connectedBefore ||= isLive;
    },
    failed() {
      connection.live = false;
      emit('connection', false);
    },
  }, { signal: controller.signal });
}

function disconnect() {
  controller?.abort();
  controller = undefined;
}

export function start() {
  wanted = true;
  connect();
}

export function stop() {
  wanted = false;
  disconnect();
}

// A browser opens few connections to one server, so windows that nobody sees give theirs back after a while. A window that
// notifies a person keeps its own.
const HIDDEN_FOR = 60_000;
let hiding;
document.addEventListener('visibilitychange', () => {
  clearTimeout(hiding);
  const notifies = 'Notification' in window && Notification.permission === 'granted';
  if (document.hidden) {
    if (!notifies) hiding = setTimeout(disconnect, HIDDEN_FOR);
  } else if (wanted) {
    connect();
  }
});

/** Calls `listener` for events until `signal` aborts. */
export function on(name, listener, signal) {
  live.addEventListener(name, (event) => listener(event.detail), { signal });
}

/** Returns a function that calls `action` soon, but not more often than every `ms`. Calls in between are merged. */
export function throttled(action, ms, signal) {
  let waiting = false;
  let again = false;
  const run = async () => {
    waiting = true;
    again = false;
    try {
      await action();
    } finally {
      setTimeout(() => {
        waiting = false;
        if (again && !signal?.aborted) run();
      }, ms);
    }
  };
  return () => {
    if (signal?.aborted) return;
    if (waiting) again = true;
    else run();
  };
}

// The number of open questions, which the navigation and the title show.

export const inbox = { count: 0, more: false };

export const countQuestions = throttled(async () => {
  try {
    const page = await get('/v1/inbox?limit=100');
    inbox.count = page.items.length;
    inbox.more = page.next_cursor !== null;
    emit('inbox', inbox);
  } catch {
    // The state of the connection shows the problem.
  }
}, 1000);

live.addEventListener('question', countQuestions);
live.addEventListener('status', countQuestions);
live.addEventListener('reset', countQuestions);
