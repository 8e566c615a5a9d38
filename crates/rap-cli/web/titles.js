// Titles of threads for listings, whose rows have only the ids. A title is read when its link is first seen.

import { get, path } from './api.js';
import { fill, h, said } from './dom.js';

/** Threads that are read at once. */
const AT_ONCE = 4;
/** Titles that are remembered. Beyond it, all are forgotten. */
const REMEMBERED = 1000;

/** Promises of titles, by id. */
const known = new Map();
const waiting = [];
let reading = 0;

async function read(id) {
  if (reading >= AT_ONCE) await new Promise((resolve) => { waiting.push(resolve); });
  reading += 1;
  try {
    return (await get(path(['threads', id]))).title;
  } catch {
    // The link shows the id.
    return undefined;
  } finally {
    reading -= 1;
    waiting.shift()?.();
  }
}

async function name(link, id) {
  if (!known.has(id)) {
    if (known.size >= REMEMBERED) known.clear();
    known.set(id, read(id));
  }
  const title = await known.get(id);
  if (title) fill(link, said(title));
  else known.delete(id);
}

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (isIntersecting || !target.isConnected) seen.unobserve(target);
    if (isIntersecting) name(target, target.dataset.thread);
  }
});

/** Makes a link to a thread, with its title as soon as it is known. */
export function threadLink(id) {
  if (!id) return '';
  const link = h('a', { href: `/threads/${encodeURIComponent(id)}`, title: id, 'data-thread': id }, said(id));
  seen.observe(link);
  return link;
}
