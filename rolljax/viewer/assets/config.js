// Every setting of a run, and what is different in another.
import {get, run as runOf, runs as allRuns} from './api.js';
import {fill, h, settled} from './dom.js';
import {head} from './head.js';
import {here, remember} from './route.js';

function spell(value) {
  return value === undefined ? 'not there' : typeof value === 'string' ? value : JSON.stringify(value);
}

function lines(own, other, wanted, onlyDifferent) {
  const keys = [...new Set([...Object.keys(own), ...(other ? Object.keys(other) : [])])];
  return keys.map((key) => ({key, a: own[key], b: other?.[key], differs: other && JSON.stringify(own[key]) !== JSON.stringify(other[key])}))
    .filter((l) => (!onlyDifferent || l.differs) && `${l.key} ${spell(l.a)}`.toLowerCase().includes(wanted.toLowerCase()));
}

function machine(of) {
  if (!of.command) return null;
  const packages = Object.entries(of.packages || {}).map(([k, v]) => `${k} ${v}`).join(', ');
  return h('details', {class: 'machine'}, h('summary', {}, `${of.devices} ${of.platform} ${of.devices === 1 ? 'device' : 'devices'}, Python ${of.python}`),
    h('pre', {class: 'text'}, of.command.join(' ')), h('p', {class: 'small'}, packages));
}

/** The page of a run's settings. */
export async function configPage(name) {
  const run = await runOf(name);
  const others = (await allRuns()).runs.map((r) => r.name).filter((n) => n !== name);
  const own = await get(['runs', name, 'config']);
  const body = h('div', {class: 'scroll'});
  const state = {q: here().query.q || '', with: others.includes(here().query.with) ? here().query.with : '', all: here().query.all === '1'};
  const draw = async () => {
    const other = state.with ? await get(['runs', state.with, 'config']) : null;
    const found = lines(own, other, state.q, Boolean(other) && !state.all);
    const titles = ['setting', name, ...(other ? [state.with] : [])];
    fill(body, found.length ? h('table', {class: `list config ${state.all ? 'mixed' : ''}`}, h('thead', {}, h('tr', {}, titles.map((t) => h('th', {}, t)))),
      h('tbody', {}, found.map((l) => h('tr', {class: l.differs ? 'differs' : null, data: {item: ''}}, h('td', {}, l.key), h('td', {class: 'text'}, spell(l.a)), other ? h('td', {class: 'text'}, spell(l.b)) : null))))
      : h('p', {class: 'empty'}, other && !state.q ? 'All settings are the same.' : 'No setting is like this.'));
  };
  const set = (changes) => {
    Object.assign(state, changes);
    remember({q: state.q, with: state.with, all: state.all ? 1 : ''});
    draw();
  };
  const controls = h('div', {class: 'controls'},
    h('input', {type: 'search', placeholder: 'setting…', 'aria-label': 'settings to show', value: state.q, data: {search: ''}, on: {input: settled((e) => set({q: e.target.value}))}}),
    others.length ? h('label', {}, 'beside', h('select', {on: {change: (e) => set({with: e.target.value})}}, h('option', {value: ''}, 'no other run'), others.map((o) => h('option', {value: o, selected: o === state.with}, o)))) : null,
    others.length ? h('label', {}, h('input', {type: 'checkbox', checked: state.all, on: {change: (e) => set({all: e.target.checked})}}), 'also what is the same') : null);
  await draw();
  return {title: `${name}: settings`, element: h('div', {}, head(run, 'config'), machine(run.environment || {}), controls, body)};
}
