// The page: which part the address asks for, the bar above it, and news of runs that go on.
import {frozen, run as runOf, runs as allRuns, watch} from './api.js';
import {configPage} from './config.js';
import {curves} from './curves.js';
import {fill, h} from './dom.js';
import {groupPage} from './group.js';
import {head} from './head.js';
import {heldoutPage} from './heldout.js';
import {listen, setActions, toggleHelp} from './keys.js';
import {go, here, link} from './route.js';
import {runsPage} from './runs.js';
import {searchPage} from './search.js';
import {stepPage} from './step.js';
import {stepsPage} from './steps.js';
import {nextTheme, startTheme} from './theme.js';
import {trajectoryPage} from './trajectory.js';

const PAGES = {steps: stepsPage, heldout: heldoutPage, config: configPage, search: searchPage};
let page = null;
let visit = 0;

async function curvesPage(name) {
  const top = h('div', {}, head(await runOf(name), ''));
  const below = await curves([name]);
  const update = async () => {
    await below.update();
    fill(top, head(await runOf(name), ''));
  };
  return {title: name, element: h('div', {}, top, below.element), update};
}

async function make(parts) {
  const [name, second, third, fourth] = parts;
  if (!name) {
    const {runs} = await allRuns(true);
    return runs.length === 1 ? curvesPage(runs[0].name) : runsPage();
  }
  if (!second) return curvesPage(name);
  if (second in PAGES) return PAGES[second](name);
  if (third === 'g') return groupPage(name, second, fourth);
  return third ? trajectoryPage(name, second, third) : stepPage(name, second);
}

function crumbs(parts) {
  const [name, second, third, fourth] = parts;
  const found = frozen ? [] : [h('a', {class: 'home', href: '#/', title: 'all runs'}, 'rolljax')];
  const add = (title, to) => found.push(h('span', {class: 'sep'}, '/'), h(to ? 'a' : 'span', to ? {href: to} : {}, title));
  if (name) add(name, frozen ? null : link([name]));
  if (second && second.startsWith('heldout:')) add('held-out', frozen ? null : link([name, 'heldout']));
  else if (second && !(second in PAGES)) add(`step ${second}`, link([name, second]));
  if (third === 'g') add(`group ${fourth.split('-').pop()}`);
  else if (third) add(`#${third}`);
  return found;
}

function bar(parts) {
  const search = frozen || !parts[0] ? null : h('a', {class: 'icon', href: link([parts[0], 'search']), title: 'search this run', 'aria-label': 'search this run'}, '⌕');
  fill(document.getElementById('bar'), h('nav', {class: 'crumbs', 'aria-label': 'where this is'}, crumbs(parts)),
    h('span', {class: 'tools'}, search, h('button', {class: 'icon', title: 'theme', 'aria-label': 'theme', on: {click: nextTheme}}, '◐'),
      h('button', {class: 'icon', title: 'keys', 'aria-label': 'keys', on: {click: toggleHelp}}, '?')));
}

async function show() {
  const mine = ++visit;
  const {parts} = here();
  const root = document.getElementById('page');
  bar(parts);
  root.setAttribute('aria-busy', 'true');
  let made;
  try {
    made = await make(parts);
  } catch (error) {
    made = {title: 'rolljax view', element: h('p', {class: 'empty'}, error.message)};
  }
  if (mine !== visit) return;
  page = made;
  setActions(made.keys || {});
  document.title = made.title;
  fill(root, made.element);
  root.removeAttribute('aria-busy');
  root.dataset.shown = location.hash;
  window.scrollTo(0, 0);
  if (made.shown) made.shown();
}

function focusSearch() {
  const field = document.querySelector('[data-search]');
  if (field) field.focus();
  else if (here().parts[0] && !frozen) go(link([here().parts[0], 'search']));
}

function up() {
  const {parts} = here();
  if (!frozen && parts.length) go(link(parts.slice(0, -1)));
}

let following = false;
async function follow() {
  if (following || !page || !page.update) return;
  following = true;
  try {
    await allRuns(true);
    await page.update();
  } catch {
    // the server is gone, or will tell again
  } finally {
    following = false;
  }
}

startTheme();
listen({'/': focusSearch, t: nextTheme, u: up});
window.addEventListener('hashchange', show);
if (frozen && !location.hash) history.replaceState(null, '', link(frozen.start.slice(2).split('/').map(decodeURIComponent)));
watch(follow);
show();
