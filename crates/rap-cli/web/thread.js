// One thread: its conversation, what it waits for, and what a person can do about it.

import { follow, get, path, post } from './api.js';
import { Conversation, diff } from './conversation.js';
import { act, ago, count, dollars, failure, fill, h, json, loading, plural, said, since, time, toast, visible } from './dom.js';
import { questionCard } from './inbox.js';
import { on, throttled } from './live.js';
import { badge, explain, titleOf } from './status.js';
import { composer } from './threads.js';
import { timeline } from './timeline.js';

/** Entries that are read at once, and at first. */
const PAGE = 100;
/** Time in which a person can undo the closing of a thread that is at work. */
const UNDO = 3000;
/** Greater than the number of any entry. */
const LAST = 4_294_967_295;

export function threadView(context) {
  return new ThreadView(context).element;
}

class ThreadView {
  constructor(context) {
    this.context = context;
    this.signal = context.signal;
    this.id = context.id;
    this.mayWrite = context.session.scope !== 'read';
    this.questions = new Map();
    this.views = new Map();
    this.unfolded = new Set();
    this.atEnd = true;
    this.element = h('div', { class: 'thread' }, loading());
    this.conversation = new Conversation({
      fork: this.mayWrite ? (at, button) => this.fork(button, at) : undefined,
      grew: () => this.keepAtEnd(),
      hasEarlier: () => this.hasEarlier,
    });
    window.addEventListener('scroll', () => {
      this.atEnd = window.innerHeight + window.scrollY >= this.endOfConversation() - 120;
    }, { signal: this.signal, passive: true });
    this.open();
  }

  at(...parts) {
    return path(['threads', this.id, ...parts]);
  }

  async open() {
    try {
      this.thread = await get(this.at(), { signal: this.signal });
      const entries = await this.page(LAST);
      this.conversation.entries = entries;
    } catch (error) {
      if (this.signal.aborted) return;
      const gone = error.status === 404;
      fill(this.element, h('h1', {}, gone ? 'No such thread' : 'This thread cannot be shown'), gone
        ? h('p', {}, 'There is no thread with this id, or your token does not see it.')
        : failure(error, () => { fill(this.element, loading()); this.open(); }));
      return;
    }
    this.build();
    this.conversation.redraw();
    this.update();
    this.readChildren();
    this.toEnd();
    this.follow();
  }

  /** Reads the last entries before `before`, in order. A page may end early, and is continued then. */
  async page(before) {
    const entries = [];
    let next = await get(path(['threads', this.id, 'history'], { before, limit: PAGE }), { signal: this.signal });
    entries.push(...next.entries);
    while (next.next_after && next.next_after + 1 < before) {
      next = await get(path(['threads', this.id, 'history'], { after: next.next_after, before, limit: PAGE }), { signal: this.signal });
      entries.push(...next.entries.filter((entry) => entry.seq > (entries.at(-1)?.seq ?? 0)));
      if (next.entries.length === 0) break;
    }
    return entries;
  }

  get hasEarlier() {
    return (this.conversation.entries[0]?.seq ?? 1) > 1;
  }

  build() {
    const { mayWrite } = this;
    this.heading = h('h1', { dir: 'auto' });
    this.state = h('p', { class: 'thread-state' });
    const button = (name, action, title) => h('button', { type: 'button', title, click: (event) => action.call(this, event.currentTarget) }, name);
    this.buttons = {
      interrupt: button('Interrupt', this.interrupt, 'Stop the answer in progress and the open calls'),
      fork: button('Fork', (target) => this.fork(target), 'Start a new thread that begins with this conversation'),
      close: button('Close', this.close, 'End this thread and its children for good'),
      resume: button('Resume', this.resume, 'Try again now'),
    };
    this.undo = h('span', { class: 'undo', role: 'status' });
    this.earlier = h('button', { type: 'button', class: 'quiet earlier', click: (event) => act(event.currentTarget, () => this.showEarlier()) }, 'Show earlier entries');
    this.asked = h('div', { class: 'questions' });
    this.thinking = h('p', { class: 'thinking', role: 'status' });
    this.side = h('aside', { class: 'side', 'aria-label': 'About this conversation' });
    this.composer = composer({ placeholder: 'Write to the agent', send: (text, content) => this.send(text, content) });
    const actions = mayWrite ? h('div', { class: 'actions' }, this.buttons.resume, this.buttons.interrupt, this.buttons.fork, this.buttons.close, this.undo) : null;
    this.main = h('div', { class: 'thread-main' }, this.earlier, this.conversation.element, this.thinking, this.asked, mayWrite ? this.composer.form : h('p', { class: 'faint' }, 'Your token permits reading only.'));
    fill(this.element,
      h('div', { class: 'thread-head' }, this.heading, this.state, actions),
      this.main,
      this.side);
  }

  /** Draws everything that depends on the thread's state. */
  update() {
    const { thread, buttons } = this;
    const closed = thread.status === 'closed';
    document.title = `${titleOf(thread)} · rap`;
    this.heading.textContent = titleOf(thread);
    fill(this.state, badge(thread.status), ' ', h('span', {}, explain(thread)), thread.held ? h('span', { class: 'faint' }, ` · ${plural(thread.held, 'input')} waiting`) : null);
    buttons.interrupt.disabled = !['running', 'waiting', 'needs_you'].includes(thread.status);
    buttons.close.disabled = closed;
    buttons.resume.hidden = !(thread.status === 'failed' || (thread.status === 'needs_you' && thread.why));
    this.earlier.hidden = !this.hasEarlier;
    fill(this.thinking, thread.status === 'running' && !this.conversation.draft ? [h('span', { class: 'spinner', 'aria-hidden': 'true' }), 'Thinking…'] : null);
    const { form, box, button, attach } = this.composer;
    form.dataset.off = String(closed);
    box.disabled = closed;
    button.disabled = closed;
    attach.disabled = closed;
    box.placeholder = closed ? 'This thread is closed. Fork it to go on.' : 'Write to the agent';
    this.drawQuestions();
    this.drawSide();
    this.keepAtEnd();
  }

  drawQuestions() {
    const open = [...this.questions.values()].filter((question) => this.thread.status !== 'closed' && this.thread.waiting_on.some((call) => call.call_id === question.call_id));
    const keys = open.map((question) => `${question.call_id} ${question.asked_at}`).join('\n');
    if (this.drawnQuestions === keys) return;
    this.drawnQuestions = keys;
    fill(this.asked, open.map((question) => questionCard(question, {
      withThread: false,
      canAnswer: this.mayWrite,
      answered: () => {
        this.questions.delete(question.call_id);
        this.drawQuestions();
      },
    })));
  }

  drawSide() {
    const { thread } = this;
    const section = (title, ...content) => h('section', {}, h('h2', {}, title), ...content);
    const link = (id) => h('a', { href: `/threads/${encodeURIComponent(id)}` }, said(id));
    const cancel = (callId, name, tool) => this.mayWrite && h('button', { type: 'button', class: 'quiet', 'aria-label': `${name} ${visible(tool)}`, click: (event) => act(event.currentTarget, () => post(this.at('calls', callId, 'cancel'))) }, name);
    const waiting = thread.waiting_on.map((call) => h('li', {}, h('div', {}, h('b', {}, said(call.tool)), ' for ', since(call.since), call.until ? [', until ', time(call.until)] : null), call.problem ? h('div', { class: 'warning' }, visible(call.problem)) : null, call.overdue ? h('div', { class: 'warning' }, 'far longer than usual') : null, cancel(call.call_id, 'Cancel call', call.tool)));
    const subscribed = thread.subscriptions.map((item) => h('li', {}, h('div', {}, h('b', {}, said(item.tool)), ' since ', time(item.since)), cancel(item.call_id, 'End it', item.tool)));
    const { usage } = thread;
    const facts = [
      ['Agent', visible(thread.agent)],
      ['Turns', count(thread.turn)],
      ['Tokens', `${count(usage.input)} in, ${count(usage.output)} out${usage.cached ? `, ${count(usage.cached)} cached` : ''}`],
      usage.cost ? ['Cost', dollars(usage.cost)] : null,
      thread.user_id ? ['User', said(thread.user_id)] : null,
      thread.parent ? ['Parent', link(thread.parent)] : null,
      thread.root !== thread.id && thread.root !== thread.parent ? ['Root', link(thread.root)] : null,
      thread.forked_from ? ['Forked from', link(thread.forked_from)] : null,
      ['Created', time(thread.created_at)],
      ['Changed', ago(thread.updated_at)],
    ].filter(Boolean);
    // What has the focus keeps it, if it is still there.
    const nameOf = (element) => element.getAttribute('aria-label') ?? element.getAttribute('href') ?? element.firstChild?.textContent;
    const focused = this.side.contains(document.activeElement) ? nameOf(document.activeElement) : null;
    fill(this.side,
      waiting.length ? section('Waits on', h('ul', {}, waiting)) : null,
      subscribed.length ? section('Wakes on', h('ul', {}, subscribed)) : null,
      this.views.size ? section('Shown by tools', [...this.views.values()].map((view) => this.view(view))) : null,
      section('Wakes and sleeps', timeline(this.conversation.entries, thread)),
      section('About', h('dl', {}, facts.map(([name, value]) => [h('dt', {}, name), h('dd', {}, value)]))));
    if (focused) [...this.side.querySelectorAll('button, a, summary')].find((element) => nameOf(element) === focused)?.focus({ preventScroll: true });
  }

  view({ view_type: type, content, at, server }) {
    if (type === 'progress' && typeof content?.fraction === 'number') {
      const percent = Math.round(Math.min(1, Math.max(0, content.fraction)) * 100);
      return h('div', { class: 'view' }, h('p', {}, visible(content.text ?? ''), ' ', h('span', { class: 'faint' }, `${percent} %`)), h('progress', { max: '100', value: String(percent), 'aria-label': 'Progress' }));
    }
    if (typeof content?.patch === 'string') return h('div', { class: 'view' }, diff(content));
    const key = `${server} ${type}`;
    const details = h('details', { class: 'view', open: this.unfolded.has(key) }, h('summary', {}, said(type), ' ', h('span', { class: 'faint' }, ago(at))), json(content));
    details.addEventListener('toggle', () => (details.open ? this.unfolded.add(key) : this.unfolded.delete(key)));
    return details;
  }

  // Events

  follow() {
    const changed = throttled(() => this.readThread(), 250, this.signal);
    let interrupted = false;
    follow(this.at('events'), {
      event: (name, data) => {
        if (name === 'entry') this.conversation.add(data);
        else if (name === 'delta') this.conversation.stream(data);
        else if (name === 'call') this.conversation.updateCall(data);
        else if (name === 'choice' || name === 'oauth') this.ask(data);
        else if (name === 'view') this.views.set(`${data.server} ${data.view_type}`, data);
        else if (name === 'notice') toast(data.text);
        else if (name === 'status') this.setStatus(data);
        if (name === 'delta') this.thinking.replaceChildren();
        else changed();
        this.keepAtEnd();
      },
      state: (isLive) => {
        // Parts of an answer in progress may be missing. The entry that follows has all of it.
        if (!isLive) this.conversation.endDraft();
        if (isLive && interrupted) changed();
        interrupted ||= !isLive;
      },
      failed: (error) => toast(error.message, 'error'),
    }, { signal: this.signal, lastId: this.conversation.lastSeq });
    // The status of children comes by the stream of all threads.
    const children = throttled(() => this.readChildren(), 1000, this.signal);
    on('status', ({ thread_id: id }) => {
      if (this.conversation.children.some((child) => child.id === id)) children();
    }, this.signal);
  }

  setStatus(data) {
    const { children } = this.thread;
    Object.assign(this.thread, data);
    if (data.status !== 'running') this.conversation.endDraft();
    if (data.children !== children) this.readChildren();
    this.update();
  }

  async ask(question) {
    this.questions.set(question.call_id, question);
    if (question.kind === 'choice') {
      // Events come without the arguments of the call, which a person who approves it has to see.
      try {
        const page = await get('/v1/inbox?limit=1000', { signal: this.signal });
        for (const item of page.items) if (item.thread_id === this.id) this.questions.set(item.call_id, item);
      } catch {
        // The question is shown without them.
      }
      this.drawnQuestions = undefined;
    }
    this.drawQuestions();
    this.keepAtEnd();
  }

  async readThread() {
    try {
      this.thread = await get(this.at(), { signal: this.signal });
      this.update();
    } catch {
      // The stream reports a lasting problem.
    }
  }

  async readChildren() {
    try {
      const page = await get(path(['threads'], { parent: this.id, order: 'newest', limit: PAGE }), { signal: this.signal });
      this.conversation.setChildren(page.threads);
      this.keepAtEnd();
    } catch {
      // They are read again with the next change.
    }
  }

  async showEarlier() {
    const first = this.conversation.entries[0];
    const height = document.documentElement.scrollHeight;
    this.conversation.entries.unshift(...await this.page(first.seq));
    this.conversation.redraw();
    this.update();
    // What the person reads stays where it is.
    window.scrollBy(0, document.documentElement.scrollHeight - height);
  }

  keepAtEnd() {
    if (this.atEnd) requestAnimationFrame(() => !this.signal.aborted && this.toEnd());
  }

  /** Where the conversation ends in the document. On a phone, what is about the thread follows below it. */
  endOfConversation() {
    return (this.main?.getBoundingClientRect().bottom ?? 0) + window.scrollY;
  }

  toEnd() {
    window.scrollTo(0, Math.max(0, this.endOfConversation() - window.innerHeight));
  }

  // Actions

  async send(text, content) {
    this.atEnd = true;
    await post(this.at('messages'), { text, content: content.length ? content : undefined }, { headers: { 'idempotency-key': crypto.randomUUID?.() ?? String(Math.random()) } });
  }

  interrupt(button) {
    return act(button, () => post(this.at('interrupt')));
  }

  resume(button) {
    return act(button, () => post(this.at('resume')));
  }

  async fork(button, at) {
    const made = await act(button, () => post(this.at('fork'), at === undefined ? {} : { at }));
    if (made) this.context.open(`/threads/${encodeURIComponent(made.id)}`);
  }

  /** Closes the thread. If it is at work, a person can undo that for a moment. */
  close(button) {
    const { thread } = this;
    const busy = thread.status !== 'idle' || thread.children > 0 || thread.subscriptions.length > 0 || thread.waiting_on.length > 0;
    const close = () => act(button, () => post(this.at('close'))).then(() => this.readThread());
    if (!busy) return close();
    button.disabled = true;
    const timer = setTimeout(() => {
      this.undo.replaceChildren();
      close();
    }, UNDO);
    const undo = () => {
      clearTimeout(timer);
      this.undo.replaceChildren();
      this.update();
    };
    fill(this.undo, 'Ends in 3 s. ', h('button', { type: 'button', class: 'quiet', click: undo }, 'Undo'));
    return undefined;
  }
}
