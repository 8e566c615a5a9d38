// Building blocks of all views. Text from outside only ever becomes text nodes: nothing here parses HTML.

const SVG = 'http://www.w3.org/2000/svg';
const SVG_TAGS = new Set(['svg', 'g', 'path', 'rect', 'line', 'circle', 'text', 'title', 'polyline']);

/** Makes an element. Attributes that are functions are listeners; null, undefined and false leave an attribute out. */
export function h(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) && tag !== 'title' ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === 'function') element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  append(element, children);
  return element;
}

/** Makes the title of an SVG element, which browsers show as a tooltip. */
export function svgTitle(text) {
  const title = document.createElementNS(SVG, 'title');
  title.textContent = text;
  return title;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === '') continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/** Replaces the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

// Characters that hide, reorder or forge what a person reads: controls, direction controls, characters without a glyph.
const HIDDEN = /[\0-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\u{1bca0}-\u{1bca3}\u{1d173}-\u{1d17a}\u{e0000}-\u{e0fff}]/gu;

/** Returns text from outside with its hidden characters made visible, as the terminal shows them. */
export function visible(text) {
  return String(text ?? '').replace(/\r\n/g, '\n').replace(HIDDEN, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

/** Makes an element for text from outside, whose writing direction does not affect its neighbours. */
export function said(text, attributes = {}) {
  return h('bdi', attributes, visible(text));
}

/** Makes a block of text from outside as it is, with its line breaks. */
export function pre(text, attributes = {}) {
  return h('pre', { tabindex: '0', dir: 'auto', ...attributes }, visible(text));
}

export function json(value) {
  return pre(JSON.stringify(value, null, 2), { class: 'json' });
}

// Times

const DAY = 86_400_000;
const clock = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit' });
const dayAndClock = new Intl.DateTimeFormat(undefined, { day: 'numeric', month: 'short', hour: '2-digit', minute: '2-digit' });
const withSeconds = new Intl.DateTimeFormat(undefined, { day: 'numeric', month: 'short', hour: '2-digit', minute: '2-digit', second: '2-digit' });
const full = new Intl.DateTimeFormat(undefined, { dateStyle: 'full', timeStyle: 'long' });

/** Returns a time of day, with the date unless it is today. */
export function shortTime(at) {
  const date = new Date(at);
  const today = date.toDateString() === new Date().toDateString();
  return (today ? clock : dayAndClock).format(date);
}

/** Returns a duration in its two largest units, such as "2 h 5 min". */
export function duration(ms) {
  if (ms < 1000) return ms < 100 ? `${Math.max(0, Math.round(ms))} ms` : `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  const units = [[86_400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
  const first = units.findIndex(([size]) => seconds >= size);
  const [size, unit] = units[first];
  const rest = units[first + 1];
  const left = rest ? Math.floor((seconds % size) / rest[0]) : 0;
  return `${Math.floor(seconds / size)} ${unit}${left ? ` ${left} ${rest[1]}` : ''}`;
}

function relative(at) {
  const ms = Date.now() - new Date(at).getTime();
  if (Math.abs(ms) < 5000) return 'now';
  const size = Math.abs(ms);
  const rounded = size < 60_000 ? size : size < 3_600_000 ? size - (size % 60_000) : size < DAY ? size - (size % 3_600_000) : size - (size % DAY);
  return ms > 0 ? `${duration(rounded)} ago` : `in ${duration(rounded)}`;
}

function elapsed(at) {
  return duration(Math.max(0, Math.floor((Date.now() - new Date(at).getTime()) / 1000) * 1000));
}

/** Makes a time relative to now that stays right while it is shown. */
export function ago(at) {
  return h('time', { datetime: at, title: full.format(new Date(at)), 'data-ago': at }, relative(at));
}

/** Makes the time that has passed since then, which keeps counting. */
export function since(at) {
  return h('time', { datetime: at, title: `since ${full.format(new Date(at))}`, 'data-since': at }, elapsed(at));
}

/** Makes a time with its date and seconds. */
export function exactTime(at) {
  return h('time', { datetime: at, title: full.format(new Date(at)) }, withSeconds.format(new Date(at)));
}

export function time(at) {
  return h('time', { datetime: at, title: full.format(new Date(at)) }, shortTime(at));
}

setInterval(() => {
  for (const element of document.querySelectorAll('time[data-since]')) {
    const text = elapsed(element.dataset.since);
    if (element.textContent !== text) element.textContent = text;
  }
  for (const element of document.querySelectorAll('time[data-ago]')) {
    const text = relative(element.dataset.ago);
    if (element.textContent !== text) element.textContent = text;
  }
}, 1000);

// Numbers

const compact = new Intl.NumberFormat(undefined, { notation: 'compact', maximumFractionDigits: 1 });

export function count(number) {
  return number < 10_000 ? number.toLocaleString() : compact.format(number);
}

export function dollars(cost) {
  if (!cost) return '$0';
  const decimals = cost >= 0.1 ? 2 : Math.min(9, 1 - Math.floor(Math.log10(cost)));
  return `$${cost.toFixed(decimals)}`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// States of a view

/** Makes the message of a list that has nothing in it. */
export function empty(title, ...hints) {
  return h('div', { class: 'empty' }, h('p', { class: 'empty-title' }, title), hints.map((hint) => h('p', {}, hint)));
}

/** Makes the message of a view that could not be read, with a way to try again. */
export function failure(error, again) {
  return h('div', { class: 'problem', role: 'alert' },
    h('p', {}, visible(error.message)),
    again && h('button', { type: 'button', click: again }, 'Try again'));
}

export function loading() {
  return h('p', { class: 'loading', role: 'status' }, 'Loading…');
}

/** Shows a short message at the edge of the window. */
export function toast(text, kind = 'info') {
  let region = document.getElementById('toasts');
  if (!region) {
    region = h('div', { id: 'toasts', role: 'status' });
    document.body.append(region);
  }
  const message = h('div', { class: `toast ${kind}` }, visible(text));
  region.append(message);
  setTimeout(() => message.remove(), kind === 'error' ? 8000 : 4000);
}

/** Runs an action of a button. The button is disabled meanwhile, and a failure is shown. */
export async function act(button, action) {
  button.disabled = true;
  try {
    return await action();
  } catch (error) {
    toast(error.message, 'error');
    return undefined;
  } finally {
    button.disabled = false;
  }
}
