// Numbers for people: sizes, durations, times.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Bytes, in the units that the command line uses; one decimal at most. */
export function bytes(count) {
  let unit = 0;
  let value = count;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${digits(value, unit)}\u202f${UNITS[unit]}`;
}

/** A count with a letter: 22.7 M. */
export function count(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size) return `${digits(value / size, 1)}\u202f${letter}`;
  }
  return String(value);
}

/** A duration, in its two largest units. */
export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s < 0.9995) return `${Math.round(s * 1000)}\u202fms`;
  if (s < 59.95) return `${s < 9.95 ? s.toFixed(1) : Math.round(s)}\u202fs`;
  if (s < 3600) return pair(s, 60, "min", "s");
  if (s < 86400) return pair(s / 60, 60, "h", "min");
  return pair(s / 3600, 24, "d", "h");
}

/** A duration that counts up or down: whole seconds. */
export function ticking(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  return s < 60 ? `${s}\u202fs` : duration(s);
}

/** A duration of which only the size counts: one unit, rounded. */
export function rough(seconds) {
  if (seconds < 120) return `${Math.round(seconds)}\u202fs`;
  if (seconds < 7200) return `${Math.round(seconds / 60)}\u202fmin`;
  return `${(seconds / 3600).toFixed(1)}\u202fh`;
}

/** When something was, from now: "4 min ago". */
export function ago(seconds) {
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)}\u202fs ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}\u202fmin ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)}\u202fh ago`;
  return `${Math.floor(seconds / 86400)}\u202fd ago`;
}

/** A time of the last days: "Thu 14:32". */
export function weekTime(seconds) {
  return new Date(seconds * 1000).toLocaleString(undefined, { weekday: "short", hour: "2-digit", minute: "2-digit" });
}

export function moment(seconds) {
  return new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

/** A number of any size, with four digits: 0.4183, 2e-5, 1.25e6. */
export function figure(value) {
  const size = Math.abs(value);
  if (value === 0 || (size >= 1e-3 && size < 1e5)) return String(Number(value.toPrecision(4)));
  const [digits, power] = value.toExponential(3).split("e");
  return `${Number(digits)}e${Number(power)}`;
}

export function percent(share) {
  return `${Math.round(100 * share)}\u202f%`;
}

/** A computation's name as prose: "per sample gradient". */
export function words(name) {
  return name.replaceAll("_", " ");
}

export function plural(number, noun) {
  return `${number}\u202f${noun}${number === 1 ? "" : "s"}`;
}

function digits(value, unit) {
  return unit === 0 || value >= 99.95 ? String(Math.round(value)) : String(Number(value.toFixed(1)));
}

function pair(value, base, large, small) {
  const whole = Math.floor(value / base);
  const rest = Math.floor(value - whole * base);
  return rest ? `${whole}\u202f${large} ${rest}\u202f${small}` : `${whole}\u202f${large}`;
}
