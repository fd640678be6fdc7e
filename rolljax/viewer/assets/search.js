// A search through all steps of a run, the newest first.
import {get, run as runOf} from './api.js';
import {ending, rangeOf, rewardClass} from './badge.js';
import {fill, h} from './dom.js';
import {filterBar} from './filterbar.js';
import {number} from './format.js';
import {head} from './head.js';
import {here, link, remember} from './route.js';

const ENOUGH = 200;

function hit(run, t, range) {
  return h('li', {class: 'hit', data: {item: ''}},
    h('a', {class: 'place', href: link([run, String(t.step), String(t.line)])}, `step ${t.step}`, h('span', {class: 'small'}, `prompt ${t.prompt_index} · ${t.sibling}`)),
    h('span', {class: `pill ${rewardClass(t.status === 'failed' ? null : t.reward, range)}`}, number(t.reward)),
    h('span', {class: 'words'}, h('span', {class: 'text task'}, t.task), h('span', {class: 'text answer'}, t.answer)),
    h('span', {class: 'stats'}, h('span', {}, t.env), h('span', {}, `${t.sampled_tok} tok`), ending(t)));
}

/** The page of a search. */
export async function searchPage(name) {
  const run = await runOf(name);
  const list = h('ol', {class: 'hits'});
  const note = h('p', {class: 'small', role: 'status'});
  let turn = 0;
  const ask = async (q) => {
    const mine = ++turn;
    remember({q});
    let hits = [];
    const go = async (from, most) => {
      let next = from;
      do {
        const answer = await get(['runs', name, 'search'], {q, from: next});
        if (mine !== turn) return;
        hits = hits.concat(answer.hits);
        next = answer.next === null || answer.next < 1 ? null : answer.next;
        const range = rangeOf(hits);
        fill(list, hits.map((t) => hit(name, t, range)));
        fill(note, `${hits.length} found${next ? `, down to step ${next + 1}` : ' in all steps'}`);
      } while (next && hits.length < most);
      if (next) note.append(h('button', {on: {click: () => go(next, hits.length + ENOUGH)}}, 'go on'));
    };
    await go(undefined, ENOUGH);
  };
  const element = h('div', {}, head(run, 'search'), filterBar(here().query.q || '', ask), note, list);
  ask(here().query.q || '').catch((error) => fill(note, error.message));
  return {title: `${name}: search`, element};
}
