// Answers to held-out tasks, before training and behind every phase.
import {get, run as runOf} from './api.js';
import {damageNote, ending, rangeOf, rewardClass} from './badge.js';
import {fill, h} from './dom.js';
import {count, number} from './format.js';
import {head} from './head.js';
import {here, link, remember} from './route.js';

const AT_ONCE = 100;
const KINDS = {
  all: () => true,
  better: ([first, last]) => last > first,
  worse: ([first, last]) => last < first,
  same: ([first, last]) => last === first,
};

function cell(run, evaluation, t, range) {
  if (!t) return h('td', {}, '–');
  return h('td', {}, h('a', {class: 'text answer', href: link([run, `heldout:${evaluation}`, String(t.line)])}, t.answer || '(nothing)'),
    h('span', {class: 'stats'}, h('span', {class: `pill ${rewardClass(t.status === 'failed' ? null : t.reward, range)}`}, number(t.reward)), ending(t)));
}

/** The page of a run's held-out answers. */
export async function heldoutPage(name) {
  const [run, found] = [await runOf(name), await get(['runs', name, 'heldout'])];
  const names = found.evaluations;
  const ends = (task) => [task.answers[names[0]], task.answers[names.at(-1)]].map((t) => (t ? t.reward : NaN));
  const range = rangeOf(found.tasks.flatMap((task) => Object.values(task.answers)));
  const body = h('div');
  const known = found.tasks.some((task) => task.reference !== null);
  let kind = here().query.kind in KINDS ? here().query.kind : 'all';
  let most = AT_ONCE;
  const draw = () => {
    const tasks = found.tasks.filter((task) => KINDS[kind](ends(task)));
    const chips = Object.keys(KINDS).map((k) => h('button', {class: 'chip', 'aria-pressed': String(k === kind), on: {click: () => { kind = k; remember({kind}); draw(); }}}, `${k} ${found.tasks.filter((task) => KINDS[k](ends(task))).length}`));
    const rows = tasks.slice(0, most).map((task) => h('tr', {data: {item: ''}}, h('td', {class: 'text task'}, task.task), known ? h('td', {class: 'text answer'}, task.reference ?? '–') : null, names.map((n) => cell(name, n, task.answers[n], range))));
    const mean = (n) => run.heldout.find((e) => e.phase === n)?.mean;
    const titles = names.map((n) => h('th', {}, n === 'start' ? 'at the start' : `after ${n}`, h('span', {class: 'mean'}, number(mean(n)))));
    fill(body, names.length > 1 ? h('div', {class: 'chips'}, chips) : null,
      h('div', {class: 'scroll'}, h('table', {class: 'list heldout'}, h('thead', {}, h('tr', {}, h('th', {}, count(tasks.length, 'task')), known ? h('th', {}, 'reference answer') : null, titles)), h('tbody', {}, rows))),
      tasks.length > most ? h('button', {on: {click: () => { most += AT_ONCE; draw(); }}}, 'show more') : null);
  };
  if (names.length) draw();
  else fill(body, h('p', {class: 'empty'}, 'No answers to held-out tasks are on record.'));
  return {title: `${name}: held-out`, element: h('div', {}, head(run, 'heldout'), Object.entries(found.damaged).map(([where, of]) => damageNote(of, `heldout_${where}.jsonl`)), body)};
}
