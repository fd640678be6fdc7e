// A group: its siblings side by side. What all of them begin with is dimmed, so that one sees where they part.
import {get} from './api.js';
import {ending, faultNote, rangeOf, referenceNote, rewardClass, rewardParts} from './badge.js';
import {h} from './dom.js';
import {count, number} from './format.js';
import {go, link} from './route.js';
import {shown} from './text.js';

const AT_ONCE = 32;

/** How many characters texts have in common at their beginning. */
export function commonPrefix(texts) {
  if (texts.length < 2) return 0;
  let length = Math.min(...texts.map((t) => t.length));
  for (const text of texts.slice(1)) {
    let i = 0;
    while (i < length && text[i] === texts[0][i]) i += 1;
    length = i;
  }
  // not within a character of two units
  return length > 0 && /[\ud800-\udbff]/.test(texts[0][length - 1]) ? length - 1 : length;
}

function turn(t, i, same) {
  const told = i === 0 ? '' : t.prompt.filter(([, special]) => !special).map(([text]) => text).join('').trim();
  const text = t.text || t.texts.filter((_, k) => !t.special.includes(k)).join('');
  return [
    told ? h('div', {class: 'text told'}, told.length > 600 ? `${told.slice(0, 600)}…` : told) : null,
    h('div', {class: 'text said'}, same > 0 ? h('span', {class: 'same'}, shown(text.slice(0, same))) : null, shown(text.slice(same))),
  ];
}

function column(run, step, t, full, range, same) {
  const address = link([run, step, String(t.line)]);
  return h('article', {class: 'sibling', data: {item: ''}},
    h('header', {}, h('a', {href: address}, `sibling ${t.sibling}`), h('span', {class: `pill ${rewardClass(t.status === 'failed' ? null : t.reward, range)}`}, number(t.reward)), ending(t)),
    h('p', {class: 'small'}, `${count(t.sampled_tok, 'token')} in ${count(t.turns, 'turn')}`, rewardParts(t.parts)),
    t.fault ? faultNote(t.fault) : null,
    h('div', {class: 'turns'}, full ? full.turns.map((one, i) => turn(one, i, i === 0 ? same : 0)) : h('div', {class: 'text said'}, t.answer)));
}

/** The page of a group: `which` is its stream and its prompt index. */
export async function groupPage(name, step, which) {
  const whole = await get(['runs', name, 'steps', step]);
  const at = whole.groups.findIndex((g) => `${g.stream}-${g.prompt_index}` === which);
  if (at < 0) throw new Error(`Step ${step} has no group ${which}.`);
  const g = whole.groups[at];
  const range = rangeOf(whole.groups.flatMap((o) => o.trajectories));
  // one that is damaged is shown as the list has it
  const fulls = await Promise.all(g.trajectories.map((t, i) => (i < AT_ONCE ? get(['runs', name, 'steps', step, String(t.line)]).catch(() => null) : null)));
  const first = fulls.filter((f) => f && f.turns.length).map((f) => f.turns[0].text);
  const same = commonPrefix(first);
  const task = fulls[0] ? fulls[0].task : g.task;
  const address = (o) => o && link([name, step, 'g', `${o.stream}-${o.prompt_index}`]);
  const [before, after] = [address(whole.groups[at - 1]), address(whole.groups[at + 1])];
  const element = h('div', {class: 'group-page'},
    h('div', {class: 'facts'}, h('h1', {}, `Group ${g.prompt_index}`), h('span', {class: 'fact'}, h('span', {class: 'what'}, 'environment'), g.env),
      h('span', {class: 'fact'}, h('span', {class: 'what'}, 'mean'), number(g.mean)), h('span', {class: 'fact'}, h('span', {class: 'what'}, 'spread'), number(g.spread)),
      same > 0 ? h('span', {class: 'fact'}, h('span', {class: 'what'}, 'begin alike'), count(same, 'character')) : null),
    h('div', {class: 'text question'}, task),
    referenceNote(fulls[0] ? fulls[0].reference : g.reference),
    h('div', {class: 'siblings'}, g.trajectories.map((t, i) => column(name, step, t, fulls[i], range, same))));
  return {title: `${name}: step ${step}, group ${g.prompt_index}`, element, keys: {'[': before ? () => go(before) : undefined, ']': after ? () => go(after) : undefined, u: () => go(link([name, step]))}};
}
