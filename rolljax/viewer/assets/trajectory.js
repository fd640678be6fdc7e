// One trajectory: what the policy saw, what it said, token by token, and what came of it.
import {frozen, get} from './api.js';
import {ending, faultNote, rangeOf, referenceNote, rewardClass, rewardParts} from './badge.js';
import {fill, h} from './dom.js';
import {count, number, seconds} from './format.js';
import {go, here, link, remember} from './route.js';
import {tips} from './tip.js';
import {CHANNELS, channelsOf, Tokens} from './tokens.js';

const OPEN_CHARS = 700;
const FINISH = {stop: 'ended its answer', length: 'cut: too many tokens', context: 'cut: the context is full', abort: 'aborted'};

function told(turn, index) {
  const length = turn.prompt.reduce((sum, [text]) => sum + text.length, 0);
  const isPrompt = index === 0 || turn.restart;
  const title = isPrompt ? (index === 0 ? 'prompt' : 'prompt, begun anew') : 'environment';
  const text = turn.prompt.filter(([, special]) => !special).map(([part]) => part).join(' ').trim();
  const body = h('div', {class: 'text told'});
  const box = h('details', {class: `told-box ${isPrompt ? 'of-prompt' : 'of-env'}`},
    h('summary', {}, h('span', {class: 'who'}, title), h('span', {class: 'glance'}, text.slice(0, 160)), h('span', {class: 'small'}, count(turn.prompt_tok, 'token'))), body);
  box.addEventListener('toggle', () => {
    if (box.open && !body.firstChild) fill(body, turn.prompt.map(([part, special]) => (special ? h('span', {class: 'special'}, part) : part)));
  });
  box.open = index === 0 && length <= OPEN_CHARS;
  return box;
}

function said(turn, index, tokens) {
  const notes = [count(turn.texts.length, 'token'), FINISH[turn.finish_reason] || turn.finish_reason];
  if (turn.weight !== 1) notes.push(`weight ${number(turn.weight)}`);
  return h('div', {class: 'said-box'},
    h('header', {}, h('span', {class: 'who'}, 'policy'), h('span', {class: 'small'}, notes.join(' · ')),
      turn.reward ? h('span', {class: 'pill plain', title: 'reward of this turn'}, `${turn.reward > 0 ? '+' : ''}${number(turn.reward)}`) : null),
    tokens.answer(index));
}

function painter(tokens, turns) {
  const channels = channelsOf(turns);
  const wanted = here().query.colour;
  let now = channels.includes(wanted) ? wanted : channels.includes('advantage') ? 'advantage' : channels.includes('logp') ? 'logp' : 'none';
  const buttons = h('span', {class: 'choice', role: 'group', 'aria-label': 'colour tokens by'});
  const legend = h('span', {class: 'scale'});
  const paint = () => {
    const ends = tokens.paint(now);
    const channel = CHANNELS[now];
    fill(buttons, channels.map((name) => h('button', {'aria-pressed': String(name === now), on: {click: () => set(name)}}, CHANNELS[name].title)));
    fill(legend, ends ? [h('span', {}, ends[0]), h('span', {class: `ramp ${channel.scale}`}), h('span', {}, ends[1]), h('span', {class: 'small'}, channel.legend)] : null);
  };
  const set = (name) => {
    now = name;
    remember({colour: name});
    paint();
  };
  paint();
  return {element: h('div', {class: 'paint'}, h('span', {class: 'what'}, 'colour'), buttons, legend), next: () => set(channels[(channels.indexOf(now) + 1) % channels.length])};
}

function facts(t, range) {
  const found = [['environment', `${t.env} #${t.task_index}`], ['prompt', t.prompt_index], ['sampled', count(t.sampled_tok, 'token')], ['told', count(t.prompt_tok, 'token')]];
  if (t.versions) found.push(['policy version', t.versions[0] === t.versions[1] ? t.versions[0] : `${t.versions[0]} to ${t.versions[1]}`]);
  if (t.sample_s) found.push(['sampling', seconds(t.sample_s)]);
  if (t.env_s) found.push(['environment took', seconds(t.env_s)]);
  if (t.attempts > 1) found.push(['attempts', t.attempts]);
  if (t.loops) found.push(['loops discarded', t.loops]);
  if (t.expert) found.push(['behind an expert', `${t.expert.turns} turns`]);
  const own = Object.entries(t.metrics);
  return [
    h('div', {class: 'facts'}, h('h1', {}, `Sibling ${t.sibling}`), h('span', {class: `pill big ${rewardClass(t.status === 'failed' ? null : t.reward, range)}`, title: 'reward'}, number(t.reward)), ending(t), rewardParts(t.parts)),
    h('div', {class: 'facts minor'}, found.map(([what, value]) => h('span', {class: 'fact'}, h('span', {class: 'what'}, what), String(value))),
      own.map(([what, value]) => h('span', {class: 'fact'}, h('span', {class: 'what'}, what), number(value)))),
    t.fault ? faultNote(t.fault) : null,
  ];
}

async function neighbours(name, where, line) {
  if (where.startsWith('heldout:')) return {group: null, siblings: [], order: []};
  const whole = await get(['runs', name, 'steps', where]);
  const group = whole.groups.find((g) => g.trajectories.some((t) => t.line === line));
  return {group, siblings: group ? group.trajectories : [], order: whole.groups.flatMap((g) => g.trajectories)};
}

function siblingBar(name, where, line, siblings, range) {
  if (siblings.length < 2) return null;
  return h('nav', {class: 'tiles', 'aria-label': 'siblings'}, siblings.map((t) => h('a', {
    class: `tile ${rewardClass(t.status === 'failed' ? null : t.reward, range)} ${t.success ? 'is-solved' : ''}`, 'aria-current': t.line === line ? 'page' : null,
    href: link([name, where, String(t.line)], {colour: here().query.colour}), title: `sibling ${t.sibling}: reward ${number(t.reward)}`,
  }, t.status === 'failed' ? '✕' : number(t.reward))));
}

function unfold(root) {
  const boxes = [...root.querySelectorAll('details.told-box')];
  const closed = boxes.some((b) => !b.open);
  boxes.forEach((b) => { b.open = closed; });
}

/** The page of a trajectory: `where` is its step, or `heldout:NAME`. */
export async function trajectoryPage(name, where, place) {
  const line = Number(place);
  const [t, {group, siblings, order}] = await Promise.all([get(['runs', name, 'steps', where, place]), neighbours(name, where, line)]);
  const range = rangeOf(order.length ? order : [t]);
  const tokens = new Tokens(t.turns);
  const paint = painter(tokens, t.turns);
  const turns = t.turns.map((turn, i) => h('li', {class: 'turn', data: {item: ''}}, h('span', {class: 'turn-number'}, t.turns.length > 1 ? `turn ${i + 1}` : ''), h('div', {class: 'turn-body'}, told(turn, i), said(turn, i, tokens))));
  const element = h('div', {class: 'trajectory-page'}, facts(t, range), siblingBar(name, where, line, siblings, range),
    t.tokenizer ? null : h('p', {class: 'note'}, 'The tokenizer of this run was not found, so tokens are shown by their numbers.'),
    t.turns.length ? paint.element : h('p', {class: 'empty'}, 'Nothing was said: the episode ended before its first turn.'),
    t.turns.length ? null : h('div', {class: 'text question'}, t.task),
    h('ol', {class: 'turns-list'}, turns),
    referenceNote(t.reference),
    frozen ? null : h('a', {class: 'button', href: `/export/${encodeURIComponent(name)}/${where}/${line}`, title: 'one page of this trajectory, to send to somebody'}, 'export'));
  const pin = tips(element, tokens);
  const to = (list, by) => {
    const other = list[list.findIndex((o) => o.line === line) + by];
    return other ? () => go(link([name, where, String(other.line)], {colour: here().query.colour})) : () => {};
  };
  const up = where.startsWith('heldout:') ? link([name, 'heldout']) : group && siblings.length > 1 ? link([name, where, 'g', `${group.stream}-${group.prompt_index}`]) : link([name, where]);
  return {
    title: `${name}: step ${where}, trajectory ${line}`, element,
    shown: () => {
      const [turn, i] = (here().query.token || '').split('.').map(Number);
      const node = Number.isInteger(i) ? tokens.node(turn, i) : null;
      if (node) {
        node.scrollIntoView({block: 'center'});
        pin(node);
      }
    },
    keys: {u: () => go(up), c: paint.next, e: () => unfold(element), h: to(siblings, -1), l: to(siblings, 1), '[': to(order, -1), ']': to(order, 1)},
  };
}
