// The frame of the page: signing in, navigation, and which view an address shows.

import { request, signedOut } from './api.js';
import { act, fill, h, visible } from './dom.js';
import { inboxView, notifyOfQuestions } from './inbox.js';
import { deliveriesView, nodesView, subscriptionsView, timersView, toolsView } from './lists.js';
import { connection, countQuestions, live, start, stop } from './live.js';
import { overviewView } from './overview.js';
import { threadView } from './thread.js';
import { threadsView } from './threads.js';

const VIEWS = [
  ['/', 'Overview', overviewView],
  ['/threads', 'Threads', threadsView],
  ['/inbox', 'Inbox', inboxView],
  ['/subscriptions', 'Subscriptions', subscriptionsView],
  ['/timers', 'Timers', timersView],
  ['/deliveries', 'Deliveries', deliveriesView],
  ['/tools', 'Tools', toolsView],
  ['/nodes', 'Nodes', nodesView],
];

let session;
let shell;
let view;

/** Shows the view of the current address. */
function show({ focus = false } = {}) {
  view?.abort();
  view = new AbortController();
  const { pathname, search } = window.location;
  const context = {
    session,
    signal: view.signal,
    query: new URLSearchParams(search),
    open,
    setQuery(parameters) {
      const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value));
      const text = query.toString();
      window.history.replaceState(null, '', text ? `${pathname}?${text}` : pathname);
    },
  };
  const thread = /^\/threads\/([^/]+)$/.exec(pathname);
  const [address, name, make] = thread ? ['/threads', 'Thread', threadView] : VIEWS.find(([known]) => known === pathname) ?? VIEWS[0];
  if (thread) context.id = decodeURIComponent(thread[1]);
  for (const link of shell.links) {
    if (link.getAttribute('href') === address) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  shell.title = thread ? undefined : name;
  drawTitle();
  setMenu(false);
  fill(shell.main, make(context));
  window.scrollTo(0, 0);
  if (focus) shell.main.focus({ preventScroll: true });
}

/** Goes to an address of the page. */
function open(address) {
  window.history.pushState(null, '', address);
  show({ focus: true });
}

function drawTitle(count = shell.count) {
  shell.count = count;
  if (shell.title) document.title = `${count ? `(${count}) ` : ''}${shell.title} · rap`;
}

function setMenu(isOpen) {
  shell.menu.setAttribute('aria-expanded', String(isOpen));
  shell.nav.classList.toggle('open', isOpen);
}

function buildShell() {
  const badge = h('span', { class: 'count', hidden: true });
  const links = VIEWS.map(([address, name]) => h('a', { href: address }, name));
  const items = links.map((link) => h('li', {}, link, link.textContent === 'Inbox' ? badge : null));
  const state = h('span', { class: 'connection', role: 'status' });
  const leave = session.needs_token && h('button', { type: 'button', class: 'quiet', click: (event) => act(event.currentTarget, signOut) }, 'Sign out');
  const person = session.user_id ? h('p', { class: 'faint person' }, 'as ', visible(session.user_id)) : null;
  const nav = h('nav', { id: 'navigation', 'aria-label': 'Main' }, h('ul', {}, items), h('div', { class: 'nav-foot' }, person, leave, h('p', { class: 'faint' }, `rap ${visible(session.version)}`)));
  const menu = h('button', { type: 'button', class: 'menu', 'aria-expanded': 'false', 'aria-controls': 'navigation', click: () => setMenu(!nav.classList.contains('open')) }, 'Menu');
  const main = h('main', { id: 'main', tabindex: '-1' });
  shell = { nav, menu, main, links, title: undefined, count: 0 };
  fill(document.body, h('a', { href: '#main', class: 'skip' }, 'Skip to the content'),
    h('header', { class: 'bar' }, menu, h('span', { class: 'brand' }, 'rap'), state), nav, main);
  live.addEventListener('inbox', ({ detail }) => {
    badge.hidden = detail.count === 0;
    badge.textContent = detail.more ? `${detail.count}+` : String(detail.count);
    badge.title = `${badge.textContent} open`;
    drawTitle(detail.count);
  });
  const drawConnection = () => {
    state.textContent = connection.live ? 'Live' : 'Reconnecting…';
    state.classList.toggle('off', !connection.live);
  };
  // A connection that is being made is not worth a word yet.
  setTimeout(drawConnection, 1500);
  live.addEventListener('connection', drawConnection);
}

async function signOut() {
  // First, so that no request is refused because the session has ended.
  view?.abort();
  stop();
  try {
    await request('DELETE', '/session');
  } catch (error) {
    show();
    start();
    throw error;
  }
  window.location.assign('/');
}

function signInView(problem) {
  view?.abort();
  stop();
  document.title = 'Sign in · rap';
  const words = h('p', { class: 'problem-text', role: 'alert', id: 'sign-in-problem' }, problem ?? '');
  const token = h('input', { id: 'token', class: 'secret', type: 'text', autocomplete: 'off', autocapitalize: 'off', spellcheck: 'false', required: true, 'aria-describedby': 'sign-in-problem' });
  const button = h('button', { type: 'submit', class: 'primary' }, 'Sign in');
  const form = h('form', { class: 'sign-in' }, h('h1', {}, 'rap'), h('p', { class: 'faint' }, 'This runtime asks for a token of a client: one of server.tokens in rap.toml, or one that rap token create made.'), h('label', { for: 'token' }, 'Token'), token, words, button);
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    words.textContent = '';
    button.disabled = true;
    try {
      const answer = await request('POST', '/session', { token: token.value });
      if (answer.signed_in) {
        session = answer;
        run();
      } else {
        words.textContent = answer.problem ?? 'This token is not accepted.';
        token.select();
      }
    } catch (error) {
      words.textContent = visible(error.message);
    } finally {
      button.disabled = false;
    }
  });
  fill(document.body, h('main', { id: 'main', class: 'sign-in-page' }, form));
  token.focus();
}

function run() {
  buildShell();
  show();
  start();
  countQuestions();
}

document.addEventListener('click', (event) => {
  const link = event.target.closest?.('a[href]');
  if (!link || !shell || event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const url = new URL(link.href);
  if (link.target || url.origin !== window.location.origin || link.classList.contains('skip')) return;
  event.preventDefault();
  open(url.pathname + url.search);
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && shell?.nav.classList.contains('open')) {
    setMenu(false);
    shell.menu.focus();
  }
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? '');
  if (event.key === '/' && !typing && !event.ctrlKey && !event.metaKey) {
    const search = document.querySelector('input[type=search]');
    if (search) {
      event.preventDefault();
      search.focus();
    }
  }
});
window.addEventListener('popstate', () => session?.signed_in && show());
signedOut.addEventListener('signed-out', () => {
  if (session?.signed_in && session.needs_token) {
    session = { ...session, signed_in: false };
    signInView('You were signed out. Sign in again.');
  }
});

async function begin() {
  try {
    session = await request('GET', '/session');
  } catch (error) {
    fill(document.body, h('main', { class: 'sign-in-page' }, h('p', { role: 'alert' }, visible(error.message)), h('button', { type: 'button', click: begin }, 'Try again')));
    return;
  }
  if (!session.signed_in) {
    signInView(session.needs_token ? undefined : 'This address is not accepted: open the page at the runtime’s own address.');
    return;
  }
  run();
  notifyOfQuestions(open);
}

begin();
