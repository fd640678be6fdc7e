// All runs in a table, and the curves of those that are picked over each other.
import {runs as allRuns} from './api.js';
import {colourOf, curves} from './curves.js';
import {fill, h} from './dom.js';
import {ago, number, seconds} from './format.js';
import {here, link, remember} from './route.js';

/** Where a run stands, in a few words. */
export function standing(run) {
  const of = run.steps_planned ? ` of ${run.steps_planned}` : '';
  if (run.stop_reason) return h('span', {class: 'standing done'}, run.stop_reason);
  const fresh = Date.now() / 1000 - run.updated < 180;
  return h('span', {class: `standing ${fresh ? 'live' : 'open'}`}, `step ${run.step}${of}, ${run.updated ? ago(run.updated) : 'not begun'}`);
}

/** Held-out rewards from the first evaluation to the last. */
export function heldout(run) {
  const means = run.heldout.map((e) => number(e.mean));
  return means.length ? means.join(' → ') : '–';
}

function row(run, i, picked, toggle) {
  const box = h('input', {type: 'checkbox', checked: picked.includes(run.name), 'aria-label': `show the curves of ${run.name}`, on: {change: () => toggle(run.name)}});
  const place = picked.indexOf(run.name);
  return h('tr', {data: {item: ''}},
    h('td', {}, box),
    h('td', {}, h('span', {class: `swatch ${place >= 0 ? colourOf(place) : ''}`}), h('a', {href: link([run.name])}, run.name), run.damaged.length ? h('span', {class: 'sign bad', title: run.damaged.join('; ')}, 'damaged') : null),
    h('td', {}, standing(run)),
    h('td', {class: 'n'}, heldout(run)),
    h('td', {class: 'n'}, String(run.step)),
    h('td', {class: 'n'}, seconds(run.wall_s)));
}

/** The page of all runs. */
export async function runsPage() {
  const found = (await allRuns(true)).runs;
  const chosen = (here().query.runs || '').split(',').filter((name) => found.some((r) => r.name === name));
  let picked = chosen.length ? chosen : found.slice(0, 4).map((r) => r.name);
  const table = h('table', {class: 'list runs'});
  const between = h('div', {class: 'between'});
  const below = h('div');
  let shown = {update: () => {}};
  const list = async () => {
    const runs = (await allRuns(true)).runs;
    fill(table, h('thead', {}, h('tr', {}, ['', 'run', 'stands at', 'held-out reward', 'steps', 'time'].map((t) => h('th', {}, t)))),
      h('tbody', {}, runs.map((run, i) => row(run, i, picked, toggle))));
  };
  const draw = async () => {
    shown = await curves(picked);
    fill(below, picked.length ? shown.element : null);
    fill(between, picked.length > 1 ? h('a', {class: 'button', href: link([picked[0], 'config'], {with: picked[1]})}, `settings of ${picked[0]} beside those of ${picked[1]}`) : null);
  };
  async function toggle(name) {
    picked = picked.includes(name) ? picked.filter((n) => n !== name) : [...picked, name];
    remember({runs: picked.join(',')});
    await Promise.all([list(), draw()]);
  }
  await Promise.all([list(), draw()]);
  return {
    title: 'runs', element: h('div', {class: 'runs-page'}, h('div', {class: 'scroll'}, table), between, below),
    update: async () => { await Promise.all([list(), shown.update()]); },
  };
}
