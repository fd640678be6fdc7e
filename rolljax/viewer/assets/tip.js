// The card beside a token: on hover, on focus, or for good after a click.
import {fill, h} from './dom.js';
import {remember} from './route.js';
import {details} from './tokens.js';

/** Show cards for the tokens under `root`; returns a function that pins one. */
export function tips(root, tokens) {
  const card = h('div', {class: 'tip', role: 'status', hidden: true});
  root.append(card);
  let pinned = null;
  const show = (node) => {
    const turn = Number(node.closest('[data-turn]').dataset.turn);
    fill(card, details(tokens.turns[turn], Number(node.dataset.i)));
    card.hidden = false;
    const box = node.getClientRects()[0] || node.getBoundingClientRect();
    const own = card.getBoundingClientRect();
    const left = Math.max(8, Math.min(box.left, window.innerWidth - own.width - 8));
    const below = box.bottom + 8 + own.height < window.innerHeight;
    card.style.left = `${left}px`;
    card.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - own.height - 6)}px`;
  };
  const hide = () => { if (!pinned) card.hidden = true; };
  const pin = (node) => {
    if (pinned) pinned.classList.remove('pinned');
    pinned = node === pinned ? null : node;
    if (pinned) {
      pinned.classList.add('pinned');
      show(pinned);
      remember({token: `${pinned.closest('[data-turn]').dataset.turn}.${pinned.dataset.i}`});
    } else {
      remember({token: ''});
      hide();
    }
  };
  root.addEventListener('pointerover', (event) => {
    const node = event.target.closest('.tok');
    if (node && !pinned) show(node);
    else if (!node) hide();
  });
  root.addEventListener('pointerleave', hide);
  root.addEventListener('click', (event) => {
    const node = event.target.closest('.tok');
    if (node) pin(node);
  });
  window.addEventListener('scroll', () => { if (pinned && !card.hidden && pinned.isConnected) show(pinned); else if (!pinned) card.hidden = true; }, {passive: true});
  return pin;
}
