// The list of threads: newest first, as a tree, filtered or searched.

import { get, path, post } from './api.js';
import { attachments } from './attachments.js';
import { ago, dollars, empty, failure, fill, h, loading, plural, toast, visible } from './dom.js';
import { on, throttled } from './live.js';
import { STATUSES, badge, explain, titleOf, word } from './status.js';

const PAGE = 60;
/** Changed rows that are read one by one. If there are more, the first page is read again. */
const ONE_BY_ONE = 10;
/** Title of a new thread, in characters. */
const TITLE = 80;

/** The multi-line box for a message, with its button. Enter sends, Shift+Enter begins a line. `send(text, content)` gets the images as content. */
export function composer({ send, placeholder, extra }) {
  const box = h('textarea', { id: 'message', rows: '1', placeholder, dir: 'auto', autocomplete: 'off' });
  const button = h('button', { type: 'submit', class: 'primary' }, 'Send');
  const images = attachments(box);
  const form = h('form', { class: 'composer' }, h('label', { for: 'message', class: 'visually-hidden' }, 'Message'), images.list, box, h('div', { class: 'composer-row' }, extra, images.controls, h('span', { class: 'faint hint' }, 'Enter sends, Shift+Enter begins a new line'), button));
  const grow = () => {
    box.style.height = 'auto';
    box.style.height = `${Math.min(box.scrollHeight + 2, window.innerHeight * 0.4)}px`;
  };
  box.addEventListener('input', grow);
  box.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  let sending = false;
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    const [text, content] = [box.value, images.content()];
    if ((text.trim() === '' && content.length === 0) || sending) return;
    sending = true;
    button.disabled = true;
    try {
      await send(text, content);
      box.value = '';
      images.clear();
      grow();
    } catch (error) {
      toast(error.message, 'error');
    } finally {
      sending = false;
      button.disabled = form.dataset.off === 'true';
      box.focus();
    }
  });
  return { form, box, button, attach: images.button };
}

function newThread(context) {
  const agents = context.session.agents;
  const agent = agents.length > 1
    ? h('select', { 'aria-label': 'Agent' }, agents.map((name) => h('option', { value: name }, visible(name))))
    : null;
  const key = crypto.randomUUID?.() ?? String(Math.random());
  const { form, box } = composer({
    placeholder: 'What should the agent do?',
    extra: agent,
    async send(text, content) {
      const line = text.trim().split('\n')[0] || 'Image';
      const title = [...line].length > TITLE ? `${[...line].slice(0, TITLE - 1).join('')}…` : line;
      const body = { message: text, title, agent: agent?.value ?? undefined, content: content.length ? content : undefined };
      const thread = await post('/v1/threads', body, { headers: { 'idempotency-key': `${key} ${text.length} ${content.length}` } });
      context.open(`/threads/${encodeURIComponent(thread.id)}`);
    },
  });
  return { element: h('section', { class: 'new-thread', 'aria-label': 'A new conversation' }, form), box };
}

/** Makes the row of a thread: a link with its title, its status and what it waits for. */
function rowOf(thread, agents) {
  const cost = thread.usage.cost ? dollars(thread.usage.cost) : thread.usage.output ? plural(thread.usage.input + thread.usage.output, 'token') : '';
  return h('a', { class: 'row', href: `/threads/${encodeURIComponent(thread.id)}` },
    h('span', { class: 'row-main' }, h('span', { class: 'row-title' }, titleOf(thread)), h('span', { class: 'row-state' }, badge(thread.status), ' ', h('span', { class: 'faint' }, explain(thread)))),
    h('span', { class: 'row-side faint' }, agents > 1 ? h('span', {}, visible(thread.agent)) : null, h('span', {}, cost), ago(thread.updated_at)));
}

class Row {
  constructor(thread, list) {
    this.list = list;
    this.holder = h('div', { class: 'row-holder' });
    this.nested = h('ul', { class: 'children', hidden: true });
    this.element = h('li', {}, this.holder, this.nested);
    this.update(thread);
  }

  update(thread) {
    this.thread = thread;
    this.element.dataset.created = thread.created_at;
    const open = !this.nested.hidden;
    const toggle = thread.children > 0 && h('button', { type: 'button', class: 'toggle', 'aria-expanded': String(open), 'aria-label': `Children of ${titleOf(thread)}`, click: () => this.toggle() }, open ? '▾' : '▸');
    const focused = this.holder.contains(document.activeElement) && document.activeElement.className;
    fill(this.holder, rowOf(thread, this.list.agents), toggle || h('span', { class: 'toggle-space' }));
    if (focused) this.holder.querySelector(`.${focused.split(' ')[0]}`)?.focus();
  }

  async toggle() {
    this.nested.hidden = !this.nested.hidden;
    this.update(this.thread);
    if (this.nested.hidden) return;
    try {
      const page = await get(path(['threads'], { parent: this.thread.id, order: 'newest', limit: PAGE }), { signal: this.list.signal });
      fill(this.nested, page.threads.map((child) => this.list.make(child).element), page.next_cursor ? h('li', { class: 'faint more-children' }, 'Older children are listed in the thread itself.') : null);
    } catch (error) {
      fill(this.nested, h('li', {}, failure(error)));
    }
  }
}

/** The view of all threads. The filter is part of the address. */
export function threadsView(context) {
  const { signal, session } = context;
  const filter = { status: context.query.get('status') ?? '', q: context.query.get('q') ?? '', all: context.query.get('all') ?? '' };
  const body = h('ul', { class: 'rows', 'aria-label': 'List of conversations' });
  const state = h('div', {}, loading());
  const end = h('div', { class: 'end' });
  let rows = new Map();
  let cursor = null;
  let loadingMore = false;
  let version = 0;

  const list = {
    signal,
    agents: session.agents.length,
    make(thread) {
      const row = rows.get(thread.id) ?? new Row(thread, list);
      row.update(thread);
      rows.set(thread.id, row);
      return row;
    },
  };

  const parameters = (more) => ({
    order: 'newest',
    limit: PAGE,
    status: filter.status,
    q: filter.q,
    // A search or a filter finds children, too.
    roots: !filter.q && !filter.status && !filter.all,
    ...more,
  });

  const nothing = () => (filter.q || filter.status
    ? empty('Nothing matches', 'Try another phrase or another status.')
    : empty('No conversations yet', 'Begin one above, or with rap chat in a terminal.'));

  const replace = async () => {
    version += 1;
    const mine = version;
    try {
      const page = await get(path(['threads'], parameters({})), { signal });
      if (mine !== version) return;
      rows = new Map();
      fill(body, page.threads.map((thread) => list.make(thread).element));
      cursor = page.next_cursor;
      fill(state, page.threads.length === 0 ? nothing() : null);
      fill(end, cursor ? h('p', { class: 'faint' }, 'More below…') : null);
      watch();
    } catch (error) {
      if (!signal.aborted && mine === version) fill(state, failure(error, replace));
    }
  };

  const more = async () => {
    if (!cursor || loadingMore) return;
    loadingMore = true;
    const mine = version;
    try {
      const page = await get(path(['threads'], parameters({ cursor })), { signal });
      if (mine !== version) return;
      for (const thread of page.threads) {
        if (!rows.has(thread.id)) body.append(list.make(thread).element);
      }
      cursor = page.next_cursor;
      fill(end, cursor ? h('p', { class: 'faint' }, 'More below…') : null);
    } catch (error) {
      if (!signal.aborted) fill(end, failure(error, more));
    } finally {
      loadingMore = false;
      if (cursor && mine === version) watch();
    }
  };

  const observer = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && more(), { rootMargin: '600px' });
  const watch = () => {
    observer.unobserve(end);
    observer.observe(end);
  };
  signal.addEventListener('abort', () => observer.disconnect());

  // Changed rows are read again, a few at a time.
  const changed = new Set();
  const fits = (thread) => (!filter.status || thread.status === filter.status) && (filter.status || filter.all || !thread.parent);
  const refresh = throttled(async () => {
    const ids = [...changed];
    changed.clear();
    const unknown = ids.filter((id) => !rows.has(id));
    if (ids.length > ONE_BY_ONE || (filter.q && unknown.length)) {
      await refreshFirstPage();
      return;
    }
    await Promise.all(ids.map(async (id) => {
      try {
        place(await get(path(['threads', id]), { signal }));
      } catch (error) {
        if (error.status === 404) remove(id);
      }
    }));
  }, 500, signal);

  const remove = (id) => {
    rows.get(id)?.element.remove();
    rows.delete(id);
  };
  const place = (thread) => {
    const row = rows.get(thread.id);
    if (row) {
      if (!filter.status || fits(thread) || row.element.parentElement !== body) row.update(thread);
      else remove(thread.id);
    } else if (!filter.q && fits(thread)) {
      const made = list.make(thread).element;
      const next = [...body.children].find((element) => element.dataset.created <= thread.created_at);
      if (next) next.before(made);
      else if (!cursor) body.append(made);
    }
    fill(state, rows.size === 0 ? nothing() : null);
  };
  const refreshFirstPage = async () => {
    const page = await get(path(['threads'], parameters({})), { signal });
    for (const thread of [...page.threads].reverse()) {
      if (rows.has(thread.id)) rows.get(thread.id).update(thread);
      else if (filter.q) body.prepend(list.make(thread).element);
      else place(thread);
    }
    fill(state, rows.size === 0 ? nothing() : null);
  };
  on('status', ({ thread_id: id }) => {
    changed.add(id);
    refresh();
  }, signal);
  on('reset', () => replace(), signal);

  // Search and filter
  const search = h('input', { type: 'search', 'aria-label': 'Search titles and texts', placeholder: 'Search titles and texts', value: filter.q, maxlength: '200' });
  let typing;
  const apply = () => {
    context.setQuery({ status: filter.status, q: filter.q, all: filter.all });
    replace();
  };
  search.addEventListener('input', () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      filter.q = search.value.trim();
      apply();
    }, 250);
  });
  const status = h('select', { 'aria-label': 'Status' }, h('option', { value: '' }, 'Any status'), STATUSES.map((name) => h('option', { value: name, selected: name === filter.status }, word(name))));
  status.addEventListener('change', () => {
    filter.status = status.value;
    apply();
  });
  const all = h('input', { type: 'checkbox', id: 'all', checked: Boolean(filter.all) });
  all.addEventListener('change', () => {
    filter.all = all.checked ? '1' : '';
    apply();
  });

  const begin = h('div', {});
  const button = h('button', { type: 'button', class: 'primary', click: () => {
    const { element, box } = newThread(context);
    fill(begin, element);
    box.focus();
  } }, 'New thread');
  replace();
  return h('div', {},
    h('div', { class: 'title-row' }, h('h1', {}, 'Threads'), session.scope === 'read' ? null : button),
    begin,
    h('div', { class: 'filters', role: 'search' }, search, status, h('label', { for: 'all', class: 'check' }, all, 'Show children')),
    body, state, end);
}
