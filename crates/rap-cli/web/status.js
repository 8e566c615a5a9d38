// How the state of a thread is put into words.

import { h, said, shortTime, since, time, visible } from './dom.js';

export const STATUSES = ['running', 'waiting', 'needs_you', 'failed', 'idle', 'closed'];

/** Returns the word for a status. */
export function word(status) {
  return status === 'needs_you' ? 'needs you' : status;
}

/** Makes the badge of a status. */
export function badge(status) {
  return h('span', { class: `badge ${status}`, 'data-status': status }, word(status));
}

/** Returns the name of a thread for people. */
export function titleOf(thread) {
  return visible(thread.title || `Thread ${thread.id}`);
}

const SLEEPS = new Set(['sleep', 'sleep_until']);

function names(list) {
  const shown = list.slice(0, 3).map((item) => visible(item.tool));
  const more = list.length - shown.length;
  return shown.join(', ') + (more > 0 ? ` and ${more} more` : '');
}

function waiting(calls) {
  if (calls.length === 0) return ['waiting'];
  const [first] = calls;
  if (calls.every((call) => SLEEPS.has(call.tool))) {
    return first.until ? ['asleep until ', time(first.until)] : ['asleep'];
  }
  const parts = calls.length === 1
    ? ['on ', h('b', {}, said(first.display ?? first.tool)), ' for ', since(first.since)]
    : ['on ', h('b', {}, names(calls)), ' for ', since(first.since)];
  if (first.problem) parts.push(`, ${visible(first.problem)}`);
  else if (first.overdue) parts.push(', far longer than usual');
  if (first.until) parts.push(', until ', time(first.until));
  return parts;
}

/** Returns what a thread does or waits for, in words. The badge with its status stands beside it. */
export function explain(thread) {
  switch (thread.status) {
    case 'running': return ['thinking'];
    case 'waiting': return waiting(thread.waiting_on);
    case 'needs_you': {
      if (thread.why) return [visible(thread.why), retry(thread)];
      const asked = thread.waiting_on;
      return asked.length ? ['a question of ', h('b', {}, names(asked))] : ['a question for you'];
    }
    case 'failed': return [visible(thread.why ?? 'the model request failed'), retry(thread)];
    case 'idle': return idle(thread);
    default: return [];
  }
}

function retry(thread) {
  return thread.retry_at ? `; continues at ${shortTime(thread.retry_at)}` : '';
}

function idle(thread) {
  const parts = [];
  const schedules = thread.subscriptions.filter((item) => item.tool === 'schedule');
  const others = thread.subscriptions.filter((item) => item.tool !== 'schedule');
  if (schedules.length) parts.push('scheduled');
  if (others.length) parts.push(`asleep, wakes on ${names(others)}`);
  if (thread.waiting_on.length) parts.push(`in the background: ${names(thread.waiting_on)}`);
  if (thread.children) parts.push(thread.children === 1 ? 'one child at work' : `${thread.children} children at work`);
  return [parts.join('; ') || 'asleep until somebody writes'];
}
