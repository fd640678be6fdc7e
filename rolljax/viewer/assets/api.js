// What the server knows; or, in a page that was exported, what stands in the page.

const block = document.getElementById('frozen');

/** What an exported page holds: where it begins, and answers by address. Null: there is a server. */
export const frozen = block ? JSON.parse(block.textContent) : null;

/** An answer, by the parts of its address behind /api/. */
export async function get(parts, query = {}) {
  const path = ['api', ...parts];
  if (frozen) {
    const answer = frozen.answers[path.join('/')];
    if (answer === undefined) throw new Error('This is not in the exported page.');
    return answer;
  }
  const asked = new URLSearchParams(Object.entries(query).filter(([, v]) => v !== undefined && v !== '')).toString();
  const response = await fetch(`/${path.map(encodeURIComponent).join('/')}${asked ? `?${asked}` : ''}`);
  if (response.ok) return response.json();
  const isJson = (response.headers.get('content-type') || '').includes('json');
  throw new Error(isJson ? (await response.json()).error : await response.text());
}

/** Call with the names of runs that have something new, as they have it. */
export function watch(call) {
  if (frozen) return;
  const events = new EventSource('/api/events');
  let lost = false;
  events.addEventListener('message', (event) => call(JSON.parse(event.data)));
  events.addEventListener('error', () => { lost = true; });
  events.addEventListener('open', () => {
    if (lost) call(null);
    lost = false;
  });
}

const known = new Map();

/** All rows of a run's metrics; what was read before is not read again. */
export async function rows(run) {
  const kept = known.get(run) || {rows: [], generation: ''};
  const answer = await get(['runs', run, 'rows'], {after: kept.rows.length, generation: kept.generation});
  const now = {generation: answer.generation, rows: answer.all ? answer.rows : kept.rows.concat(answer.rows)};
  known.set(run, now);
  return now.rows;
}

let overview = null;

/** The runs, and the table of metrics. `fresh`: as they are now. */
export async function runs(fresh = false) {
  if (!overview || fresh) overview = await get(['runs']);
  return overview;
}

/** The overview of one run. */
export async function run(name) {
  let found = (await runs()).runs.find((r) => r.name === name);
  found = found || (await runs(true)).runs.find((r) => r.name === name);
  if (!found) throw new Error(`There is no run called “${name}”.`);
  return found;
}
