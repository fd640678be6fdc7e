// Metrics of runs over their steps: those that tell most first, then all of them, by room.
import {rows as rowsOf, runs as allRuns} from './api.js';
import {chart} from './chart.js';
import {fill, h, settled} from './dom.js';
import {go, here, link, remember} from './route.js';
import {ACROSS, bySeeds, meanOf, placed} from './series.js';

const FIRST = ['reward/mean', 'reward/success_frac', 'rollout/len_tok', 'policy/entropy_nat', 'mismatch/k3_nat', 'optim/grad_norm', 'loss/total', 'time/step_s'];
const ROOMS = {
  reward: 'Reward', heldout: 'Held out', rollout: 'Rollouts', faults: 'Faults', starts: 'Where episodes start', groups: 'Groups', loss: 'Loss',
  policy: 'Policy', router: 'Router of experts', mismatch: 'Sampler against trainer', kl: 'KL', credit: 'Credit', critic: 'Critics',
  preference: 'Preferences', distill: 'Distillation', optim: 'Optimizer', stale: 'Staleness', train: 'Batch', time: 'Seconds',
  sampler: 'Sampler', tput: 'Throughput', env: 'Of the environment',
};

/** Colour classes of runs, in their order. */
export function colourOf(index) {
  return `run${index % 6}`;
}

function borders(rows) {
  return rows.filter((row, i) => i > 0 && rows[i - 1].phase !== row.phase || (i === 0 && rows.at(-1).phase !== row.phase))
    .map((row) => ({at: row.at, phase: row.phase}));
}

function line(of, name) {
  // the reward of a supervised phase is that of its gold answers: no result
  const counts = (row) => !name.startsWith('reward/') || row['tput/sample_tok_s'] !== undefined || !of.samples;
  return of.rows.filter((row) => Number.isFinite(row[name]) && counts(row)).map((row) => [row.at, row[name], row.step]);
}

function stars(of) {
  return of.heldout.filter((e) => Number.isFinite(e.mean)).map((e) => ({
    x: placeOf(of.rows, e.step ?? lastStepOf(of.rows, e.phase)), y: e.mean, colour: of.colour,
    text: `held out, ${e.phase === 'start' ? 'at the start' : `after ${e.phase}`}: ${e.mean.toFixed(3)} of ${e.n} tasks`,
  }));
}

function lastStepOf(rows, phase) {
  return rows.filter((row) => row.phase === phase).at(-1)?.step ?? 0;
}

function placeOf(rows, step) {
  return rows.filter((row) => row.step <= step).at(-1)?.at ?? 0;
}

// With `mean` one line for all runs of a recipe, and those of its seeds thin behind it.
function linesOf(runs, name, mean) {
  const each = runs.map((of) => ({run: of.name, recipe: of.recipe, name: of.name, colour: of.colour, points: line(of, name)})).filter((l) => l.points.length);
  if (!mean) return each;
  return bySeeds(each).flatMap((seeds) => {
    const points = seeds.length > 1 ? meanOf(seeds.map((l) => l.points)) : [];
    if (!points.length) return seeds;
    const colour = seeds[0].colour;
    return [...seeds.map((l) => ({...l, colour, faint: true})), {run: `mean of ${seeds.length} seeds`, opens: seeds[0].run, colour, points}];
  });
}

function oneChart(name, runs, table, {mean, ...options}) {
  const lines = linesOf(runs, name, mean);
  if (!lines.length) return null;
  const known = table[name] || table[name.replace(/^domain\/[^/]+\//, 'domain/NAME/')] || {unit: '', meaning: 'a number of the environment'};
  const coloured = mean ? bySeeds(runs).flatMap((seeds) => seeds.map((of) => ({...of, colour: seeds[0].colour}))) : runs;
  const marks = name === 'reward/mean' ? coloured.flatMap(stars) : [];
  const meaning = marks.length ? `${known.meaning}; ◆ held-out tasks` : known.meaning;
  return chart({title: name, ...known, meaning, lines, marks, borders: runs.length === 1 ? borders(runs[0].rows) : [], ...options});
}

function isDull(name, runs) {
  return runs.every((of) => of.rows.every((row) => !row[name]));
}

function sections(runs, table, state) {
  const names = [...new Set(runs.flatMap((of) => of.rows.flatMap((row) => Object.keys(row))))].filter((n) => n.includes('/'));
  const order = Object.keys(table);
  names.sort((a, b) => (order.indexOf(a) + 1 || 999) - (order.indexOf(b) + 1 || 999) || a.localeCompare(b));
  const wanted = names.filter((n) => n.toLowerCase().includes(state.metric.toLowerCase()) || (table[n]?.meaning || '').includes(state.metric));
  const options = {log: state.log, weight: state.smooth, across: ACROSS[state.x], mean: state.mean, onPick: (run, step) => go(link([run, String(step)]))};
  const dull = wanted.filter((n) => isDull(n, runs));
  const lively = wanted.filter((n) => !dull.includes(n));
  const found = [];
  const first = FIRST.filter((n) => lively.includes(n));
  if (!state.metric && first.length) found.push(section('', first.map((n) => oneChart(n, runs, table, {...options, tall: true})), 'charts wide'));
  for (const room of [...new Set(lively.map((n) => n.split('/')[0]))]) {
    const own = lively.filter((n) => n.startsWith(`${room}/`) && (state.metric || !first.includes(n)));
    if (own.length) found.push(section(ROOMS[room] || room, own.map((n) => oneChart(n, runs, table, options)), 'charts'));
  }
  if (dull.length) found.push(h('details', {class: 'dull'}, h('summary', {}, `${dull.length} metrics that are 0 throughout`),
    h('dl', {}, dull.map((n) => [h('dt', {}, n), h('dd', {}, table[n]?.meaning || '')]))));
  return found.length ? found : h('p', {class: 'empty'}, names.length ? 'No metric is called so.' : 'No step is done yet.');
}

function section(title, charts, kind) {
  return h('section', {}, title ? h('h3', {}, title) : null, h('div', {class: kind}, charts));
}

function legendOf(runs, mean) {
  if (runs.length < 2) return null;
  return bySeeds(runs).flatMap((seeds) => (mean && seeds.length > 1
    ? [h('span', {class: `key ${seeds[0].colour}`, title: seeds.map((r) => r.name).join(', ')}, `mean of ${seeds.length} seeds: ${seeds[0].name}…`)]
    : seeds.map((r) => h('a', {class: `key ${r.colour}`, href: link([r.name])}, r.name))));
}

/** The curves of runs by name. Returns the element, and how to bring it up to date. */
export async function curves(names) {
  const query = here().query;
  const state = {metric: query.metric || '', smooth: Math.min(0.98, Math.max(0, Number(query.smooth) || 0)), log: query.log === '1', x: query.x in ACROSS ? query.x : 'step', mean: query.mean === '1'};
  const legend = h('span', {class: 'legend'});
  const mean = h('label', {hidden: true}, h('input', {type: 'checkbox', checked: state.mean, on: {change: (e) => set({mean: e.target.checked})}}), 'mean over seeds');
  const body = h('div', {class: 'curves'});
  const load = async () => {
    const {runs, metrics} = await allRuns(true);
    const loaded = await Promise.all(names.map(async (name, i) => {
      const rows = placed(await rowsOf(name), state.x);
      const samples = rows.some((row) => row['tput/sample_tok_s'] !== undefined);
      const own = runs.find((r) => r.name === name);
      return {name, recipe: own?.recipe, colour: colourOf(i), rows, samples, heldout: own?.heldout || []};
    }));
    mean.hidden = bySeeds(loaded).every((seeds) => seeds.length === 1);
    fill(body, sections(loaded, metrics, state));
    fill(legend, legendOf(loaded, state.mean));
  };
  const again = settled(load, 60);
  const set = (changes) => {
    Object.assign(state, changes);
    remember({metric: state.metric, smooth: state.smooth || '', log: state.log ? 1 : '', x: state.x === 'step' ? '' : state.x, mean: state.mean ? 1 : ''});
    again();
  };
  const controls = h('div', {class: 'controls'},
    h('input', {type: 'search', placeholder: 'metric…', value: state.metric, 'aria-label': 'metrics to show', data: {search: ''}, on: {input: (e) => set({metric: e.target.value})}}),
    h('label', {}, 'smoothing', h('input', {type: 'range', min: 0, max: 0.98, step: 0.02, value: state.smooth, on: {input: (e) => set({smooth: Number(e.target.value)})}})),
    h('label', {}, h('input', {type: 'checkbox', checked: state.log, on: {change: (e) => set({log: e.target.checked})}}), 'log scale'),
    h('label', {}, 'across', h('select', {on: {change: (e) => set({x: e.target.value})}}, Object.entries(ACROSS).map(([key, {title}]) => h('option', {value: key, selected: key === state.x}, title)))),
    mean, legend);
  await load();
  return {element: h('div', {}, controls, body), update: load};
}
