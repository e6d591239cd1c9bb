// Numbers as people read them. Null is shown as a dash.

const DASH = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

type Maybe = number | null | undefined;

export function count(value: Maybe): string {
  return value == null ? DASH : Math.abs(value) < 100_000 ? whole.format(value) : short.format(value);
}

/** A number with its noun: "1 row", "2 rows". */
export function many(value: number, noun: string): string {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function rate(value: Maybe): string {
  return value == null ? DASH : value < 10 ? value.toFixed(1) : count(value);
}

export function share(value: Maybe, digits = 0): string {
  return value == null ? DASH : `${(100 * value).toFixed(digits)} %`;
}

export function change(value: Maybe): string {
  return value == null ? DASH : `${value > 0 ? "+" : ""}${(100 * value).toFixed(1)} %`;
}

export function seconds(value: Maybe): string {
  if (value == null) return DASH;
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value: Maybe): string {
  if (value == null) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  let left = value;
  while (left >= 1024 && at < units.length - 1) {
    left /= 1024;
    at += 1;
  }
  return `${left < 10 && at ? left.toFixed(1) : left.toFixed(0)} ${units[at]}`;
}

export function money(value: Maybe, currency: string): string {
  if (value == null) return DASH;
  const digits = value === 0 || value >= 100 ? 2 : Math.max(2, 3 - Math.floor(Math.log10(value)));
  return `${value.toFixed(Math.min(digits, 9))}${currency ? ` ${currency}` : ""}`;
}

export function number(value: Maybe): string {
  return value == null ? DASH : Number.isInteger(value) ? whole.format(value) : String(Number(value.toPrecision(5)));
}

/** The value of a setting: a number, or one of its choices. */
export function setting(value: number | string): string {
  return typeof value === "string" ? value : number(value);
}

/** A name of the API as words: `no_slot` is "no slot". */
export function words(name: string): string {
  return name.replaceAll("_", " ");
}
