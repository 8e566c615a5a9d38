// Markdown to DOM nodes. HTML in the text stays text, images are not loaded, and only http and https addresses become
// links. The time is linear in the length of the text, because it may come from anybody.

import { h, visible } from './dom.js';

/** Longer texts are shown as they are. */
const LONGEST = 200_000;
/** Quotes and lists that are nested deeper are shown as text. */
const DEEPEST = 8;

/** Returns a fragment with the rendered text. */
export function markdown(text) {
  const fragment = document.createDocumentFragment();
  const shown = visible(text);
  if (shown.length > LONGEST) fragment.append(h('pre', {}, shown));
  else fragment.append(...blocks(shown.split('\n'), 0));
  return fragment;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

function blocks(lines, depth) {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (line.trim() === '') {
      at += 1;
      continue;
    }
    const [node, next] = block(lines, at, depth);
    nodes.push(node);
    at = next;
  }
  return nodes;
}

/** Returns the block that begins at a line, and the line after it. */
function block(lines, at, depth) {
  const line = lines[at];
  let match = FENCE.exec(line);
  if (match) return fenced(lines, at, match);
  match = HEADING.exec(line);
  if (match) return [h(`h${Math.min(6, match[1].length + 2)}`, {}, inline(withoutClosing(match[2]))), at + 1];
  if (RULE.test(line)) return [h('hr'), at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

/** Returns the text of a heading without the marks that may end it. */
function withoutClosing(text) {
  let end = text.length;
  while (end > 0 && '# \t'.includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

function fenced(lines, at, [, fence, info]) {
  let end = at + 1;
  const closes = (line) => {
    const trimmed = line.trim();
    return trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = h('code', {}, lines.slice(at + 1, end).join('\n'));
  const language = info.trim().split(/\s/)[0];
  const node = h('pre', { tabindex: '0', 'data-language': language || null }, code);
  return [node, Math.min(end + 1, lines.length)];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ''));
  return [h('blockquote', {}, blocks(inner, depth + 1)), end];
}

function indentation(line) {
  return line.length - line.trimStart().length;
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first[2]);
  const kind = first[2].at(-1);
  const items = [];
  let end = at;
  for (;;) {
    const match = end < lines.length ? ITEM.exec(lines[end]) : null;
    if (!match || match[2].at(-1) !== kind || RULE.test(lines[end])) break;
    const width = Math.min(match[0].length, match[1].length + match[2].length + 4);
    const inner = [lines[end].slice(match[0].length)];
    end += 1;
    while (end < lines.length) {
      const line = lines[end];
      const blank = line.trim() === '';
      if (blank) {
        const next = lines[end + 1];
        if (next === undefined || next.trim() === '' || indentation(next) < Math.min(width, 2)) break;
      } else if (indentation(line) < Math.min(width, 2) && (ITEM.test(line) || startsBlock(lines, end) || inner.at(-1) === '')) {
        break;
      }
      inner.push(line.slice(Math.min(indentation(line), width)));
      end += 1;
    }
    items.push(item(inner, depth));
    // A blank line between two items does not end the list.
    if (end + 1 < lines.length && lines[end].trim() === '' && ITEM.exec(lines[end + 1])?.[2].at(-1) === kind) end += 1;
  }
  const start = ordered ? Number.parseInt(first[2], 10) : 1;
  return [h(ordered ? 'ol' : 'ul', { start: start === 1 ? null : start }, items), end];
}

function item(lines, depth) {
  const task = /^\[([ xX])\][ \t]+/.exec(lines[0]);
  if (task) lines[0] = lines[0].slice(task[0].length);
  const nodes = blocks(lines, depth + 1);
  // A single paragraph, or one before a nested list, needs no space around it.
  const flat = nodes.flatMap((node) => (node.nodeName === 'P' && nodes.length <= 2 ? [...node.childNodes] : [node]));
  const box = task && h('span', { class: 'task', role: 'img', 'aria-label': task[1] === ' ' ? 'to do' : 'done' }, task[1] === ' ' ? '☐ ' : '☑ ');
  return h('li', {}, box, flat);
}

function startsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);
}

function cells(line) {
  const trimmed = line.trim().replace(/^\|/, '').replace(/\|$/, '');
  const found = [''];
  let code = false;
  for (let at = 0; at < trimmed.length; at += 1) {
    const c = trimmed[at];
    if (c === '\\' && trimmed[at + 1] === '|') {
      found[found.length - 1] += '|';
      at += 1;
    } else if (c === '|' && !code) found.push('');
    else {
      if (c === '`') code = !code;
      found[found.length - 1] += c;
    }
  }
  return found.map((cell) => cell.trim());
}

function isTable(lines, at) {
  const rule = lines[at + 1];
  return lines[at].includes('|') && rule !== undefined && rule.includes('-') && TABLE_RULE.test(rule)
    && cells(lines[at]).length === cells(rule).length;
}

function table(lines, at) {
  const sides = cells(lines[at + 1]).map((rule) => {
    const [left, right] = [rule.startsWith(':'), rule.endsWith(':')];
    return left && right ? 'center' : right ? 'right' : null;
  });
  const row = (line, tag) => {
    const found = cells(line);
    return h('tr', {}, sides.map((side, index) => h(tag, { class: side }, inline(found[index] ?? ''))));
  };
  let end = at + 2;
  const body = [];
  while (end < lines.length && lines[end].includes('|') && lines[end].trim() !== '') {
    body.push(row(lines[end], 'td'));
    end += 1;
  }
  const whole = h('table', {}, h('thead', {}, row(lines[at], 'th')), h('tbody', {}, body));
  return [h('div', { class: 'table', tabindex: '0' }, whole), end];
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== '' && !startsBlock(lines, end)
    && !(depth < DEEPEST && ITEM.test(lines[end])) && !isTable(lines, end)) end += 1;
  return [h('p', {}, inline(lines.slice(at, end).map((line) => line.trim()).join('\n'))), end];
}

/** Returns an address if it is one of the web, else undefined. */
export function webAddress(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    return undefined;
  }
  return url.protocol === 'http:' || url.protocol === 'https:' ? url : undefined;
}

/** Makes a link to a web address. */
export function link(url, ...children) {
  return h('a', { href: url.href, rel: 'noopener noreferrer nofollow', target: '_blank', title: url.href }, ...children);
}

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const BARE = /^https?:\/\/[^\s<>"`]+/i;
const TARGET = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+(?:"[^"\n]*"|'[^'\n]*'))?\s*\)/;
/** Longest part of a text that is tried as a link target or address. */
const ADDRESS = 2048;

/**
 * Renders the parts of a line: code, links, emphasis. `nodes` is the output so far, and `open` the delimiters in it that may
 * begin emphasis or a link.
 */
function inline(text) {
  const state = { text, at: 0, nodes: [], open: [], plain: '', missing: new Set(), counts: {} };
  while (state.at < text.length) step(state);
  flush(state);
  return state.nodes;
}

function flush(state) {
  if (state.plain === '') return;
  state.plain.split('\n').forEach((line, index) => {
    if (index > 0) state.nodes.push(h('br'));
    if (line) state.nodes.push(document.createTextNode(line));
  });
  state.plain = '';
}

function step(state) {
  const { text, at } = state;
  const c = text[at];
  if (c === '\\' && at + 1 < text.length && PUNCTUATION.test(text[at + 1])) {
    state.plain += text[at + 1];
    state.at += 2;
  } else if (c === '`') code(state);
  else if (c === '*' || c === '_' || c === '~') delimiter(state, c);
  else if (c === '[' || (c === '!' && text[at + 1] === '[')) bracket(state);
  else if (c === ']') closeBracket(state);
  else if (c === '<') autolink(state);
  else if ((c === 'h' || c === 'H') && !/[\p{L}\p{N}]/u.test(text[at - 1] ?? ' ')) bareLink(state);
  else {
    state.plain += c;
    state.at += 1;
  }
}

function code(state) {
  const { text, at } = state;
  let length = 1;
  while (text[at + length] === '`') length += 1;
  let end = state.missing.has(length) ? -1 : at + length;
  while (end !== -1) {
    end = text.indexOf('`', end);
    if (end === -1) break;
    let run = 1;
    while (text[end + run] === '`') run += 1;
    if (run === length) break;
    end += run;
  }
  if (end === -1) {
    state.missing.add(length);
    state.plain += '`'.repeat(length);
    state.at += length;
    return;
  }
  flush(state);
  let content = text.slice(at + length, end).replace(/\n/g, ' ');
  if (/^ .* $/.test(content) && content.trim()) content = content.slice(1, -1);
  state.nodes.push(h('code', {}, content));
  state.at = end + length;
}

function delimiter(state, c) {
  const { text, at } = state;
  let length = 1;
  while (text[at + length] === c) length += 1;
  const [before, after] = [text[at - 1] ?? ' ', text[at + length] ?? ' '];
  const isSpace = (x) => /\s/.test(x);
  const isWord = (x) => /[\p{L}\p{N}]/u.test(x);
  const isMark = (x) => !isSpace(x) && !isWord(x);
  const left = !isSpace(after) && (!isMark(after) || isSpace(before) || isMark(before));
  const right = !isSpace(before) && (!isMark(before) || isSpace(after) || isMark(after));
  const opens = left && (c !== '_' || !right || isMark(before));
  let closes = right && (c !== '_' || !left || isMark(after));
  state.at += length;
  flush(state);
  let left_over = c === '~' && length !== 2 ? 0 : length;
  if (left_over === 0) {
    state.plain += c.repeat(length);
    return;
  }
  while (closes && left_over > 0 && (state.counts[c] ?? 0) > 0) {
    const used = close(state, c, left_over);
    if (used === 0) closes = false;
    left_over -= used;
  }
  if (left_over === 0) return;
  if (opens) {
    state.counts[c] = (state.counts[c] ?? 0) + 1;
    state.open.push({ c, length: left_over, node: state.nodes.length });
  }
  state.nodes.push(document.createTextNode(c.repeat(left_over)));
}

/** Wraps what follows the last delimiter of this kind. Returns how many characters of the closing one were used. */
function close(state, c, length) {
  let index = state.open.length - 1;
  while (index >= 0 && state.open[index].c !== c && state.open[index].c !== '[') index -= 1;
  // Emphasis cannot begin outside a link's text and end in it.
  if (index < 0 || state.open[index].c === '[') return 0;
  for (const skipped of state.open.splice(index + 1)) state.counts[skipped.c] -= 1;
  const opener = state.open[index];
  const used = c === '~' ? 2 : Math.min(2, opener.length, length);
  if (c === '~' && opener.length !== 2) return 0;
  const inner = state.nodes.splice(opener.node + 1);
  const tag = c === '~' ? 'del' : used === 2 ? 'strong' : 'em';
  opener.length -= used;
  if (opener.length === 0) {
    state.nodes.pop();
    state.open.pop();
    state.counts[c] -= 1;
  } else {
    state.nodes[opener.node] = document.createTextNode(c.repeat(opener.length));
  }
  state.nodes.push(h(tag, {}, inner));
  return used;
}

function bracket(state) {
  const image = state.text[state.at] === '!';
  flush(state);
  state.counts['['] = (state.counts['['] ?? 0) + 1;
  state.open.push({ c: '[', image, node: state.nodes.length });
  state.nodes.push(document.createTextNode(image ? '![' : '['));
  state.at += image ? 2 : 1;
}

function closeBracket(state) {
  const target = TARGET.exec(state.text.slice(state.at + 1, state.at + 1 + ADDRESS));
  const url = target && webAddress(target[1]);
  if (!url || (state.counts['['] ?? 0) === 0) {
    // An address of any other kind is shown as it was written.
    const literal = target ? `]${target[0]}` : ']';
    state.plain += literal;
    state.at += literal.length;
    if ((state.counts['['] ?? 0) > 0) dropBracket(state);
    return;
  }
  flush(state);
  const opener = dropBracket(state);
  const inner = state.nodes.splice(opener.node + 1);
  state.nodes.pop();
  const label = inner.length ? inner : [url.href];
  state.nodes.push(opener.image ? link(url, 'image: ', label) : link(url, label));
  state.at += 1 + target[0].length;
}

/** Removes the last bracket and the delimiters in it, which stay as text. */
function dropBracket(state) {
  for (;;) {
    const opener = state.open.pop();
    state.counts[opener.c] -= 1;
    if (opener.c === '[') return opener;
  }
}

function autolink(state) {
  const match = /^<(https?:\/\/[^\s<>]+)>/i.exec(state.text.slice(state.at, state.at + ADDRESS));
  const url = match && webAddress(match[1]);
  if (!url) {
    state.plain += '<';
    state.at += 1;
    return;
  }
  flush(state);
  state.nodes.push(link(url, match[1]));
  state.at += match[0].length;
}

function bareLink(state) {
  // Inside the text of a link there is no other link.
  const match = (state.counts['['] ?? 0) === 0 && BARE.exec(state.text.slice(state.at, state.at + ADDRESS));
  const address = match && match[0].replace(/[.,;:!?'*_~]+$/, '').replace(/\)+$/, (end) => (match[0].includes('(') ? end : ''));
  const url = address && webAddress(address);
  if (!url) {
    state.plain += state.text[state.at];
    state.at += 1;
    return;
  }
  flush(state);
  state.nodes.push(link(url, address));
  state.at += address.length;
}
