// The history of a thread as people read it.

import { ago, duration, fill, h, json, pre, said, since, time, visible } from './dom.js';
import { markdown } from './markdown.js';
import { badge, explain } from './status.js';

const IMAGE_TYPES = new Set(['image/png', 'image/jpeg', 'image/gif', 'image/webp']);
/** Children of one place that are always shown. */
const FOLDED = 3;
/** Results that are longer begin folded. */
const LONG = 600;

/** Returns an image of a conversation, which is part of it and loaded from nowhere. */
function image({ data, mediaType }) {
  if (!IMAGE_TYPES.has(mediaType) || !/^[A-Za-z0-9+/=\s]*$/.test(data ?? '')) return h('p', { class: 'faint' }, 'An image of an unknown kind');
  return h('img', { class: 'picture', src: `data:${mediaType};base64,${data}`, alt: 'Image of the conversation' });
}

function items(content) {
  if (typeof content === 'string') return [pre(content)];
  return (content ?? []).map((item) => (item.type === 'image' ? image(item) : pre(item.text ?? '')));
}

/** Returns a change of a file, line by line. */
export function diff({ path, patch }) {
  const kinds = { '+': 'added', '-': 'removed', '@': 'hunk' };
  const lines = String(patch ?? '').split('\n').map((line) => {
    const header = line.startsWith('+++') || line.startsWith('---');
    return h('span', { class: header ? 'hunk' : kinds[line[0]] ?? null }, `${visible(line)}\n`);
  });
  return h('figure', { class: 'diff' }, h('figcaption', {}, said(path)), h('pre', { tabindex: '0' }, h('code', {}, lines)));
}

function segment({ type, content }) {
  if (type === 'text') return pre(content);
  if (type === 'diff') return diff(content ?? {});
  if (type === 'image') return image(content ?? {});
  return json(content);
}

function textOf(content) {
  return typeof content === 'string' ? content : (content ?? []).map((item) => item.text ?? '[image]').join(' ');
}

function firstLine(text, length = 120) {
  const line = visible(text).split('\n').find((part) => part.trim() !== '') ?? '';
  return line.length > length ? `${line.slice(0, length)}…` : line;
}

/** One call with its state and, when it has one, its result. */
class CallCard {
  constructor(call, at) {
    this.call = call;
    this.at = at;
    this.result = undefined;
    this.open = undefined;
    this.state = h('span', { class: 'call-state' });
    this.body = h('div', { class: 'call-body' });
    this.more = h('div', { class: 'call-more' });
    this.element = h('details', { class: 'call' },
      h('summary', {}, h('span', { class: 'call-name' }, said(call.name)), h('span', { class: 'call-text' }, said(callText(call))), this.state),
      this.body);
    this.draw();
  }

  draw() {
    const { call, result, open } = this;
    const arguments_ = h('div', {}, h('p', { class: 'label' }, 'Arguments'), json(call.arguments));
    if (!result) {
      fill(this.state, open?.needs_approval ? ['waits to be allowed ', since(open.since)] : open ? [h('span', { class: 'spinner', 'aria-hidden': 'true' }), 'running ', since(open.since)] : 'no result yet');
      fill(this.body, this.more, arguments_);
      return;
    }
    const text = textOf(result.content);
    const failed = text.startsWith('Error:');
    const placeholder = open !== undefined;
    this.element.classList.toggle('failed', failed);
    const took = new Date(result.at) - new Date(this.at);
    fill(this.state, placeholder ? ['in the background ', since(open.since)] : [failed ? 'failed' : 'done', took > 500 ? ` · ${duration(took)}` : '']);
    const shown = result.display.length ? result.display.map(segment) : items(result.content);
    fill(this.body, this.more, h('div', { class: 'result' }, shown), h('details', { class: 'inner' }, h('summary', {}, 'Arguments'), json(call.arguments)),
      result.display.length ? h('details', { class: 'inner' }, h('summary', {}, 'What the model sees'), items(result.content)) : null);
  }

  settle(entry) {
    this.result = entry;
    this.draw();
    if (entry.display.length || textOf(entry.content).length <= LONG) this.element.open = !this.call.synthetic;
  }
}

function callText(call) {
  if (call.display && call.display !== call.name) return call.display.startsWith(`${call.name}(`) ? call.display.slice(call.name.length + 1, -1) : call.display;
  const given = call.arguments;
  if (given && typeof given === 'object') return Object.keys(given).length ? firstLine(JSON.stringify(given)) : '';
  return firstLine(String(given ?? ''));
}

const SENDERS = { parent: 'Parent thread', runtime: 'Runtime' };

/** The conversation of one thread. `actions.fork(seq)` and `actions.cancel(callId)` are the person's. */
export class Conversation {
  constructor(actions) {
    this.actions = actions;
    this.element = h('div', { role: 'log', class: 'log', 'aria-label': 'Conversation', tabindex: '0' });
    this.entries = [];
    this.openCalls = new Map();
    this.children = [];
    this.clear();
  }

  clear() {
    this.calls = new Map();
    this.draft = undefined;
    this.drafted = { turn: -1, attempt: -1, text: '' };
    this.shownChildren = new Set();
    this.element.replaceChildren();
  }

  /** Draws everything again, after entries were added at the beginning. */
  redraw() {
    const { drafted } = this;
    this.clear();
    for (const entry of this.entries) this.draw(entry);
    this.drawChildren();
    if (drafted.text) this.stream(drafted);
  }

  get lastSeq() {
    return this.entries.at(-1)?.seq ?? 0;
  }

  /** Adds an entry. One that is there already is ignored. */
  add(entry) {
    if (entry.seq <= this.lastSeq) return;
    this.entries.push(entry);
    if (entry.kind === 'assistant') this.endDraft();
    this.draw(entry);
  }

  place(node, at) {
    node.dataset.at = at;
    if (this.draft) this.draft.before(node);
    else this.element.append(node);
  }

  draw(entry) {
    switch (entry.kind) {
      case 'user': return this.place(this.user(entry), entry.at);
      case 'assistant': return this.assistant(entry);
      case 'result': return this.result(entry);
      case 'notice': return this.place(h('p', { class: 'notice' }, said(entry.text), ' ', time(entry.at)), entry.at);
      case 'summary': return this.place(h('details', { class: 'summary' }, h('summary', {}, `Summary of the conversation up to entry ${entry.covers}`), h('div', { class: 'prose' }, markdown(entry.text))), entry.at);
      default: return this.place(h('p', { class: 'notice' }, 'An entry of a newer version'), entry.at);
    }
  }

  head(name, entry) {
    const branch = this.actions.fork && h('button', { type: 'button', class: 'quiet branch', title: 'Start a new thread that begins with the conversation up to here', click: (event) => this.actions.fork(entry.seq, event.currentTarget) }, 'Fork from here');
    return h('header', {}, h('b', {}, name), ' ', time(entry.at), branch);
  }

  user(entry) {
    const from = SENDERS[entry.from];
    const pictures = Array.isArray(entry.content) ? entry.content.filter((item) => item.type === 'image').map(image) : [];
    const more = Array.isArray(entry.content) ? entry.content.filter((item) => item.type === 'text').map((item) => h('div', { class: 'plain', dir: 'auto' }, visible(item.text))) : [];
    return h('article', { class: from ? 'entry told' : 'entry user' }, this.head(from ?? 'You', entry), entry.text || !pictures.length ? h('div', { class: 'plain', dir: 'auto' }, visible(entry.text)) : null, more, pictures);
  }

  assistant(entry) {
    const synthetic = entry.calls.length > 0 && entry.calls.every((call) => call.synthetic);
    const cards = entry.calls.map((call) => {
      const card = new CallCard(call, entry.at);
      card.open = this.openCalls.get(call.id);
      this.calls.set(call.id, card);
      card.draw();
      return card.element;
    });
    if (synthetic && !entry.text) {
      for (const card of cards) card.classList.add('event');
      this.place(h('div', { class: 'entry event-entry' }, h('p', { class: 'label' }, 'Event ', time(entry.at)), cards), entry.at);
      return;
    }
    const usage = entry.usage && h('span', { class: 'faint usage', title: 'Tokens of this answer: input and output' }, `${entry.usage.input} + ${entry.usage.output} tokens`);
    const header = this.head('Agent', entry);
    if (usage) header.querySelector('time').after(' ', usage);
    this.place(h('article', { class: 'entry assistant' }, header, entry.text ? h('div', { class: 'prose', dir: 'auto' }, markdown(entry.text)) : null, cards), entry.at);
  }

  result(entry) {
    const card = this.calls.get(entry.call_id);
    if (card) {
      card.settle(entry);
      return;
    }
    // Its call is in an earlier part of the history, which is not shown.
    const text = textOf(entry.content);
    const node = h('details', { class: 'call', open: text.length <= LONG }, h('summary', {}, h('span', { class: 'call-text' }, 'Result of an earlier call')), h('div', { class: 'call-body' }, entry.display.length ? entry.display.map(segment) : items(entry.content)));
    this.place(node, entry.at);
  }

  /** Updates the state of a call that the runtime reported. */
  updateCall(event) {
    const card = this.calls.get(event.call_id);
    if (event.state === 'open') this.openCalls.set(event.call_id, event);
    else this.openCalls.delete(event.call_id);
    if (!card) return;
    card.open = this.openCalls.get(event.call_id);
    card.draw();
  }

  /** Shows a piece of an answer in progress. */
  stream({ turn, attempt, text }) {
    const same = this.drafted.turn === turn && this.drafted.attempt === attempt;
    this.drafted = { turn, attempt, text: same ? this.drafted.text + text : text };
    if (!this.draft) {
      this.draftText = h('div', { class: 'prose', dir: 'auto' });
      this.draft = h('article', { class: 'entry assistant draft', 'aria-live': 'off', 'aria-busy': 'true' }, h('header', {}, h('b', {}, 'Agent'), ' ', h('span', { class: 'faint' }, 'writing…')), this.draftText);
      this.element.append(this.draft);
    }
    this.scheduleDraft();
  }

  scheduleDraft() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = undefined;
      if (this.draft) fill(this.draftText, markdown(this.drafted.text));
      this.actions.grew?.();
    });
  }

  /** Removes the answer in progress: its entry has arrived, or parts of it may have been missed. */
  endDraft() {
    this.draft?.remove();
    this.draft = undefined;
    this.drafted = { turn: -1, attempt: -1, text: '' };
  }

  /** Shows the children of the thread where they were spawned. */
  setChildren(threads) {
    this.children = threads;
    this.drawChildren();
  }

  drawChildren() {
    for (const line of this.element.querySelectorAll('.child')) line.remove();
    const nodes = [...this.element.children];
    const first = this.entries[0]?.at;
    // Children that were spawned between the same two entries are shown together.
    const groups = new Map();
    for (const child of [...this.children].sort((a, b) => (a.created_at < b.created_at ? -1 : 1))) {
      if (first && child.created_at < first && this.actions.hasEarlier?.()) continue;
      const next = nodes.find((node) => node.dataset.at > child.created_at) ?? this.draft;
      groups.set(next, [...groups.get(next) ?? [], child]);
    }
    for (const [next, children] of groups) {
      const lines = this.childLines(children);
      if (next) next.before(...lines);
      else this.element.append(...lines);
    }
  }

  /** One line for each child; the older ones of many are folded. */
  childLines(children) {
    const lines = children.map((child) => h('p', { class: 'child' }, h('span', { 'aria-hidden': 'true' }, '↳ '),
      h('a', { href: `/threads/${encodeURIComponent(child.id)}` }, 'child ', said(child.title || child.id)), ' ', badge(child.status), ' ', h('span', { class: 'faint' }, explain(child), ' · ', ago(child.created_at))));
    if (lines.length <= FOLDED + 2) return lines;
    const older = lines.splice(0, lines.length - FOLDED);
    return [h('details', { class: 'child' }, h('summary', {}, `${older.length} earlier children`), older), ...lines];
  }
}
