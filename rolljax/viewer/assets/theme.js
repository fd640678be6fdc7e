// Light, dark, or as the system has it; remembered by the browser if it may.
const ORDER = ['', 'light', 'dark'];

function stored() {
  try {
    return localStorage.getItem('rolljax-theme') || '';
  } catch {
    return '';
  }
}

function apply(theme) {
  document.documentElement.dataset.theme = theme;
}

/** As it was left. */
export function startTheme() {
  apply(stored());
}

/** The next one. */
export function nextTheme() {
  const theme = ORDER[(ORDER.indexOf(document.documentElement.dataset.theme) + 1) % ORDER.length];
  apply(theme);
  try {
    localStorage.setItem('rolljax-theme', theme);
  } catch {
    // it holds until the page is closed
  }
}
