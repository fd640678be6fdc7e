// The steps of a run, newest first.
import {rows as rowsOf, run as runOf, runs} from './api.js';
import {fill, h} from './dom.js';
import {number, seconds} from './format.js';
import {head} from './head.js';
import {link} from './route.js';

const AT_ONCE = 300;
const COLUMNS = [
  ['reward/mean', 'reward'], ['reward/std', 'spread'], ['reward/success_frac', 'solved'], ['rollout/len_tok', 'tokens'],
  ['rollout/turns_n', 'turns'], ['rollout/trunc_frac', 'cut'], ['rollout/fail_frac', 'failed'], ['stale/mean_ver', 'stale'],
];

function bar(row, low, high) {
  const width = high > low ? (row['reward/mean'] - low) / (high - low) : 0;
  const inner = h('span', {class: 'fillbar'});
  inner.style.width = `${Math.round(Math.max(0, Math.min(1, width)) * 100)}%`;
  return h('span', {class: 'bar'}, inner);
}

function line(run, row, recorded, low, high) {
  const step = String(row.step);
  return h('tr', {data: {item: ''}},
    h('td', {class: 'n'}, recorded.has(row.step) ? h('a', {href: link([run, step])}, step) : step),
    h('td', {}, row.phase),
    h('td', {}, bar(row, low, high)),
    COLUMNS.map(([name]) => h('td', {class: 'n'}, name in row ? number(row[name]) : '')),
    h('td', {class: 'n'}, seconds(row['time/step_s'])));
}

/** The page of a run's steps. */
export async function stepsPage(name) {
  const body = h('div', {class: 'scroll'});
  let most = AT_ONCE;
  const top = h('div');
  const load = async () => {
    const [run, rows] = [await runOf(name), await rowsOf(name)];
    const recorded = new Set(run.rollout_steps);
    const rewards = rows.map((r) => r['reward/mean']).filter(Number.isFinite);
    const [low, high] = [Math.min(0, ...rewards), Math.max(...rewards)];
    const newest = rows.slice(-most).reverse();
    const titles = ['step', 'phase', '', ...COLUMNS.map((c) => c[1]), 'time'];
    const more = rows.length > most ? h('button', {on: {click: () => { most += AT_ONCE; load(); }}}, `show ${Math.min(AT_ONCE, rows.length - most)} more`) : null;
    fill(top, head(run, 'steps'));
    fill(body, rows.length ? h('table', {class: 'list steps'}, h('thead', {}, h('tr', {}, titles.map((t) => h('th', {}, t)))),
      h('tbody', {}, newest.map((row) => line(name, row, recorded, low, high)))) : h('p', {class: 'empty'}, 'No step is done yet.'), more);
  };
  await load();
  return {title: `${name}: steps`, element: h('div', {}, top, body), update: async () => { await runs(true); await load(); }};
}
