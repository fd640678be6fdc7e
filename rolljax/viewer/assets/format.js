// Numbers and seconds as people read them.

/** A number in four digits at most; what is not finite is a dash. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace('e+', 'e').replace('-', '−');
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  const text = size >= 1e4 ? `${(value / 1e3).toFixed(size >= 1e5 ? 0 : 1)}k` : value.toFixed(size < 0.01 ? 5 : digits);
  return trim(text).replace('-', '−');
}

function trim(text) {
  const [figure, unit] = text.endsWith('k') ? [text.slice(0, -1), 'k'] : [text, ''];
  return (figure.includes('.') ? figure.replace(/\.?0+$/, '') : figure) + unit;
}

/** A large number by thousands, millions or billions. */
export function large(value) {
  const [size, unit] = [[1e9, 'B'], [1e6, 'M'], [1e3, 'k']].find(([least]) => value >= least) || [1, ''];
  return `${number(value / size)}${unit}`;
}

/** A count of something. */
export function count(value, one, many = `${one}s`) {
  return `${value.toLocaleString('en')} ${value === 1 ? one : many}`;
}

/** Seconds as the two largest units. */
export function seconds(value) {
  if (value === null || value === undefined) return '–';
  if (value > 0 && value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${number(value)} s`;
  const minutes = Math.round(value / 60);
  const rest = Math.round(value) % 60;
  if (minutes < 60) return `${Math.floor(Math.round(value) / 60)} min${rest ? ` ${rest} s` : ''}`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h${minutes % 60 ? ` ${minutes % 60} min` : ''}` : `${Math.round(minutes / 1440)} days`;
}

/** How long ago a time is, in seconds since 1970. */
export function ago(time) {
  const passed = Math.max(0, Date.now() / 1000 - time);
  return passed < 5 ? 'now' : `${seconds(passed)} ago`;
}

/** A value with its sign. */
export function signed(value) {
  return value > 0 ? `+${number(value)}` : number(value);
}
