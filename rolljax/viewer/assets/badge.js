// Small signs that stand on several pages: rewards, how an episode ended, whose fault it was.
import {h} from './dom.js';
import {count, number} from './format.js';

const KINDS = ['infra', 'env', 'agent', 'limit'];

/** Place of a reward between the lowest and the highest, as one of seven colours. */
export function rewardClass(reward, range) {
  if (reward === null || !Number.isFinite(reward)) return 'r-none';
  const [low, high] = range;
  return `r${high > low ? Math.round(((reward - low) / (high - low)) * 6) : 3}`;
}

/** Lowest and highest reward of trajectories. */
export function rangeOf(trajectories) {
  const rewards = trajectories.filter((t) => t.status !== 'failed').map((t) => t.reward).filter(Number.isFinite);
  return rewards.length ? [Math.min(...rewards), Math.max(...rewards)] : [0, 0];
}

/** How it ended: solved, cut, failed and by whom. */
export function ending(t) {
  const signs = [];
  if (t.success) signs.push(h('span', {class: 'sign good', title: 'solved its task'}, 'solved'));
  if (t.status === 'truncated') signs.push(h('span', {class: 'sign warn', title: 'cut by a limit; it takes part in training'}, 'cut'));
  if (t.status === 'failed') signs.push(h('span', {class: 'sign bad', title: 'failed; it takes no part in training'}, 'failed'));
  if (t.fault) signs.push(h('span', {class: `sign fault-${KINDS.includes(t.fault.kind) ? t.fault.kind : 'env'}`, title: faultText(t.fault)}, t.fault.kind));
  if (t.replayed) signs.push(h('span', {class: 'sign', title: 'recorded: nothing was sampled'}, 'gold'));
  return signs.length ? h('span', {class: 'signs'}, signs) : null;
}

/** Whose fault it was, and what happened. */
export function faultNote(fault) {
  return h('p', {class: `fault of-${KINDS.includes(fault.kind) ? fault.kind : 'env'}`}, faultText(fault));
}

/** The same as a text. */
export function faultText(fault) {
  const owner = {infra: 'machine, worker, server or sampler', env: 'the environment itself', agent: 'what the policy did', limit: 'a limit of tokens, turns or time'}[fault.kind] || fault.kind;
  return `${owner}${fault.stage ? `, at ${fault.stage}` : ''}: ${fault.detail}`;
}

/** The answer that is recorded for a task; null if there is none. */
export function referenceNote(text) {
  return text === null || text === undefined ? null : h('div', {class: 'reference'}, h('span', {class: 'what'}, 'reference answer'), h('div', {class: 'text said'}, text));
}

/** What is said of lines that cannot be read: `{n, line, why}`; null if all can. */
export function damageNote(of, where) {
  return of ? h('p', {class: 'fault'}, `${where}: ${count(of.n, 'line')} cannot be read. Line ${of.line}: ${of.why}.`) : null;
}

/** A reward with its named parts. */
export function rewardParts(parts) {
  const entries = Object.entries(parts);
  return entries.length ? h('span', {class: 'parts'}, entries.map(([name, value]) => h('span', {class: 'part'}, h('span', {class: 'what'}, name), number(value)))) : null;
}
