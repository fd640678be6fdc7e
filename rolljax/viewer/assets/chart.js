// One metric over steps, of one run or several.
import {fill, h, s} from './dom.js';
import {number} from './format.js';

const MARGIN = {left: 14, right: 12, top: 17, bottom: 20};
const MOST_POINTS = 700;
const LETTER = 6.6;

/** Exponential moving average without the bias of its start; a value that is missing stays so. */
export function smooth(points, weight) {
  let sum = 0;
  let mass = 0;
  return points.map(([x, y, step]) => {
    sum = weight * sum + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return [x, sum / mass, step];
  });
}

// The lowest and the highest of every stretch: a spike is never lost.
function thinned(points) {
  if (points.length <= MOST_POINTS) return points;
  const size = Math.ceil(points.length / (MOST_POINTS / 2));
  const kept = [];
  for (let i = 0; i < points.length; i += size) {
    const part = points.slice(i, i + size);
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

function niceStep(span, parts, distances = []) {
  const raw = span / parts;
  const sensible = distances.find((step) => step >= raw * 0.999);
  if (sensible && raw >= distances[0]) return sensible;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= raw * 0.999);
}

function ticks(low, high, parts, distances) {
  if (!(high > low)) return [low];
  const step = niceStep(high - low, parts, distances);
  const found = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-6; t += step) found.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1) found.push(10 ** e);
  const inside = found.filter((t) => t >= low * 0.999 && t <= high * 1.001);
  const stride = Math.ceil(inside.length / 4);
  return inside.length ? inside.filter((_, i) => i % stride === 0) : [low, high];
}

// The lowest and the highest of numbers, however many there are.
function ends(values) {
  return values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
}

// Whether two numbers are one but for rounding: no ticks fit between them.
function alike(a, b) {
  return Math.abs(b - a) <= 1e-9 * Math.max(Math.abs(a), Math.abs(b));
}

// About how wide a label is.
function wide(text) {
  return text.length * LETTER;
}

function scales(lines, marks, log, width, height, across) {
  const every = [...lines.flatMap((l) => l.points), ...marks.map((m) => [m.x, m.y])];
  let [x0, x1] = ends(every.map((p) => p[0]));
  let [y0, y1] = ends(every.map((p) => p[1]).filter((y) => !log || y > 0));
  if (y0 > y1) [y0, y1] = [1, 10]; // nothing that a logarithm has
  if (alike(x0, x1)) [x0, x1] = [x0 - 1, x1 + 1];
  if (alike(y0, y1)) [y0, y1] = log ? [y0 / 2, y1 * 2] : [y0 - (Math.abs(y0) * 0.1 || 0.5), y1 + (Math.abs(y1) * 0.1 || 0.5)];
  const put = log ? Math.log10 : (v) => v;
  const pad = log ? 0 : (y1 - y0) * 0.05;
  const [low, high] = [put(y0) - pad, put(y1) + pad];
  const yTicks = log ? logTicks(y0, y1) : ticks(low, high, 4);
  const left = MARGIN.left + Math.max(...yTicks.map((t) => wide(number(t))));
  const inner = {w: width - left - MARGIN.right, h: height - MARGIN.top - MARGIN.bottom};
  const xTicks = ticks(x0, x1, Math.max(2, width / 110), across.distances).filter((t) => across.adds || Number.isInteger(t));
  return {
    left,
    x: (v) => left + ((v - x0) / (x1 - x0)) * inner.w,
    y: (v) => MARGIN.top + (1 - (put(v) - low) / (high - low)) * inner.h,
    at: (px) => x0 + ((px - left) / inner.w) * (x1 - x0),
    xTicks: xTicks.map((t) => ({t, text: across.tick(t)})),
    yTicks,
  };
}

// Where a label of this width begins so that all of it is within the chart.
function within(centre, size, width) {
  return Math.max(2, Math.min(centre - size / 2, width - size - 2));
}

function path(points, at, log) {
  const drawn = log ? points.filter((p) => p[1] > 0) : points;
  return thinned(drawn).map(([x, y], i) => `${i ? 'L' : 'M'}${at.x(x).toFixed(1)} ${at.y(y).toFixed(1)}`).join('');
}

// Of a phase, at its border; turned to the other side where it would not fit, and left out where another stands.
function phases(at, borders, width) {
  let free = 0;
  return borders.flatMap((b) => {
    const size = wide(b.phase);
    const x = at.x(b.at) + 5 + size < width ? at.x(b.at) + 5 : Math.max(2, at.x(b.at) - 5 - size);
    if (x < free) return [];
    free = x + size + 6;
    return [s('text', {class: 'phase', x, y: 11}, b.phase)];
  });
}

function frame(at, borders, width, height) {
  const bottom = height - MARGIN.bottom;
  return [
    at.yTicks.map((t) => [
      s('line', {class: 'grid', x1: at.left, x2: width - MARGIN.right, y1: at.y(t), y2: at.y(t)}),
      s('text', {class: 'tick', x: at.left - 6, y: at.y(t) + 3.5, 'text-anchor': 'end'}, number(t)),
    ]),
    at.xTicks.map(({t, text}) => s('text', {class: 'tick', x: within(at.x(t), wide(text), width), y: height - 5}, text)),
    borders.map((b) => s('line', {class: 'border', x1: at.x(b.at), x2: at.x(b.at), y1: 4, y2: bottom})),
    phases(at, borders, width),
  ];
}

/**
 * A chart. `across`: what lies across (series.js); `lines`: {run, colour, points [[at, value, step]], faint: behind the
 * others and without a value of its own, opens: the run that a click opens}; `marks`: {x, y, colour, text}; `borders`: {at,
 * phase}, where a phase begins; `weight`: of the smoothing, 0 for none; `onPick`: is told a run and a step that was clicked.
 */
export function chart({title, unit, meaning, across, lines, marks = [], borders = [], log = false, weight = 0, onPick, tall = false}) {
  const readout = h('span', {class: 'readout'});
  const canvas = h('div', {class: 'canvas'});
  const height = tall ? 210 : 150;
  const smoothed = lines.map((l) => ({...l, soft: weight ? smooth(l.points, weight) : l.points}));
  const told = smoothed.filter((l) => !l.faint);
  const say = (point) => fill(readout, told.map((l) => {
    const at = point === null ? l.points.length - 1 : nearest(l.points, point[0]);
    return at < 0 ? null : h('span', {class: `value ${l.colour}`}, number(l.points[at][1]));
  }), point === null ? null : h('span', {class: 'at'}, across.shown(point[0])));
  const draw = () => {
    const width = canvas.clientWidth;
    if (!width) return;
    const at = scales(lines, marks, log, width, height, across);
    const cursor = s('line', {class: 'cursor', y1: MARGIN.top, y2: height - MARGIN.bottom, x1: -9, x2: -9});
    const svg = s('svg', {width, height, role: 'img', 'aria-label': describe(title, lines)}, frame(at, borders, width, height),
      smoothed.map((l) => [
        weight && !l.faint ? s('path', {class: `raw ${l.colour}`, d: path(l.points, at, log)}) : null,
        s('path', {class: `${l.faint ? 'seed' : 'line'} ${l.colour}`, d: path(l.soft, at, log)}),
        l.points.length === 1 ? s('circle', {class: `dot ${l.colour}`, cx: at.x(l.points[0][0]), cy: at.y(l.points[0][1]), r: 3}) : null,
      ]),
      marks.filter((m) => !log || m.y > 0).map((m) => s('path', {class: `star ${m.colour}`, d: diamond(at.x(m.x), at.y(m.y))}, s('title', {}, m.text))),
      cursor);
    svg.addEventListener('pointermove', (event) => {
      const {point} = nearestOf(told, at.at(event.offsetX));
      cursor.setAttribute('x1', at.x(point[0]));
      cursor.setAttribute('x2', at.x(point[0]));
      say(point);
    });
    svg.addEventListener('pointerleave', () => { cursor.setAttribute('x1', -9); cursor.setAttribute('x2', -9); say(null); });
    if (onPick) svg.addEventListener('click', (event) => {
      const {line, point} = nearestOf(told, at.at(event.offsetX));
      onPick(line.opens || line.run, point[2]);
    });
    fill(canvas, svg);
  };
  new ResizeObserver(draw).observe(canvas);
  say(null);
  return h('figure', {class: 'chart', data: {metric: title}},
    h('figcaption', {}, h('span', {class: 'name'}, title), h('span', {class: 'unit'}, unit), readout),
    canvas, meaning ? h('p', {class: 'meaning'}, meaning) : null);
}

function diamond(x, y) {
  return `M${x} ${y - 5}L${x + 5} ${y}L${x} ${y + 5}L${x - 5} ${y}Z`;
}

function describe(title, lines) {
  const of = lines.filter((l) => !l.faint).map((l) => `${l.run}: ${number(l.points[0][1])} to ${number(l.points.at(-1)[1])}`);
  return `${title}, first to last: ${of.join('; ')}`;
}

function nearest(points, at) {
  let best = -1;
  points.forEach(([x], i) => {
    if (best < 0 || Math.abs(x - at) < Math.abs(points[best][0] - at)) best = i;
  });
  return best;
}

// The point that lies nearest across, and its line; of several lines the first.
function nearestOf(lines, at) {
  const found = lines.map((line) => ({line, point: line.points[nearest(line.points, at)]}));
  return found.reduce((a, b) => (Math.abs(b.point[0] - at) < Math.abs(a.point[0] - at) ? b : a));
}
