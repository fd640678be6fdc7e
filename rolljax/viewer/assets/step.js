// A step: its groups, those whose rewards differ most first.
import {frozen, get, rows as rowsOf, run as runOf} from './api.js';
import {damageNote, ending, rangeOf, rewardClass} from './badge.js';
import {fill, h} from './dom.js';
import {filterBar} from './filterbar.js';
import {count, number} from './format.js';
import {open} from './keys.js';
import {go, here, link, remember} from './route.js';

function sibling(run, step, t, range) {
  const flags = [t.success ? 'solved' : '', t.status !== 'ok' ? t.status : '', t.fault ? `${t.fault.kind} fault` : ''].filter(Boolean).join(', ');
  const kind = t.status === 'failed' ? 'is-failed' : t.status === 'truncated' ? 'is-cut' : t.success ? 'is-solved' : '';
  return h('a', {class: `tile ${rewardClass(t.status === 'failed' ? null : t.reward, range)} ${kind}`, href: link([run, step, String(t.line)]), title: `sibling ${t.sibling}: reward ${number(t.reward)}, ${t.sampled_tok} tokens${flags ? `, ${flags}` : ''}`},
    t.status === 'failed' ? '✕' : number(t.reward));
}

function group(run, step, g, range) {
  const address = link([run, step, 'g', `${g.stream}-${g.prompt_index}`]);
  const single = g.trajectories.length === 1 ? g.trajectories[0] : null;
  return h('li', {class: 'group', data: {item: ''}},
    h('a', {class: 'text task', href: single ? link([run, step, String(single.line)]) : address}, g.task.trim() || `${g.env} ${g.prompt_index}`),
    single ? h('span', {class: 'text answer'}, single.answer) : null,
    h('span', {class: 'tiles'}, g.trajectories.map((t) => sibling(run, step, t, range))),
    h('span', {class: 'stats'}, h('span', {}, g.env), h('span', {}, `prompt ${g.prompt_index}`), g.reference === null ? null : h('span', {class: 'text reference-short', title: 'reference answer'}, `reference ${g.reference}`),
      single ? ending(single) : [h('span', {title: 'mean reward of the group'}, `mean ${number(g.mean)}`), h('span', {title: 'standard deviation of its rewards'}, `spread ${number(g.spread)}`)]));
}

function histogram(trajectories, range) {
  const alive = trajectories.filter((t) => t.status !== 'failed' && Number.isFinite(t.reward));
  const [low, high] = range;
  if (!(high > low) || alive.length < 2) return null;
  const bins = Array(14).fill(0);
  for (const t of alive) bins[Math.min(13, Math.floor(((t.reward - low) / (high - low)) * 14))] += 1;
  const most = Math.max(...bins);
  const columns = bins.map((n, i) => {
    const column = h('span', {class: `column ${rewardClass(low + ((high - low) * (i + 0.5)) / 14, range)}`, title: count(n, 'trajectory', 'trajectories')});
    column.style.height = `${n ? Math.max(6, (n / most) * 100) : 0}%`;
    return column;
  });
  return h('div', {class: 'histogram', role: 'img', 'aria-label': `rewards from ${number(low)} to ${number(high)}`},
    h('div', {class: 'columns'}, columns), h('div', {class: 'ends'}, h('span', {}, number(low)), h('span', {}, 'reward'), h('span', {}, number(high))));
}

function facts(row, whole) {
  if (!row) return null;
  const found = [['reward', row['reward/mean']], ['solved', row['reward/success_frac']], ['tokens', row['rollout/len_tok']], ['entropy', row['policy/entropy_nat']], ['mismatch k3', row['mismatch/k3_nat']]];
  return [h('span', {class: 'fact'}, h('span', {class: 'what'}, 'phase'), row.phase),
    found.filter(([, v]) => Number.isFinite(v)).map(([what, v]) => h('span', {class: 'fact'}, h('span', {class: 'what'}, what), number(v))),
    h('span', {class: 'fact'}, h('span', {class: 'what'}, 'holds'), `${count(whole.total, 'trajectory', 'trajectories')}`)];
}

/** The page of a step. */
export async function stepPage(name, step) {
  const query = here().query.q || '';
  const run = await runOf(name);
  const whole = await get(['runs', name, 'steps', step]);
  const row = frozen ? null : (await rowsOf(name)).find((r) => r.step === Number(step));
  const range = rangeOf(whole.groups.flatMap((g) => g.trajectories));
  const list = h('ol', {class: 'groups'});
  const found = h('span', {class: 'found', role: 'status'});
  const show = async (q) => {
    const answer = q ? await get(['runs', name, 'steps', step], {q}) : whole;
    fill(found, q ? `${count(answer.found, 'trajectory', 'trajectories')} of ${answer.total}` : '');
    fill(list, answer.groups.length ? answer.groups.map((g) => group(name, step, g, range)) : h('li', {class: 'empty'}, 'None is like this.'));
    if (!frozen) remember({q});
  };
  await show(frozen ? '' : query).catch(() => show(''));
  const steps = run.rollout_steps;
  const at = steps.indexOf(Number(step));
  const address = (i) => (steps[i] === undefined ? null : link([name, String(steps[i])], here().query.q ? {q: here().query.q} : {}));
  const [before, after] = [address(at - 1), address(at + 1)];
  const move = (to, text, label) => (to ? h('a', {class: 'button', href: to, 'aria-label': label}, text) : h('span', {class: 'button off'}, text));
  const element = h('div', {class: 'step-page'},
    h('div', {class: 'facts'}, h('h1', {}, `Step ${step}`), steps.length ? [move(before, '‹', 'step before'), move(after, '›', 'next step')] : null, facts(row, whole),
      frozen ? null : h('a', {class: 'button', href: `/export/${encodeURIComponent(name)}/${step}`, title: 'one page of this step, to send to somebody'}, 'export')),
    damageNote(whole.damaged, `step_${step}.jsonl`),
    histogram(whole.groups.flatMap((g) => g.trajectories), range),
    frozen ? null : filterBar(query, show, found), list);
  return {title: `${name}: step ${step}`, element, keys: {'[': before ? () => go(before) : undefined, ']': after ? () => go(after) : undefined, u: open(frozen ? '' : link([name, 'steps']))}};
}
