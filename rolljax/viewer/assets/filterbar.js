// The field of a search, with what may be asked.
import {h, settled} from './dom.js';

const CHIPS = [['all', ''], ['solved', 'success:yes'], ['unsolved', 'success:no'], ['cut', 'status:truncated'], ['failed', 'status:failed'], ['faults', '-fault:none']];
const FIELDS = 'reward>0.5  status:failed  fault:env  success:no  len>200  turns>2  env:name  prompt_index=12  part:score>0  "a text"  -"not this"';

/** A field and chips; `asked`: is told the search whenever it is another. */
export function filterBar(text, asked, extra = null) {
  const input = h('input', {type: 'search', value: text, placeholder: 'reward<1 status:ok "left the room"', 'aria-label': 'search trajectories', spellcheck: 'false', autocapitalize: 'off', data: {search: ''}});
  const wrong = h('span', {class: 'wrong', role: 'status'});
  const chips = h('span', {class: 'chips'});
  const paint = () => chips.replaceChildren(...CHIPS.map(([title, query]) => h('button', {class: 'chip', 'aria-pressed': String(input.value.trim() === query), on: {click: () => set(query)}}, title)));
  const tell = async () => {
    paint();
    wrong.textContent = '';
    try {
      await asked(input.value.trim());
    } catch (error) {
      wrong.textContent = error.message;
    }
  };
  const set = (query) => {
    input.value = query;
    tell();
  };
  input.addEventListener('input', settled(tell));
  paint();
  return h('div', {class: 'filter'}, h('div', {class: 'field'}, input, wrong), chips, extra, h('p', {class: 'fields'}, FIELDS));
}
