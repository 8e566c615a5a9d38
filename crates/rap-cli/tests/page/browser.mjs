// Drives the page in Chromium. Run by the Rust tests: node browser.mjs SCENARIO, with the rest in environment variables.

import { createRequire } from 'node:module';
import fs from 'node:fs';

const { PAGE_MODULES: modules, PAGE_BASE: base, PAGE_CHROMIUM: chromium, PAGE_TOKEN: token, PAGE_SHOTS: shots } = process.env;
const require = createRequire(`${modules}/`);
const playwright = require('playwright-core');
const axe = fs.readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8');

/** Long, because the machine may be busy with other tests. */
const WAIT = 60_000;
const PHONE = { width: 390, height: 844 };

class Failed extends Error {}

function check(condition, message) {
  if (!condition) throw new Failed(message);
}

/** Waits until a condition holds. */
async function until(what, condition) {
  const end = Date.now() + WAIT;
  for (;;) {
    const found = await condition();
    if (found) return found;
    if (Date.now() > end) throw new Failed(`waited in vain: ${what}`);
    await new Promise((resolve) => { setTimeout(resolve, 50); });
  }
}

async function withBrowser(run) {
  const browser = await playwright.chromium.launch({
    executablePath: chromium,
    args: ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
  try {
    return await run(browser);
  } finally {
    await browser.close();
  }
}

/** Opens a window and collects what its console reports. */
async function open(browser, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  context.setDefaultTimeout(WAIT);
  const page = await context.newPage();
  page.problems = [];
  page.on('console', (message) => {
    if (['error', 'warning'].includes(message.type())) page.problems.push(`${message.text()} ${message.location().url}`);
  });
  page.on('pageerror', (error) => page.problems.push(String(error)));
  page.on('request', (request) => {
    if (!request.url().startsWith(base) && !request.url().startsWith('data:')) page.problems.push(`foreign request: ${request.url()}`);
  });
  return page;
}

async function shot(page, name) {
  if (shots) await page.screenshot({ path: `${shots}/${name}.png` });
}

/** Fails if axe finds something serious, or the page is wider than the window. */
async function inspect(page, name) {
  await page.evaluate(axe);
  const result = await page.evaluate(() => window.axe.run(document, { resultTypes: ['violations'] }));
  const serious = result.violations.filter((violation) => ['serious', 'critical'].includes(violation.impact));
  const described = serious.map((violation) => `${violation.id}: ${violation.nodes.map((node) => `${node.html} ${node.failureSummary}`).join(' | ')}`);
  check(serious.length === 0, `${name}: axe: ${described.join('\n')}`);
  const [content, width] = await page.evaluate(() => [document.documentElement.scrollWidth, window.innerWidth]);
  check(content <= width, `${name}: the page is ${content} px wide in a window of ${width} px`);
}

const nav = (page, name) => page.getByRole('navigation').getByRole('link', { name, exact: true });
const log = (page) => page.getByRole('log');
const button = (page, name) => page.getByRole('button', { name, exact: true });

async function send(page, text) {
  await page.getByRole('textbox', { name: 'Message' }).fill(text);
  await button(page, 'Send').click();
}

async function newThread(page, text) {
  await page.goto(`${base}/threads`);
  await button(page, 'New thread').click();
  await send(page, text);
  await page.waitForURL(/\/threads\/[^/]+$/);
  return page.url();
}

async function api(path) {
  const answer = await fetch(`${base}${path}`);
  return answer.json();
}

async function statusIs(page, word) {
  await page.locator('.thread-state .badge').filter({ hasText: word }).waitFor();
}

const scenarios = {
  /** A conversation: streamed text, markdown, hostile content, calls with their results, and every button. */
  async conversation(browser) {
    const page = await open(browser);
    await newThread(page, 'say # Heading **bold** `code` [good](https://example.com/a) [bad](javascript:alert(1)) <img src=x onerror=alert(1)> ![pic](https://example.com/p.png)');
    const answer = log(page).locator('.assistant').first();
    await answer.waitFor();
    check(await answer.locator('strong').textContent() === 'bold', 'markdown is rendered');
    const text = await answer.textContent();
    check(text.includes('<img src=x onerror=alert(1)>'), `HTML is shown literally: ${text}`);
    check(text.includes('[bad](javascript:alert(1))'), `a script address is no link: ${text}`);
    check(await log(page).locator('img').count() === 0, 'no image of markdown is loaded');
    check(await answer.getByRole('link', { name: 'good' }).getAttribute('href') === 'https://example.com/a', 'a web address is a link');
    await statusIs(page, 'idle');
    await page.reload();
    await answer.waitFor();
    check(await log(page).locator('.user').count() === 1, 'a reload shows each entry once');

    await send(page, 'call echo {"text": "hello"}');
    await log(page).getByText('echo hello').first().waitFor();
    await send(page, 'call show {}');
    await page.getByRole('complementary').locator('.diff .added').first().waitFor();

    await send(page, 'call slow {"seconds": 300}');
    await statusIs(page, 'waiting');
    await page.getByRole('complementary').getByText('slow').waitFor();
    await button(page, 'Cancel call slow').click();
    await button(page, 'Cancel call slow').waitFor({ state: 'detached' });
    await statusIs(page, 'idle');
    // A call that ends is no longer listed, although its button has the focus.
    await send(page, 'call slow {"seconds": 300}');
    await button(page, 'Cancel call slow').focus();
    const interrupted = await fetch(`${base}/v1${new URL(page.url()).pathname}/interrupt`, { method: 'POST' });
    check(interrupted.status === 202, `answered ${interrupted.status}`);
    await button(page, 'Cancel call slow').waitFor({ state: 'detached' });
    await statusIs(page, 'idle');
    await send(page, 'call slow {"seconds": 300}');
    await statusIs(page, 'waiting');
    await button(page, 'Interrupt').click();
    await statusIs(page, 'idle');

    const source = page.url();
    const forked = () => page.waitForURL((url) => url.pathname.startsWith('/threads/') && url.href !== source);
    await answer.getByRole('button', { name: 'Fork from here' }).click();
    await forked();
    await answer.waitFor();
    check(await log(page).locator('.user').count() === 1, 'a fork from an earlier entry ends there');
    await page.goto(source);
    await log(page).getByText('echo hello').first().waitFor();
    await button(page, 'Fork').click();
    await forked();
    await log(page).getByText('echo hello').first().waitFor();
    await button(page, 'Close').click();
    await statusIs(page, 'closed');
    check(await page.getByRole('textbox', { name: 'Message' }).isDisabled(), 'a closed thread takes no message');
    check(page.problems.length === 0, page.problems.join('\n'));
  },

  /** Images are attached to a message, shown before it is sent and in the conversation. Those of a tool are shown, too. */
  async images(browser) {
    const page = await open(browser);
    const pixel = Buffer.from('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==', 'base64');
    await page.goto(`${base}/threads`);
    await button(page, 'New thread').click();
    const choose = (name, mimeType, buffer) => page.locator('input[type=file]').setInputFiles({ name, mimeType, buffer });
    await choose('notes.txt', 'text/plain', Buffer.from('no image'));
    await page.getByText('notes.txt is not a PNG, JPEG, GIF or WebP image.').waitFor();
    await choose('one.png', 'image/png', pixel);
    await page.getByRole('img', { name: 'one.png' }).waitFor();
    await choose('two.png', 'image/png', pixel);
    await page.getByRole('button', { name: 'Remove two.png' }).click();
    check(await page.getByRole('list', { name: 'Attached images' }).getByRole('img').count() === 1, 'one image is left');
    await inspect(page, 'new thread with an image');
    await send(page, 'say a picture');
    await page.waitForURL(/\/threads\/[^/]+$/);
    await log(page).locator('.user .picture').waitFor();
    // A picture without any text.
    await choose('three.png', 'image/png', pixel);
    await page.getByRole('img', { name: 'three.png' }).waitFor();
    await button(page, 'Send').click();
    await log(page).locator('.user .picture').nth(1).waitFor();
    check(await page.getByRole('list', { name: 'Attached images' }).isHidden(), 'sent images are no longer attached');
    const loaded = await log(page).locator('.picture').evaluateAll((images) => images.every((image) => image.naturalWidth === 1));
    check(loaded, 'the images are shown');
    const history = await api(`/v1${new URL(page.url()).pathname}/history`);
    const content = history.entries.filter((entry) => entry.kind === 'user').map((entry) => entry.content.length);
    check(JSON.stringify(content) === '[1,1]', JSON.stringify(content));
    await inspect(page, 'conversation with images');
    await shot(page, 'images');
    check(page.problems.length === 0, page.problems.join('\n'));
  },

  /** Progress of a call, each attempt of a delivery, and the health of a tool server that fails and works again. */
  async deliveries(browser) {
    const page = await open(browser);
    await newThread(page, 'call work');
    console.log('progress');
    await page.getByRole('complementary').getByText('compiling 50 %').waitFor();
    check(await page.getByRole('progressbar').getAttribute('value') === '50', 'progress is a bar');
    await page.goto(`${base}/tools`);
    await page.locator('.server .badge').filter({ hasText: 'ok' }).waitFor();
    console.log('break');
    await newThread(page, 'call work');
    await statusIs(page, 'waiting');
    await page.goto(`${base}/tools`);
    await page.locator('.server .badge').filter({ hasText: 'failing' }).waitFor();
    await page.getByText(/last failure .*: answered 503/).waitFor();
    await inspect(page, 'a failing tool server');
    await shot(page, 'tools-failing');
    await page.goto(`${base}/deliveries`);
    const row = page.getByRole('row').filter({ hasText: 'retrying' });
    await row.getByRole('button', { name: /Redeliver/ }).click();
    await row.locator('summary').click();
    await row.getByRole('listitem').filter({ hasText: 'answered 503' }).nth(1).waitFor();
    await inspect(page, 'attempts of a delivery');
    await shot(page, 'attempts');
    console.log('mend');
    await page.reload();
    await page.getByRole('button', { name: /Redeliver/ }).click();
    await page.getByRole('row').filter({ hasText: 'delivered' }).waitFor();
    await page.goto(`${base}/tools`);
    await page.locator('.server .badge').filter({ hasText: 'ok' }).waitFor();
    check(page.problems.length === 0, page.problems.join('\n'));
  },

  /** Questions appear live and are answered in place, in the inbox and in the thread. */
  async inbox(browser) {
    const page = await open(browser);
    await page.goto(`${base}/inbox`);
    await page.getByText('Nobody waits for you').waitFor();
    const other = await open(browser);
    const thread = await newThread(other, 'call choose {}');
    const question = page.locator('.question').first();
    await question.getByRole('link', { name: 'call choose {}' }).waitFor();
    await statusIs(other, 'needs you');
    const choices = await question.getByRole('group').getByRole('button').allTextContents();
    await question.getByRole('button', { name: choices[0], exact: true }).click();
    await page.getByText('Nobody waits for you').waitFor();
    await statusIs(other, 'idle');
    // An approval shows all arguments of the call.
    await send(other, 'call fail {"message": "a very particular message"}');
    await question.getByText('a very particular message').first().waitFor();
    await other.getByRole('button', { name: 'Allow', exact: true }).waitFor();
    await inspect(page, 'inbox with an approval');
    await shot(page, 'inbox');
    await question.getByRole('button', { name: 'Refuse', exact: true }).click();
    await statusIs(other, 'idle');
    check(await other.getByRole('button', { name: 'Allow', exact: true }).count() === 0, 'an answered question is gone');
    const history = await api(`/v1${new URL(thread).pathname}/history`);
    check(!JSON.stringify(history).includes('Error: a very particular message'), 'a refused call was not sent');
    // A sign-in is a link, until its call ends.
    await send(other, 'call authorize {}');
    await question.getByRole('link', { name: /^Sign in at / }).waitFor();
    await button(other, 'Interrupt').click();
    await page.getByText('Nobody waits for you').waitFor();
    await page.goto(`${base}/`);
    check(page.problems.length === 0 && other.problems.length === 0, [...page.problems, ...other.problems].join('\n'));
  },

  /** A question that arrives while nobody looks at the page is a notification, which leads to its thread. */
  async notifications(browser) {
    const page = await open(browser);
    await page.addInitScript(() => {
      window.shown = [];
      window.Notification = class extends EventTarget {
        static permission = 'granted';

        constructor(title, options) {
          super();
          Object.assign(this, { title, ...options });
          window.shown.push(this);
        }

        close() {}
      };
      window.isHidden = false;
      Object.defineProperty(document, 'hidden', { get: () => window.isHidden });
    });
    await page.goto(`${base}/inbox`);
    await page.getByText('Notifications are on').waitFor();
    const other = await open(browser);
    await newThread(other, 'call choose {}');
    await page.locator('.question').first().waitFor();
    check(await page.evaluate(() => window.shown.length) === 0, 'a person who looks at the page is not notified');
    await page.evaluate(() => { window.isHidden = true; });
    // The questions of the first seconds were there before.
    const thread = await until('a notification', async () => {
      const address = await newThread(other, 'call choose {}');
      await statusIs(other, 'needs you');
      return await page.evaluate(() => window.shown.length) > 0 && address;
    });
    const { title } = await page.evaluate(() => ({ title: window.shown.at(-1).title }));
    check(title === 'choose needs you', title);
    await page.evaluate(() => window.shown.at(-1).dispatchEvent(new Event('click')));
    await page.waitForURL(thread);
    check(page.problems.length === 0, page.problems.join('\n'));
  },

  /** The time line is to scale: a bar is where the thread was awake, as long as it was. */
  async timeline(browser) {
    const page = await open(browser);
    await newThread(page, 'say hello');
    await statusIs(page, 'idle');
    await page.getByRole('complementary').getByRole('img', { name: /^Awake 1 time, / }).waitFor();
    const bars = await page.evaluate(async () => {
      const { timeline } = await import('/assets/timeline.js');
      const hour = 3_600_000;
      const begin = Date.now() - 10 * hour;
      const at = (hours) => new Date(begin + hours * hour).toISOString();
      const answer = (hours, calls = []) => ({ kind: 'assistant', at: at(hours), calls, text: '' });
      const entries = [
        { kind: 'user', at: at(0) }, answer(1, [{ id: 'a' }]),
        { kind: 'result', at: at(5), call_id: 'a' }, answer(5.5),
        { kind: 'notice', at: at(7) },
        { kind: 'user', at: at(8) }, answer(8),
      ];
      const figure = timeline(entries, { status: 'idle' });
      return [...figure.querySelectorAll('rect.awake')].map((bar) => [Number(bar.getAttribute('x')), Number(bar.getAttribute('width'))]);
    });
    // 300 units are ten hours.
    const expected = [[0, 30], [150, 15], [240, 1.5]];
    const near = bars.length === expected.length && bars.every(([x, width], index) => Math.abs(x - expected[index][0]) < 0.5 && Math.abs(width - expected[index][1]) < 0.5);
    check(near, JSON.stringify(bars));
    check(page.problems.length === 0, page.problems.join('\n'));
  },

  /** With a hundred thousand threads, everything still takes a moment, and only what is seen is read. */
  async many(browser) {
    const page = await open(browser);
    const rows = page.getByRole('main').locator('.rows > li');
    const took = {};
    const timed = async (name, action) => {
      const began = Date.now();
      await action();
      took[name] = Date.now() - began;
    };
    await timed('overview', async () => {
      await page.goto(`${base}/`);
      await page.getByRole('link', { name: /^100K idle/ }).waitFor();
    });
    await timed('list', async () => {
      await page.goto(`${base}/threads`);
      await rows.nth(50).waitFor();
    });
    check(await rows.count() <= 120, `${await rows.count()} rows are loaded`);
    await timed('scroll', () => until('ten pages are loaded', async () => {
      await page.evaluate(() => window.scrollTo(0, document.documentElement.scrollHeight));
      return await rows.count() >= 600;
    }));
    await timed('search', async () => {
      await page.getByRole('searchbox').fill('report number 54321');
      await page.getByRole('main').getByRole('link', { name: /Report number 54321/ }).waitFor();
    });
    await timed('common', async () => {
      await page.getByRole('searchbox').fill('report number');
      await rows.nth(50).waitFor();
    });
    await page.getByRole('searchbox').fill('');
    await timed('filter', async () => {
      await page.getByRole('combobox', { name: 'Status' }).selectOption('closed');
      await page.getByText('Nothing matches').waitFor();
      await page.getByRole('combobox', { name: 'Status' }).selectOption('');
      await rows.nth(50).waitFor();
    });
    const other = await open(browser);
    await newThread(other, 'say something new');
    await page.getByRole('main').getByRole('link', { name: /something new/ }).waitFor();
    await shot(page, 'many');
    console.log(JSON.stringify(took));
    // Usually a tenth of a second. The bound is for a busy machine.
    const slow = Object.entries(took).filter(([name, ms]) => name !== 'scroll' && ms > 10_000);
    check(slow.length === 0, JSON.stringify(took));
    check(page.problems.length === 0, page.problems.join('\n'));
  },

  /** The list is live, searched by phrase, filtered, and its address survives a reload. */
  async threads(browser) {
    const page = await open(browser);
    await page.goto(`${base}/threads`);
    const other = await open(browser);
    await newThread(other, 'say the quick brown fox');
    await newThread(other, 'say brown is quick');
    const row = (name) => page.getByRole('main').getByRole('link', { name });
    await row(/the quick brown fox.*idle/).waitFor();
    await row(/brown is quick.*idle/).waitFor();
    const search = page.getByRole('searchbox');
    await search.fill('quick brown');
    await row(/brown is quick/).waitFor({ state: 'detached' });
    await row(/the quick brown fox/).waitFor();
    await page.waitForURL(/q=quick/);
    await page.reload();
    await row(/the quick brown fox/).waitFor();
    check(await row(/brown is quick/).count() === 0, 'a reload keeps the search');
    await search.fill('no such phrase anywhere');
    await page.getByText('Nothing matches').waitFor();
    await search.fill('');
    await page.getByRole('combobox', { name: 'Status' }).selectOption('closed');
    await row(/brown is quick/).waitFor({ state: 'detached' });
    await button(other, 'Close').click();
    await row(/brown is quick.*closed/).waitFor();
    check(page.problems.length === 0, page.problems.join('\n'));
  },

  /** Each view has its heading and no serious finding: light, dark and on a phone, where the menu is a button. */
  async everywhere(browser) {
    const page = await open(browser);
    const thread = await newThread(page, 'call tick {"count": 1000000, "every_ms": 200}');
    await until('the subscription is active', async () => (await api('/v1/subscriptions')).subscriptions.length > 0);
    await send(page, 'call slow {"seconds": 600}');
    await statusIs(page, 'waiting');
    const views = [['', 'Overview'], ['threads', 'Threads'], ['inbox', 'Inbox'], ['subscriptions', 'Subscriptions'], ['timers', 'Timers'], ['deliveries', 'Deliveries'], ['tools', 'Tools'], ['nodes', 'Nodes']];
    for (const [, name] of views) {
      await nav(page, name).click();
      await page.getByRole('heading', { level: 1, name, exact: true }).waitFor();
    }
    await page.goto(thread);
    await log(page).getByRole('link', { name: /event of tick/ }).first().waitFor();
    await nav(page, 'Subscriptions').click();
    const row = page.getByRole('row').filter({ hasText: 'tick' }).filter({ hasText: /ago|now/ }).first();
    await row.getByRole('link', { name: /^call tick/ }).waitFor();
    await nav(page, 'Overview').click();
    await page.getByRole('img', { name: /Wakes/ }).waitFor();
    for (const scheme of ['light', 'dark']) {
      await page.emulateMedia({ colorScheme: scheme });
      for (const [path, name] of [...views, [new URL(thread).pathname.slice(1), undefined]]) {
        await page.goto(`${base}/${path}`);
        await page.getByRole('heading', { level: 1, ...(name ? { name, exact: true } : {}) }).waitFor();
        await until('everything is loaded', async () => (await page.locator('.loading').count()) === 0);
        await inspect(page, `${scheme} ${name ?? 'thread'}`);
        await shot(page, `${scheme}-${name ?? 'thread'}`);
      }
    }
    const phone = await open(browser, { viewport: PHONE, hasTouch: true });
    for (const [path, name] of [...views, [new URL(thread).pathname.slice(1), undefined]]) {
      await phone.goto(`${base}/${path}`);
      await phone.getByRole('heading', { level: 1, ...(name ? { name, exact: true } : {}) }).waitFor();
      await until('everything is loaded', async () => (await phone.locator('.loading').count()) === 0);
      if (!name) {
        // The end of the conversation is at the bottom of the window, not what is about the thread.
        await until('the end of the conversation is shown', async () => {
          const box = await button(phone, 'Send').boundingBox();
          return box && box.y + box.height <= PHONE.height && box.y + box.height > PHONE.height - 120;
        });
      }
      await inspect(phone, `phone ${name ?? 'thread'}`);
      await shot(phone, `phone-${name ?? 'thread'}`);
    }
    check(!await nav(phone, 'Inbox').isVisible(), 'the navigation of a phone is hidden');
    await button(phone, 'Menu').click();
    await shot(phone, 'phone-menu');
    await nav(phone, 'Inbox').click();
    await phone.getByRole('heading', { level: 1, name: 'Inbox' }).waitFor();
    check(page.problems.length === 0 && phone.problems.length === 0, [...page.problems, ...phone.problems].join('\n'));
  },

  /** Keys are enough: skip link, navigation, a message with Enter. */
  async keyboard(browser) {
    const page = await open(browser);
    await page.goto(`${base}/threads`);
    await page.getByRole('heading', { level: 1, name: 'Threads' }).waitFor();
    await page.keyboard.press('Tab');
    check(await page.evaluate(() => document.activeElement.textContent) === 'Skip to the content', 'the first key press reaches the skip link');
    await page.keyboard.press('/');
    check(await page.evaluate(() => document.activeElement.type) === 'search', 'the slash key reaches the search');
    await button(page, 'New thread').focus();
    await page.keyboard.press('Enter');
    await page.keyboard.type('say one');
    await page.keyboard.press('Shift+Enter');
    await page.keyboard.type('say two');
    await page.keyboard.press('Enter');
    await page.waitForURL(/\/threads\/[^/]+$/);
    await log(page).locator('.assistant').first().waitFor();
    await page.goBack();
    await page.getByRole('heading', { level: 1, name: 'Threads' }).waitFor();
  },

  /** A token is asked for, a wrong one is answered in words, and the cookie is out of reach of scripts. */
  async 'sign-in'(browser) {
    const page = await open(browser);
    await page.goto(`${base}/threads`);
    await page.getByLabel('Token').fill('a wrong token, which is long');
    await button(page, 'Sign in').click();
    await page.getByText(/wrong or was revoked/).waitFor();
    await inspect(page, 'sign-in');
    await shot(page, 'sign-in');
    await page.getByLabel('Token').fill(token);
    await button(page, 'Sign in').click();
    await page.getByRole('heading', { level: 1, name: 'Threads' }).waitFor();
    const cookies = await page.context().cookies();
    check(cookies.length === 1 && cookies[0].httpOnly && cookies[0].sameSite === 'Strict', JSON.stringify(cookies));
    check(!cookies[0].value.includes(token), 'the cookie is not the token');
    check(await page.evaluate(() => document.cookie + JSON.stringify({ ...localStorage, ...sessionStorage })) === '{}', 'scripts see no secret');
    await page.reload();
    await page.getByRole('heading', { level: 1, name: 'Threads' }).waitFor();
    await button(page, 'New thread').click();
    await send(page, 'say signed in');
    await page.waitForURL(/\/threads\/[^/]+$/);
    await log(page).locator('.assistant').first().waitFor();
    await button(page, 'Sign out').click();
    await page.getByLabel('Token').waitFor();
    check(page.problems.length === 0, page.problems.join('\n'));
  },

  /** The runtime restarts while a thread is shown: no line is lost or repeated. The Rust test restarts it on request. */
  async reconnect(browser) {
    const page = await open(browser);
    const thread = await newThread(page, 'say before');
    await log(page).locator('.assistant').first().waitFor();
    await page.getByText('Live', { exact: true }).waitFor();
    console.log(`restart ${new URL(thread).pathname}`);
    await page.getByText('Reconnecting…', { exact: true }).waitFor();
    await page.getByText('Live', { exact: true }).waitFor();
    await until('the messages of meanwhile are shown', async () => (await log(page).locator('.assistant').count()) === 3);
    const expected = ['before', 'meanwhile', 'later'];
    const texts = await log(page).locator('.assistant .prose').allTextContents();
    check(JSON.stringify(texts) === JSON.stringify(expected), JSON.stringify(texts));
    await send(page, 'say after');
    await log(page).locator('.assistant').nth(3).waitFor();
    check(await log(page).locator('.assistant').count() === 4 && await log(page).locator('.user').count() === 4, 'each entry is shown once');
  },
};

const scenario = scenarios[process.argv[2]];
try {
  check(scenario, `there is no scenario ${process.argv[2]}`);
  await withBrowser(scenario);
  console.log('passed');
} catch (error) {
  console.log(error instanceof Failed ? `failed: ${error.message}` : `failed: ${error.stack}`);
  process.exitCode = 1;
}
