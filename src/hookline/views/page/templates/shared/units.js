// Seconds, counts and bytes as the terminal writes them.

function durationText(seconds) {
  if (!seconds) return "";
  const [number, unit] = seconds >= 0.9995 ? [seconds, "s"] : [seconds * 1e3, "ms"];
  const digits = number >= 99.95 ? 0 : number >= 9.995 ? 1 : number >= 0.9995 ? 2 : 4;
  return `${number.toFixed(digits)} ${unit}`;
}

function scaledText(number, base, units) {
  let power = 0;
  let scaled = number;
  while (scaled >= (power ? 999.5 : base) && power < units.length - 1) {
    scaled /= base;
    power += 1;
  }
  if (!power) return `${Number(number.toFixed(1))} ${units[0]}`.trim();
  return `${scaled.toFixed(scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0)} ${units[power]}`;
}
const countText = (number) =>
  number ? scaledText(number, 1000, ["", "k", "M", "G", "T", "P", "E"]) : "";
const sizeText = (bytes) =>
  bytes ? scaledText(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]) : "";
