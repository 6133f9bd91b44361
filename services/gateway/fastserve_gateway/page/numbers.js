// Numbers: rates and quantiles between two looks, and how they are shown.

/** Seconds below which `share` of what was measured between two looks lies; null when nothing was. */
export function quantile(now, before, share) {
  const counts = now.counts.map((count, i) => count - (before ? before.counts[i] : 0));
  const all = counts[counts.length - 1];
  if (all <= 0) return null;
  const rank = share * all;
  const i = counts.findIndex((count) => count >= rank);
  const high = now.bounds[Math.min(i, now.bounds.length - 1)];
  const low = i > 0 ? now.bounds[i - 1] : 0;
  const below = i > 0 ? counts[i - 1] : 0;
  if (i >= now.bounds.length) return now.bounds[now.bounds.length - 1];
  return low + (high - low) * ((rank - below) / Math.max(1, counts[i] - below));
}

export function whole(value) {
  return Math.round(value).toLocaleString("en");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${(value / 60).toFixed(1)} min`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 && unit > 0 ? value.toFixed(1) : value.toFixed(0)} ${units[unit]}`;
}
