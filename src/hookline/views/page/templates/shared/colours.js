// The colours of signed numbers: blue below zero, orange above. Lightness changes in equal steps
// (OKLab), zero is as light or dark as the page, and red-green blindness does not hide the sign.

function oklch(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  // A colour that the screen lacks loses chroma, never lightness.
  if (chroma > 0.002 && linear.some((part) => part < -0.0005 || part > 1.0005))
    return oklch(lightness, 0.93 * chroma, hue);
  return linear.map((part) =>
    Math.round(
      255 * clamp(part <= 0.0031308 ? 12.92 * part : 1.055 * part ** (1 / 2.4) - 0.055, 0, 1),
    ),
  );
}

// The colour of a share from -1 to 1 of the largest size.
function signedColour(share) {
  const size = Math.min(Math.abs(share), 1) ** 0.9;
  if (isDark())
    return oklch(0.27 + 0.53 * size, 0.14 * Math.min(1, 1.15 * size), share < 0 ? 245 : 55);
  return oklch(0.975 - 0.5 * size, 0.145 * Math.min(1, 1.2 * size), share < 0 ? 255 : 42);
}
const cssColour = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

// The colour of a share from 0 to 1, from dark to light, through blue and green to yellow.
function plainColour(share) {
  const chroma = 0.05 + 0.1 * Math.sin(Math.PI * Math.min(1, 1.1 * share));
  return oklch(0.2 + 0.74 * share, chroma, 285 - 185 * share);
}
