// Elements. Every string becomes text, with what is invisible in it marked.
import {plain, shown} from './text.js';

const SVG = 'http://www.w3.org/2000/svg';

function put(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    if (child instanceof Node) element.append(child);
    else element.append(...shown(String(child)));
  }
  return element;
}

/** An element: `props` are attributes, `on` holds listeners, `data` a dataset. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') for (const [kind, listener] of Object.entries(value)) element.addEventListener(kind, listener);
    else if (name === 'data') Object.assign(element.dataset, value);
    else if (name === 'value') element.value = value;
    else if (name === 'href') element.setAttribute('href', safeLink(value));
    else element.setAttribute(name, value === true ? '' : plain(String(value)));
  }
  return put(element, children);
}

/** An element of a drawing. */
export function s(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, String(value));
  return put(element, children);
}

/** Give an element other children. */
export function fill(element, ...children) {
  element.replaceChildren();
  return put(element, children);
}

function safeLink(address) {
  if (!/^(#|\/export\/)/.test(address)) throw new Error(`not a link of this page: ${address}`);
  return address;
}

/** Call with the last arguments when no more have come for a while. */
export function settled(call, wait = 150) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...given), wait);
  };
}
