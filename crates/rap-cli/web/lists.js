// Listings of what agents wait for, and of the servers that they use. Each is a table that is read page by page.

import { get, path, post } from './api.js';
import { act, ago, count, empty, exactTime, failure, fill, h, json, loading, plural, said, since, time, visible } from './dom.js';
import { on, throttled } from './live.js';
import { threadLink } from './titles.js';

const PAGE = 100;

/**
 * Makes a view with a table of `GET /v1/NAME`. `columns` are pairs of a heading and a function of a row. It is read again
 * on each of the events `live`, and every `every` milliseconds.
 */
function table(context, { title, name, field = name, columns, nothing, live = [], every, about, parameters = () => ({}), controls }) {
  const { signal } = context;
  const body = h('tbody', {});
  const state = h('div', {}, loading());
  const more = h('div', {});
  const whole = h('div', { class: 'table listing', tabindex: '0', hidden: true }, h('table', {}, h('caption', { class: 'visually-hidden' }, title), h('thead', {}, h('tr', {}, columns.map(([heading]) => h('th', { scope: 'col' }, heading)))), body));
  let limit = PAGE;
  const cells = (row) => h('tr', {}, columns.map(([heading, cell]) => h('td', { 'data-label': heading }, cell(row, load))));
  const load = async () => {
    try {
      const page = await get(path([name], { limit: name === 'nodes' ? undefined : limit, ...parameters() }), { signal });
      const rows = page[field];
      // A button that has the focus would lose it, and what a person has opened would be closed.
      if (body.contains(document.activeElement) && document.activeElement !== document.body) return;
      if (body.querySelector('details[open]')) return;
      fill(body, rows.map(cells));
      whole.hidden = rows.length === 0;
      fill(state, rows.length === 0 ? empty(...nothing) : null);
      const next = h('button', { type: 'button', click: () => { limit = Math.min(1000, limit + PAGE); load(); } }, 'Show more');
      fill(more, page.next_cursor && limit < 1000 ? next : page.next_cursor ? h('p', { class: 'faint' }, 'The first 1,000 are shown.') : null);
    } catch (error) {
      if (!signal.aborted) fill(state, failure(error, load));
    }
  };
  const refresh = throttled(load, 1000, signal);
  for (const event of [...live, 'reset']) on(event, refresh, signal);
  if (every) {
    const timer = setInterval(refresh, every);
    signal.addEventListener('abort', () => clearInterval(timer));
  }
  load();
  return h('div', {}, h('div', { class: 'title-row' }, h('h1', {}, title), controls?.(load)), about ? h('p', { class: 'faint about' }, about) : null, whole, state, more);
}

function rate(perHour) {
  if (perHour === null || perHour === undefined) return '';
  if (perHour >= 3600) return `${count(Math.round(perHour / 3600))} a second`;
  if (perHour >= 60) return `${count(Math.round(perHour / 60))} a minute`;
  if (perHour >= 1) return `${count(Math.round(perHour))} an hour`;
  return `${count(Math.max(1, Math.round(perHour * 24)))} a day`;
}

export function subscriptionsView(context) {
  const end = (row, load) => context.session.scope !== 'read' && h('button', { type: 'button', class: 'quiet', 'aria-label': `End it: ${visible(row.tool)}`, click: (event) => act(event.currentTarget, () => post(path(['threads', row.thread_id, 'calls', row.call_id, 'cancel']))).then(() => { document.activeElement?.blur(); load(); }) }, 'End it');
  return table(context, {
    title: 'Subscriptions',
    name: 'subscriptions',
    about: 'Agents that sleep until one of these sends an event.',
    nothing: ['No subscriptions', 'When an agent subscribes to events of a tool, it is listed here.'],
    live: ['status'],
    every: 15_000,
    columns: [
      ['Tool', (row) => h('b', {}, said(row.tool))],
      ['Agent’s thread', (row) => threadLink(row.thread_id)],
      ['Since', (row) => time(row.since)],
      ['Last event', (row) => (row.last_event_at ? ago(row.last_event_at) : 'none yet')],
      ['Rate', (row) => rate(row.events_per_hour)],
      ['Waiting', (row) => (row.waiting ? plural(row.waiting, 'event') : '')],
      ['', end],
    ],
  });
}

const KINDS = { timeout: 'call times out', sleep: 'sleep ends', schedule: 'schedule', retry: 'tries again' };

export function timersView(context) {
  return table(context, {
    title: 'Timers',
    name: 'timers',
    about: 'What happens by itself, the next one first.',
    nothing: ['No timers', 'Sleeps, schedules, timeouts of calls and retries are listed here.'],
    live: ['status'],
    every: 15_000,
    columns: [
      ['At', (row) => time(row.at)],
      ['', (row) => h('span', { class: 'faint' }, ago(row.at))],
      ['What', (row) => [KINDS[row.kind] ?? visible(row.kind), row.tool ? [' of ', h('b', {}, said(row.tool))] : null]],
      ['Agent’s thread', (row) => threadLink(row.thread_id)],
    ],
  });
}

const OUTCOMES = ['retrying', 'refused', 'given_up', 'dropped', 'delivered'];
const outcomeWord = (outcome) => outcome.replace('_', ' ');

export function deliveriesView(context) {
  let outcome = OUTCOMES.includes(context.query.get('outcome')) ? context.query.get('outcome') : '';
  const again = (row, load) => (row.outcome === 'retrying' && row.kind === 'invocation' && context.session.scope !== 'read'
    ? h('button', { type: 'button', class: 'quiet', 'aria-label': `Redeliver ${row.id}`, click: (event) => act(event.currentTarget, () => post(path(['deliveries', row.id, 'redeliver']))).then(() => { document.activeElement?.blur(); load(); }) }, 'Redeliver')
    : null);
  // The attempts are read when a person opens them.
  const attempts = (row) => {
    const list = h('ol', { class: 'attempts' });
    const details = h('details', {}, h('summary', {}, count(row.attempts)), list);
    details.addEventListener('toggle', async () => {
      if (!details.open || list.children.length) return;
      try {
        const { last_attempts: known = [], ...delivery } = await get(path(['deliveries', row.id]), { signal: context.signal });
        const missing = delivery.attempts - known.length;
        fill(list, missing > 0 && known.length ? h('li', { class: 'faint' }, `${plural(missing, 'earlier attempt')}, no longer recorded`) : null,
          (known.length ? known : [{ at: delivery.last_at, detail: delivery.detail }]).map(({ at, detail }) => h('li', {}, exactTime(at), ' ', said(detail))));
      } catch (error) {
        fill(list, h('li', {}, visible(error.message)));
      }
    });
    return details;
  };
  return table(context, {
    title: 'Deliveries',
    name: 'deliveries',
    about: 'Messages to and from tool servers that did not succeed at their first attempt, newest first.',
    nothing: ['No failed deliveries', 'Every message has reached its receiver at the first attempt.'],
    live: ['delivery'],
    parameters: () => ({ outcome }),
    controls: (load) => {
      const select = h('select', { 'aria-label': 'Outcome' }, h('option', { value: '' }, 'Any outcome'), OUTCOMES.map((name) => h('option', { value: name, selected: name === outcome }, outcomeWord(name))));
      select.addEventListener('change', () => {
        outcome = select.value;
        context.setQuery({ outcome });
        load();
      });
      return select;
    },
    columns: [
      ['Outcome', (row) => h('span', { class: `badge ${row.outcome}` }, outcomeWord(row.outcome))],
      ['What', (row) => [row.kind, row.topic ? ` ${visible(row.topic)}` : '', row.server ? [' to ', said(row.server)] : null]],
      ['Agent’s thread', (row) => threadLink(row.thread_id)],
      ['Attempts', attempts],
      ['Last attempt', (row) => [ago(row.last_at), h('div', { class: 'faint detail' }, visible(row.detail))]],
      ['Next', (row) => (row.next_at ? ago(row.next_at) : '')],
      ['', again],
    ],
  });
}

export function nodesView(context) {
  return table(context, {
    title: 'Nodes',
    name: 'nodes',
    about: 'Processes that share this database.',
    nothing: ['No nodes'],
    every: 5000,
    columns: [
      ['Address', (row) => h('b', {}, said(row.url))],
      ['Node', (row) => said(row.id)],
      ['Running for', (row) => since(row.started_at)],
      ['Seen', (row) => ago(row.seen_at)],
      ['Model requests', (row) => count(row.asking)],
      ['Calls being sent', (row) => count(row.invoking)],
    ],
  });
}

// Tool servers

function toolItem(tool) {
  const hints = Object.entries(tool.annotations ?? {}).filter(([, value]) => value === true).map(([name]) => name);
  return h('details', { class: 'tool' }, h('summary', {}, h('span', { class: 'call-name' }, said(tool.name)), ' ', h('span', { class: 'faint' }, visible(tool.description).split('\n')[0].slice(0, 160)), hints.map((hint) => h('span', { class: 'badge hint' }, visible(hint)))),
    h('div', { class: 'plain' }, visible(tool.description)), h('p', { class: 'label' }, 'Arguments'), json(tool.inputSchema));
}

const HEALTH = { ok: ['ok', 'ok'], failing: ['failing', 'failed'], starting: ['starting', 'waiting'], stopped: ['stopped', 'failed'], not_asked: ['not asked yet', 'closed'] };

/** Returns what the requests to a server have shown, in one line. */
function healthLine({ last_success_at: success, last_failure_at: failed, last_failure: why, next_attempt_at: next }) {
  if (!success && !failed) return null;
  return h('p', { class: 'faint health' },
    success ? ['Last success ', ago(success)] : 'No success yet',
    failed ? [' · last failure ', ago(failed), ': ', said(why)] : ' · no failure',
    next ? [' · next attempt ', ago(next)] : null);
}

function serverCard(server) {
  const { health } = server;
  const [word, kind] = health.state === 'ok' && server.errors.length ? ['partly usable', 'failed'] : HEALTH[health.state] ?? [visible(health.state), 'closed'];
  return h('section', { class: 'server' },
    h('header', {}, h('h2', {}, said(server.name ?? server.url)), ' ', h('span', { class: `badge ${kind}` }, word), ' ', h('span', { class: 'faint' }, said(server.url), server.version ? [' · version ', said(server.version)] : null)),
    healthLine(health),
    server.errors.map((error) => h('p', { class: 'warning' }, visible(error))),
    server.tools.length ? server.tools.map(toolItem) : h('p', { class: 'faint' }, server.name === null ? 'Its tools are read when a conversation begins.' : 'It offers no tools.'));
}

export function toolsView(context) {
  const { signal } = context;
  const body = h('div', {}, loading());
  const load = async () => {
    try {
      const servers = [];
      let cursor = '';
      do {
        const page = await get(path(['tools'], { cursor }), { signal });
        servers.push(...page.servers);
        cursor = page.next_cursor;
      } while (cursor);
      const opened = new Set([...body.querySelectorAll('details[open] .call-name')].map((name) => name.textContent));
      if (body.contains(document.activeElement) && document.activeElement !== document.body) return;
      fill(body, servers.length ? servers.map(serverCard) : empty('No tool servers', 'Add a [[tool_server]] to rap.toml, for example run = "shell".'));
      for (const details of body.querySelectorAll('details')) details.open = opened.has(details.querySelector('.call-name').textContent);
    } catch (error) {
      if (!signal.aborted) fill(body, failure(error, load));
    }
  };
  const refresh = throttled(load, 5000, signal);
  for (const name of ['status', 'delivery', 'reset']) on(name, refresh, signal);
  load();
  return h('div', {}, h('div', { class: 'title-row' }, h('h1', {}, 'Tools')), body);
}
