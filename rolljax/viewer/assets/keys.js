// The keyboard: what a list of items and a page offer to it.
import {fill, h} from './dom.js';
import {go} from './route.js';

const HELP = [
  ['j  k', 'next, previous item of the list'],
  ['Enter', 'open the item'],
  ['u', 'up: trajectory, group, step, run'],
  ['[  ]', 'previous, next of its kind: step, trajectory'],
  ['h  l', 'previous, next sibling'],
  ['c', 'colour tokens by something else'],
  ['e', 'unfold everything, or fold it again'],
  ['/', 'search or filter'],
  ['t', 'theme: as the system, light, dark'],
  ['?', 'this help'],
  ['Esc', 'close, or leave the field'],
];

let current = -1;
let actions = {};

/** What keys do on this page, by key; the position in its list starts anew. */
export function setActions(wanted) {
  actions = wanted;
  current = -1;
}

/** An action that opens an address, if there is one. */
export function open(address) {
  return address ? () => go(address) : undefined;
}

function items() {
  return [...document.querySelectorAll('[data-item]')].filter((item) => item.getClientRects().length);
}

function move(by) {
  const list = items();
  if (!list.length) return;
  list.forEach((item) => item.classList.remove('is-current'));
  current = Math.min(Math.max(current + by, 0), list.length - 1);
  list[current].classList.add('is-current');
  list[current].scrollIntoView({block: 'nearest'});
}

function openItem() {
  const item = items()[current];
  const target = item && (item.matches('a') ? item : item.querySelector('a[href], summary'));
  if (target) target.click();
}

/** Show or hide the list of keys. */
export function toggleHelp() {
  const overlay = document.getElementById('overlay');
  if (overlay.firstChild) {
    overlay.replaceChildren();
    return;
  }
  const close = () => overlay.replaceChildren();
  const rows = HELP.map(([key, meaning]) => h('tr', {}, h('td', {}, key.split('  ').map((k) => h('kbd', {}, k))), h('td', {}, meaning)));
  fill(overlay, h('div', {class: 'veil', on: {click: close}}), h('section', {class: 'help', role: 'dialog', 'aria-label': 'Keys'},
    h('h2', {}, 'Keys'), h('table', {}, rows), h('button', {on: {click: close}}, 'Close')));
}

function isTyping(event) {
  return event.target.matches('input, select, textarea');
}

/** Listen. `always`: what keys do on every page. */
export function listen(always) {
  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === 'Escape') {
      document.getElementById('overlay').replaceChildren();
      if (isTyping(event)) event.target.blur();
      return;
    }
    if (isTyping(event)) return;
    const basic = {j: () => move(1), k: () => move(-1), Enter: event.target.matches('a, button, summary') ? undefined : openItem, '?': toggleHelp};
    const action = actions[event.key] || basic[event.key] || always[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
