// The head of a run's pages: what it is, where it stands, and its tabs.
import {frozen} from './api.js';
import {h} from './dom.js';
import {seconds} from './format.js';
import {link} from './route.js';
import {heldout, standing} from './runs.js';

const TABS = [['', 'Curves'], ['steps', 'Steps'], ['heldout', 'Held-out'], ['search', 'Search'], ['config', 'Config']];

/** Name, standing and tabs of a run; `tab`: the one that is open. */
export function head(run, tab) {
  const tabs = frozen ? null : h('nav', {class: 'tabs', 'aria-label': 'parts of the run'}, TABS.map(([name, title]) =>
    h('a', {href: link(name ? [run.name, name] : [run.name]), 'aria-current': name === tab ? 'page' : null}, title)));
  return h('div', {class: 'head'},
    h('div', {class: 'facts'}, h('h1', {}, run.name), standing(run),
      run.heldout.length ? h('span', {class: 'fact'}, h('span', {class: 'what'}, 'held-out reward'), heldout(run)) : null,
      h('span', {class: 'fact'}, h('span', {class: 'what'}, 'time'), seconds(run.wall_s)),
      run.restarts.length ? h('span', {class: 'fact', title: run.restarts.join('; ')}, h('span', {class: 'what'}, 'restarts'), String(run.restarts.length)) : null),
    run.damaged.length ? h('p', {class: 'fault'}, `damaged, and left out here: ${run.damaged.join('; ')}`) : null,
    tabs);
}
