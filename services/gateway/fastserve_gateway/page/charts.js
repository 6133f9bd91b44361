// Drawing: SVG made of elements, never of markup.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const COLUMNS = 40;
const ROWS = 5;
const CELL = 12;

/** `used` of `total` blocks as cells; one that stands for both kinds is half there. */
export function drawMap(svg, used, total) {
  if (!svg.childElementCount) {
    for (let i = 0; i < COLUMNS * ROWS; i++) {
      const x = (i % COLUMNS) * CELL;
      const y = Math.floor(i / COLUMNS) * CELL;
      svg.append(element("rect", { x, y, width: CELL - 2, height: CELL - 2, rx: 2 }));
    }
  }
  const filled = total ? (used / total) * COLUMNS * ROWS : 0;
  for (let i = 0; i < svg.children.length; i++) {
    const share = filled - i;
    const kind = share >= 1 ? "used" : share > 0 ? "used some" : "";
    if (svg.children[i].getAttribute("class") !== kind) svg.children[i].setAttribute("class", kind);
  }
}

const WIDTH = 480;
const HEIGHT = 110;
const TOP = 20;
const BOTTOM = 18;

/**
 * Lines over the last `spanS` seconds. `lines`: {kind, points: [[time_s, value or null]]}; `show` makes a label of a
 * value, whose units are `base` apart. Nothing measured is a gap, not a zero. Returns the label of the top line.
 */
export function drawLines(svg, lines, nowS, spanS, show, base = 1000) {
  const most = Math.max(0, ...lines.flatMap((line) => line.points.map(([, value]) => value ?? 0)));
  const unit = base ** Math.max(0, Math.floor(Math.log(Math.max(1, most)) / Math.log(base)));
  const top = unit * nice(most / unit);
  const x = (timeS) => WIDTH - ((nowS - timeS) / spanS) * WIDTH;
  const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const parts = [0, 0.5, 1].map((share) => element("path", { class: "grid", d: `M0 ${y(top * share)}H${WIDTH}` }));
  for (const { kind, points } of lines) {
    let path = "";
    let drawing = false;
    for (const [timeS, value] of points) {
      if (value !== null) path += `${drawing ? "L" : "M"}${x(timeS).toFixed(1)} ${y(value).toFixed(1)}`;
      drawing = value !== null;
    }
    parts.push(element("path", { class: kind, d: path }));
  }
  svg.replaceChildren(...parts);
  return show(top);
}

/** The next 1, 2 or 5 times a power of ten; 1 for nothing. */
export function nice(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}
