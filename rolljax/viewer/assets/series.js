// Numbers of runs as lines: what lies across, and means over runs that differ in their seed only.
import {large, number, seconds} from './format.js';

const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** What can lie across: title, what a row adds to it (else it is the number of the step), and sensible distances of ticks. */
export const ACROSS = {
  step: {title: 'step', shown: (x) => `step ${x}`, tick: number},
  wall: {title: 'wall time', shown: seconds, tick: seconds, distances: CLOCK, adds: (row) => row['time/step_s']},
  tokens: {title: 'trained tokens', shown: (x) => `${large(x)} tokens`, tick: large, adds: (row) => row['train/trained_tok_n']},
};

/** The rows of a run, each with where it lies across (`at`). */
export function placed(rows, across) {
  const {adds} = ACROSS[across];
  let sum = 0;
  return rows.map((row) => {
    if (adds) sum += Number.isFinite(adds(row)) ? adds(row) : 0;
    return {...row, at: adds ? sum : row.step};
  });
}

/** Runs by what they have in common but the seed, in their order: lists of one or several. */
export function bySeeds(runs) {
  const groups = new Map();
  for (const run of runs) {
    const key = run.recipe || `alone ${run.name}`;
    groups.set(key, [...(groups.get(key) || []), run]);
  }
  return [...groups.values()];
}

/** The mean over several lines `[[at, value, step]]`, at every step that all of them have. */
export function meanOf(lines) {
  const bySteps = lines.map((points) => new Map(points.map((p) => [p[2], p])));
  return [...bySteps[0].keys()].sort((a, b) => a - b).flatMap((step) => {
    const found = bySteps.map((of) => of.get(step)).filter(Boolean);
    const mean = (k) => found.reduce((sum, p) => sum + p[k], 0) / found.length;
    return found.length === lines.length ? [[mean(0), mean(1), step]] : [];
  });
}
