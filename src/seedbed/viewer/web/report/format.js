// Numbers as people read them.
const plain = new Intl.NumberFormat("en-GB", { maximumSignificantDigits: 4 });

// 12500 becomes 12.5k.
export function short(value) {
  const size = Math.abs(value);
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${plain.format(value / (name === "k" ? 1e3 : unit))}${name}`;
  }
  return plain.format(value);
}

// The unit in which a time of so many seconds is told.
export function timeUnit(seconds) {
  if (seconds < 180) return { size: 1, name: "seconds", short: "s" };
  if (seconds < 3 * 3600) return { size: 60, name: "minutes", short: "min" };
  return { size: 3600, name: "hours", short: "h" };
}
