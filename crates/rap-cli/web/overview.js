// Figures of the whole runtime, now and over time.

import { get, path } from './api.js';
import { bars } from './charts.js';
import { count, dollars, duration, failure, fill, h, loading, plural, time, visible } from './dom.js';
import { inbox, on, throttled } from './live.js';
import { STATUSES, word } from './status.js';

const RANGES = { day: ['24 hours', 24], week: ['7 days', 7 * 24], month: ['30 days', 30 * 24] };

const EXPLAINED = {
  running: 'the model is being asked',
  waiting: 'for results of calls',
  needs_you: 'a question for a person',
  failed: 'the model request failed',
  idle: 'asleep until something happens',
  closed: 'ended',
};

const MEASURES = [
  ['Wakes', 'wakes', count],
  ['Model requests', 'turns', count],
  ['Model time', 'model_ms', duration],
  ['Tokens', 'tokens', count],
  ['Cost', 'cost', dollars],
  ['Failed requests', 'failures', count],
];

function valueOf(point, name) {
  return name === 'tokens' ? point.input + point.output : point[name] ?? 0;
}

function states(figures) {
  const cards = STATUSES.filter((status) => status !== 'closed' || figures.threads.closed > 0);
  return h('div', { class: 'cards' }, cards.map((status) => h('a', { class: `card ${figures.threads[status] ? status : 'none'}`, href: `/threads?status=${status}` },
    h('span', { class: 'card-number' }, count(figures.threads[status] ?? 0)), ' ', h('span', { class: 'card-name' }, word(status)), h('span', { class: 'faint card-about' }, ` ${EXPLAINED[status]}`))));
}

function queue(figures) {
  const names = { ask: 'model requests', invoke: 'calls to send', answer: 'answers to deliver', letter: 'messages between threads' };
  const parts = Object.entries(figures.waiting).filter(([, number]) => number > 0).map(([kind, number]) => `${names[kind] ?? visible(kind)} ${count(number)}`);
  return h('p', { class: 'queue' }, h('b', {}, 'Queue: '), parts.length ? parts.join(', ') : 'empty, nothing waits to be sent');
}

/** Adds the points of all agents up, one for each time. */
function together(figures) {
  const sums = new Map(figures.times.map((at) => [at, { at, wakes: 0, turns: 0, failures: 0, model_ms: 0, input: 0, output: 0, cost: 0 }]));
  for (const { points } of figures.agents) {
    for (const point of points) {
      const sum = sums.get(point.at);
      if (sum) for (const name of ['wakes', 'turns', 'failures', 'model_ms', 'input', 'output', 'cost']) sum[name] += point[name] ?? 0;
    }
  }
  return [...sums.values()];
}

function charts(figures) {
  const points = together(figures);
  return h('div', { class: 'charts' }, MEASURES.map(([title, name, show]) => {
    const values = points.map((point) => ({ at: point.at, value: valueOf(point, name) }));
    const total = values.reduce((sum, point) => sum + point.value, 0);
    return h('figure', { class: 'measure' }, h('figcaption', {}, h('span', {}, title), ' ', h('b', {}, show(total))), bars(values, { label: title, show }));
  }));
}

function byAgent(figures) {
  if (figures.agents.length === 0) return h('p', { class: 'faint' }, 'No agent has worked in this time.');
  const sum = (points, name) => points.reduce((total, point) => total + valueOf(point, name), 0);
  return h('div', { class: 'table', tabindex: '0' }, h('table', {}, h('caption', { class: 'visually-hidden' }, 'Figures of each agent'),
    h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Agent'), MEASURES.map(([title]) => h('th', { scope: 'col', class: 'right' }, title)))),
    h('tbody', {}, figures.agents.map(({ agent, points }) => h('tr', {}, h('th', { scope: 'row' }, visible(agent)), MEASURES.map(([, name, show]) => h('td', { class: 'right' }, show(sum(points, name)))))))));
}

export function overviewView(context) {
  const { signal, session } = context;
  let range = RANGES[context.query.get('range')] ? context.query.get('range') : 'day';
  const body = h('div', {}, loading());
  const attention = h('div', {});
  const drawInbox = () => fill(attention, inbox.count > 0 ? h('p', { class: 'attention' }, h('a', { href: '/inbox' }, `${plural(inbox.count, 'question')}${inbox.more ? ' or more' : ''} waiting for you`)) : null);
  const select = h('select', { 'aria-label': 'Time' }, Object.entries(RANGES).map(([key, [name]]) => h('option', { value: key, selected: key === range }, `Last ${name}`)));
  select.addEventListener('change', () => {
    range = select.value;
    context.setQuery({ range: range === 'day' ? '' : range });
    load();
  });
  const load = async () => {
    try {
      const figures = await get(path(['figures'], { hours: RANGES[range][1] }), { signal });
      fill(body, states(figures), session.user_id ? null : [queue(figures),
        h('section', { 'aria-label': 'Figures over time' }, h('div', { class: 'title-row' }, h('h2', {}, 'Over time'), h('span', { class: 'faint' }, 'since ', time(figures.times[0]))), charts(figures)),
        h('section', {}, h('h2', {}, 'By agent'), byAgent(figures))]);
    } catch (error) {
      if (!signal.aborted) fill(body, failure(error, load));
    }
  };
  const refresh = throttled(load, 2000, signal);
  for (const name of ['status', 'reset']) on(name, refresh, signal);
  on('inbox', drawInbox, signal);
  const every = setInterval(refresh, 30_000);
  signal.addEventListener('abort', () => clearInterval(every));
  drawInbox();
  load();
  return h('div', {}, h('div', { class: 'title-row' }, h('h1', {}, 'Overview'), session.user_id ? null : select), attention, body);
}
