// Where the page is: `#/RUN/12/7?colour=advantage`. All that a person chose stands in the address, so that it can be sent.

/** The parts of the address, and what stands behind its question mark. */
export function here() {
  const [path, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
  const parts = path.split('/').filter(Boolean).map((part) => decodeURIComponent(part));
  return {parts, query: Object.fromEntries(new URLSearchParams(query))};
}

/** An address of this page. */
export function link(parts, query = {}) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, v]) => v !== undefined && v !== null && v !== ''));
  const path = parts.map((part) => encodeURIComponent(part).replaceAll('%3A', ':')).join('/');
  return `#/${path}${asked.size ? `?${asked}` : ''}`;
}

/** Go somewhere. */
export function go(address) {
  location.hash = address;
}

/** Change what stands behind the question mark, without leaving the page. */
export function remember(changes) {
  const {parts, query} = here();
  history.replaceState(null, '', link(parts, {...query, ...changes}));
}
