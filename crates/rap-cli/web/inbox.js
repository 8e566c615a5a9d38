// Questions that wait for a person: choices, approvals and sign-ins.

import { get, path, post } from './api.js';
import { act, ago, empty, failure, fill, h, json, loading, said, visible } from './dom.js';
import { countQuestions, on, throttled } from './live.js';
import { link, webAddress } from './markdown.js';
import { titleOf } from './status.js';
import { threadLink } from './titles.js';

/** Paused threads that are listed. */
const PAUSED = 100;

const keyOf = (question) => `${question.thread_id} ${question.call_id} ${question.asked_at}`;

function isApproval({ choices }) {
  return choices?.length === 2 && choices[0] === 'Allow' && choices[1] === 'Refuse';
}

/** Makes the card of a question. `answered` is called after a person has answered it. */
export function questionCard(question, { answered, withThread = true, canAnswer = true }) {
  const where = path(['threads', question.thread_id, 'calls', question.call_id, 'choice']);
  const answer = (event, body) => act(event.currentTarget, async () => {
    await post(where, body);
    answered(question);
  });
  const thread = withThread && ['in ', threadLink(question.thread_id)];
  const header = h('header', {}, h('span', { class: 'call-name' }, said(question.tool)), ' ', h('span', { class: 'faint' }, 'asked ', ago(question.asked_at), ' '), thread);
  const given = question.arguments && Object.keys(question.arguments).length > 0
    ? h('div', { class: 'arguments' }, h('p', { class: 'label' }, 'Arguments of the call'), json(question.arguments))
    : null;
  return h('article', { class: `question ${isApproval(question) ? 'approval' : ''}`, 'data-key': keyOf(question) }, header, body(question, answer, canAnswer), given);
}

function body(question, answer, canAnswer) {
  if (question.kind === 'oauth') {
    const url = webAddress(question.auth_url);
    return [
      h('p', { class: 'prompt' }, 'This tool asks you to sign in.'),
      url ? h('p', {}, link(url, `Sign in at ${visible(url.host)}`)) : h('p', { class: 'faint' }, 'Its address is not one of the web: ', said(question.auth_url)),
    ];
  }
  if (question.kind !== 'choice') return h('p', {}, 'A question of a newer version. Update rap to answer it.');
  const choices = question.choices.map((choice, index) => h('button', {
    type: 'button',
    disabled: !canAnswer,
    class: isApproval(question) && index === 0 ? 'primary' : null,
    click: (event) => answer(event, { selected: index }),
  }, said(choice)));
  const dismiss = isApproval(question) ? null : h('button', { type: 'button', class: 'quiet', disabled: !canAnswer, title: `Answers with the default: ${visible(question.choices[question.default] ?? '')}`, click: (event) => answer(event, { dismiss: true }) }, 'Dismiss');
  return [
    h('p', { class: 'prompt', dir: 'auto' }, visible(question.prompt)),
    h('div', { class: 'choices', role: 'group', 'aria-label': 'Choices' }, choices, dismiss),
    canAnswer ? null : h('p', { class: 'faint' }, 'Your token permits reading only.'),
  ];
}

function notificationsButton() {
  if (!('Notification' in window) || !window.isSecureContext) return null;
  const button = h('button', { type: 'button', class: 'quiet' });
  const draw = () => {
    const texts = { granted: 'Notifications are on', denied: 'Notifications are blocked by the browser', default: 'Notify me of new questions' };
    button.textContent = texts[Notification.permission];
    button.disabled = Notification.permission !== 'default';
  };
  button.addEventListener('click', async () => {
    await Notification.requestPermission();
    draw();
  });
  draw();
  return button;
}

/** Makes the card of a thread that is paused until a person resumes it. */
function pausedCard(thread, { resumed, canAnswer }) {
  const resume = (event) => act(event.currentTarget, async () => {
    await post(path(['threads', thread.id, 'resume']));
    resumed();
  });
  return h('article', { class: 'question' },
    h('header', {}, h('a', { href: `/threads/${encodeURIComponent(thread.id)}` }, titleOf(thread)), ' ', h('span', { class: 'faint' }, 'paused ', ago(thread.updated_at))),
    h('p', { class: 'prompt', dir: 'auto' }, visible(thread.why)),
    h('div', { class: 'choices' }, h('button', { type: 'button', disabled: !canAnswer, click: resume }, 'Resume')));
}

/** The view of all questions. */
export function inboxView(context) {
  const { signal, session } = context;
  const list = h('div', { class: 'questions' }, loading());
  const paused = h('div', { class: 'questions paused' });
  const more = h('div', {});
  const shown = new Map();
  let limit = 100;

  const draw = (page) => {
    const keys = new Set(page.items.map(keyOf));
    for (const [key, card] of shown) {
      if (!keys.has(key)) {
        card.remove();
        shown.delete(key);
      }
    }
    if (page.items.length === 0) {
      fill(list, paused.childElementCount ? null : empty('Nobody waits for you', 'Questions, approvals and sign-ins of all agents appear here.'));
      return;
    }
    if (shown.size === 0) list.replaceChildren();
    // Cards that are shown stay in place, so that a button does not move under the pointer.
    page.items.forEach((item) => {
      const key = keyOf(item);
      if (shown.has(key)) return;
      const card = questionCard(item, {
        canAnswer: session.scope !== 'read',
        answered: () => {
          shown.get(key)?.remove();
          shown.delete(key);
          refresh();
          countQuestions();
        },
      });
      shown.set(key, card);
      list.append(card);
    });
    const next = h('button', { type: 'button', click: () => { limit = Math.min(1000, limit + 100); refresh(); } }, 'Show more');
    fill(more, page.next_cursor ? next : null);
  };

  const drawPaused = async () => {
    const { threads } = await get(path(['threads'], { status: 'needs_you', order: 'newest', limit: PAUSED }), { signal });
    const cards = threads.filter((thread) => thread.why).map((thread) => pausedCard(thread, { resumed: refresh, canAnswer: session.scope !== 'read' }));
    if (!paused.contains(document.activeElement)) fill(paused, cards);
  };

  const load = async () => {
    try {
      await drawPaused();
      draw(await get(path(['inbox'], { limit }), { signal }));
    } catch (error) {
      if (!signal.aborted && shown.size === 0) fill(list, failure(error, refresh));
    }
  };
  const refresh = throttled(load, 300, signal);
  for (const name of ['question', 'status', 'reset']) on(name, refresh, signal);
  load();
  return h('div', {}, h('div', { class: 'title-row' }, h('h1', {}, 'Inbox'), notificationsButton()), list, more, paused);
}

// Notifications for people who look at something else

const known = new Set();
let began = false;

/** Notifies the person of questions that arrive while no window of the page is visible. */
export function notifyOfQuestions(open) {
  setTimeout(() => { began = true; }, 3000);
  on('question', (question) => {
    const key = keyOf(question);
    const isNew = !known.has(key);
    if (known.size > 10_000) known.clear();
    known.add(key);
    if (!isNew || !began || !document.hidden || !('Notification' in window) || Notification.permission !== 'granted') return;
    const text = question.kind === 'oauth' ? 'asks you to sign in' : visible(question.prompt).slice(0, 200);
    const notification = new Notification(`${visible(question.tool)} needs you`, { body: text, tag: key });
    notification.addEventListener('click', () => {
      window.focus();
      open(`/threads/${encodeURIComponent(question.thread_id)}`);
      notification.close();
    });
  });
}
