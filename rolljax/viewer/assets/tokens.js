// Tokens of an answer, coloured by what is known of them. Long answers are made of blocks, and a block gets its tokens
// when it comes into view: a trajectory of 100,000 tokens opens as fast as a short one.
import {h} from './dom.js';
import {number, signed} from './format.js';
import {plain, shown, spelled} from './text.js';

const BLOCK = 300;
const LONGEST_BLOCK = 1200;

/** What a token can be coloured by: title, value of token i of a turn, and which kind of scale. */
export const CHANNELS = {
  none: {title: 'nothing'},
  logp: {title: 'log-prob', scale: 'surprise', legend: 'sure → surprising', value: (t, i) => -t.logp[i], has: isSampled},
  advantage: {title: 'advantage', scale: 'signed', legend: 'against → for', value: (t, i) => at(t.advantages, i), has: (t) => t.advantages !== undefined && t.advantages !== null},
  gap: {title: '|log-prob gap|', scale: 'heat', legend: 'sampler and trainer agree → differ', value: (t, i) => Math.abs(t.logp[i] - at(t.trainer_logp, i)), has: (t) => t.trainer_logp !== undefined},
  entropy: {title: 'entropy', scale: 'heat', legend: 'sure → undecided', value: (t, i) => at(t.entropy, i), has: (t) => t.entropy !== undefined},
  version: {title: 'policy version', scale: 'version', legend: 'older → newer', value: (t, i) => at(t.versions, i), has: isSampled},
};

function at(column, i) {
  return Array.isArray(column) ? column[i] : column;
}

// Not recorded, and not an expert's.
function isSampled(turn) {
  return turn.texts.length > 0 && at(turn.versions, 0) >= 0;
}

/** The channels that a trajectory has something to say about. */
export function channelsOf(turns) {
  return Object.keys(CHANNELS).filter((name) => name === 'none' || turns.some((t) => CHANNELS[name].has(t)));
}

function extent(turns, channel) {
  let [low, high] = [Infinity, -Infinity];
  for (const t of turns) {
    if (!channel.has(t)) continue;
    for (let i = 0; i < t.texts.length; i += 1) {
      const v = channel.value(t, i);
      if (v === null || (v < 0 && channel.scale !== 'signed')) continue;
      low = Math.min(low, v);
      high = Math.max(high, v);
    }
  }
  return [low, high];
}

/** How values of a channel become classes: a function of turn and place, and the ends of the scale. */
export function scaleOf(turns, name) {
  const channel = CHANNELS[name];
  if (!channel.value) return {colour: () => '', ends: null};
  const [low, high] = extent(turns, channel);
  if (channel.scale === 'signed') {
    const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
    // one value for all of them is no reason to shout
    const shade = low === high ? most * 1.7 : most;
    return {ends: [signed(-most), signed(most)], colour: (t, i) => signedClass(channel.has(t) ? channel.value(t, i) : null, shade)};
  }
  const floor = channel.scale === 'version' ? low : 0;
  const top = channel.scale === 'surprise' ? Math.max(4, Math.min(high, 8)) : high;
  const ends = channel.scale === 'version' ? [`version ${number(low)}`, number(high)] : [number(floor), number(top)];
  const colour = (t, i) => {
    const v = channel.has(t) ? channel.value(t, i) : null;
    if (v === null || !(v >= floor)) return '';
    const share = top > floor ? Math.min(1, (v - floor) / (top - floor)) : channel.scale === 'version' ? 0.5 : 0;
    return channel.scale === 'version' ? `v${Math.round(share * 6)}` : share < 0.04 ? '' : `q${Math.max(1, Math.round(share * 7))}`;
  };
  return {ends, colour};
}

function signedClass(value, most) {
  if (value === null || value === undefined || !value) return '';
  return `${value > 0 ? 'p' : 'n'}${Math.max(1, Math.round((Math.abs(value) / most) * 5))}`;
}

// Where blocks end: behind a line once there are enough tokens, else after a while.
function blocks(texts) {
  const ends = [];
  let start = 0;
  for (let i = 0; i < texts.length; i += 1) {
    const size = i + 1 - start;
    if (size >= LONGEST_BLOCK || (size >= BLOCK && texts[i].endsWith('\n'))) {
      ends.push([start, i + 1]);
      start = i + 1;
    }
  }
  if (start < texts.length) ends.push([start, texts.length]);
  return ends;
}

/** The tokens of turns; `paint(channel)` colours them. */
export class Tokens {
  constructor(turns) {
    this.turns = turns;
    this.scale = scaleOf(turns, 'none');
    this.made = new Map();
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) this.make(entry.target);
    }, {rootMargin: '1200px'});
  }

  /** The element of a turn's answer. */
  answer(index) {
    const turn = this.turns[index];
    const special = new Set(turn.special);
    const element = h('div', {class: 'text answer-text', data: {turn: String(index)}});
    for (const [start, end] of blocks(turn.texts)) {
      const block = h('div', {class: 'block'}, turn.texts.slice(start, end).join(''));
      block.rolljax = {turn: index, start, end, special};
      element.append(block);
      if (turn.texts.length <= BLOCK) this.make(block);
      else this.seen.observe(block);
    }
    return element;
  }

  make(block) {
    if (this.made.has(block)) return;
    this.seen.unobserve(block);
    const {turn, start, end, special} = block.rolljax;
    const texts = this.turns[turn].texts;
    const nodes = [];
    for (let i = start; i < end; i += 1) {
      const node = document.createElement('span');
      node.dataset.i = String(i);
      node.append(...(texts[i] === '' ? [piece()] : special.has(i) ? shown(texts[i]) : spelled(texts[i])));
      nodes.push(node);
    }
    block.replaceChildren(...nodes);
    this.made.set(block, nodes);
    this.colour(block);
  }

  colour(block) {
    const {turn, start, special} = block.rolljax;
    const of = this.turns[turn];
    this.made.get(block).forEach((node, k) => {
      const i = start + k;
      node.className = `tok ${this.scale.colour(of, i)}${special.has(i) ? ' special' : ''}`;
    });
  }

  paint(name) {
    this.scale = scaleOf(this.turns, name);
    for (const block of this.made.keys()) this.colour(block);
    return this.scale.ends;
  }

  /** The node of a token, made if it is not yet. */
  node(turn, i) {
    for (const block of document.querySelectorAll(`[data-turn="${turn}"] .block`)) {
      if (i >= block.rolljax.start && i < block.rolljax.end) {
        this.make(block);
        return this.made.get(block)[i - block.rolljax.start];
      }
    }
    return null;
  }
}

function piece() {
  const node = document.createElement('span');
  node.className = 'piece';
  node.title = 'a part of the next character';
  node.textContent = '·';
  return node;
}

/** What is known of one token, as a list of terms. */
export function details(turn, i) {
  const logp = turn.logp[i];
  const trainer = turn.trainer_logp === undefined ? null : at(turn.trainer_logp, i);
  const version = at(turn.versions, i);
  const facts = [
    ['token', `${plain(JSON.stringify(turn.texts[i]))}  id ${turn.ids[i]}`],
    version < 0 ? ['sampled', 'no: recorded, or an expert’s'] : ['log-prob', `${number(logp)}  (${number(Math.exp(logp) * 100)} %)`],
    trainer === null ? null : ['trainer', `${number(trainer)}  (gap ${signed(logp - trainer)})`],
    turn.entropy === undefined ? null : ['entropy', `${number(at(turn.entropy, i))} nat`],
    turn.advantages === undefined ? null : ['advantage', at(turn.advantages, i) === null ? 'none: no part in training' : signed(at(turn.advantages, i))],
    version < 0 ? null : ['policy version', String(version)],
    ['place', `${i + 1} of ${turn.texts.length}`],
  ];
  const known = h('dl', {}, facts.filter(Boolean).map(([what, value]) => [h('dt', {}, what), h('dd', {}, value)]));
  return turn.alternatives === undefined ? known : [known, likeliest(turn.alternatives[i])];
}

// What else could have stood there, with its probability.
function likeliest(found) {
  const rows = found.map(([text, logp]) => {
    const share = Math.exp(logp) * 100;
    const bar = h('meter', {min: '0', max: '100', value: String(share)});
    return h('tr', {}, h('td', {class: 'mono'}, plain(JSON.stringify(text))), h('td', {}, bar), h('td', {class: 'num'}, `${number(share)} %`));
  });
  return h('table', {class: 'likeliest'}, h('caption', {}, 'likeliest tokens'), h('tbody', {}, rows));
}
