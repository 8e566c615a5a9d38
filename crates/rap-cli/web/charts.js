// Small charts. A table or a sentence beside each says the same.

import { h, shortTime, svgTitle } from './dom.js';

const WIDTH = 240;
const HEIGHT = 56;

/** Makes a bar chart of `points`, each with `at` and `value`. `show` puts a value into words. */
export function bars(points, { label, show }) {
  const most = Math.max(...points.map((point) => point.value), 0);
  const width = WIDTH / Math.max(1, points.length);
  const bar = ({ at, value }, index) => {
    const height = most > 0 && value > 0 ? Math.max(2, (value / most) * (HEIGHT - 4)) : 0;
    return h('g', {}, svgTitle(`${shortTime(at)}: ${show(value)}`),
      h('rect', { class: 'slot', x: (index * width).toFixed(2), y: '0', width: width.toFixed(2), height: String(HEIGHT) }),
      h('rect', { class: 'column', x: (index * width + 0.5).toFixed(2), y: (HEIGHT - height).toFixed(2), width: Math.max(0.5, width - 1).toFixed(2), height: height.toFixed(2), rx: '1' }));
  };
  return h('svg', { class: 'chart', viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', role: 'img', 'aria-label': `${label}, at most ${show(most)}` },
    h('line', { class: 'axis', x1: '0', x2: String(WIDTH), y1: String(HEIGHT - 0.5), y2: String(HEIGHT - 0.5) }), points.map(bar));
}
