// The wakes and sleeps of a thread, to scale.

import { duration, h, shortTime, svgTitle } from './dom.js';

const WIDTH = 300;
const HEIGHT = 44;
/** Longest gap between two entries of one stretch of work, in milliseconds. */
const GAP = 2000;

/** Returns the stretches in which a thread was awake: from an input to the last entry that follows from it. */
export function stretches(entries, thread) {
  const found = [];
  let open;
  const pending = new Set();
  for (const entry of entries) {
    if (entry.kind === 'notice' || entry.kind === 'summary') continue;
    const at = new Date(entry.at).getTime();
    // After an answer without calls, a thread sleeps until the next input. While calls run, it sleeps until a result.
    if (!open || (open.ended && at - open.to > GAP) || (open.waits && at - open.to > GAP)) {
      open = { from: at, to: at, why: reason(entry) };
      found.push(open);
    }
    open.to = Math.max(open.to, at);
    if (entry.kind === 'assistant') for (const call of entry.calls) pending.add(call.id);
    if (entry.kind === 'result') pending.delete(entry.call_id);
    open.ended = entry.kind === 'assistant' && entry.calls.length === 0;
    open.waits = pending.size > 0;
  }
  if (open && thread.status === 'running') open.to = Date.now();
  return found;
}

function reason(entry) {
  if (entry.kind === 'user') return entry.from ? `a message of the ${entry.from}` : 'a message of a person';
  if (entry.kind === 'assistant' && entry.calls.some((call) => call.synthetic)) return 'an event';
  return entry.kind === 'result' ? 'a result' : 'a turn';
}

/** Makes the chart: filled where the thread was awake, empty where it slept. */
export function timeline(entries, thread) {
  const awake = stretches(entries, thread);
  if (awake.length === 0) return h('p', { class: 'faint' }, 'Nothing has happened yet.');
  const from = awake[0].from;
  const to = Math.max(Date.now(), awake.at(-1).to, from + 1000);
  const x = (at) => ((at - from) / (to - from)) * WIDTH;
  const bars = awake.map((stretch) => h('rect', { x: x(stretch.from).toFixed(2), y: '6', width: Math.max(1.5, x(stretch.to) - x(stretch.from)).toFixed(2), height: '20', rx: '1', class: 'awake' },
    svgTitle(`${shortTime(stretch.from)}: woken by ${stretch.why}, awake for ${duration(stretch.to - stretch.from)}`)));
  const total = awake.reduce((sum, stretch) => sum + stretch.to - stretch.from, 0);
  const label = `Awake ${awake.length} ${awake.length === 1 ? 'time' : 'times'}, ${duration(total)} of ${duration(to - from)}`;
  return h('figure', { class: 'timeline' },
    h('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img', 'aria-label': label },
      h('rect', { x: '0', y: '15', width: String(WIDTH), height: '2', class: 'asleep' }), bars,
      h('text', { x: '0', y: '40' }, shortTime(from)), h('text', { x: String(WIDTH), y: '40', 'text-anchor': 'end' }, 'now')),
    h('figcaption', { class: 'faint' }, label));
}
