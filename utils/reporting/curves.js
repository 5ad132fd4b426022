"use strict";
// Curves as SVG: axes with round numbers, lines with gaps, dots with intervals, marks at steps, values at the pointer.

const SIZE = { width: 400, height: 220 };
const FRAME = { left: 48, right: 392, top: 12, bottom: 196 };
const zoom = { range: null }; // first and last step that all panels show; null: all

/** An SVG element with these attributes and children; strings become text. */
function shape(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  element.append(...children);
  return element;
}

/** The distance of about `count` round numbers from `low` to `high`. */
function roundDistance(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
}

/** The multiples of a distance from `low` to `high`. */
function multiples(low, high, distance) {
  const first = Math.ceil(low / distance - 1e-9);
  const last = Math.floor(high / distance + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * distance);
}

/** The lowest and the highest of numbers, apart. */
function extent(values) {
  const finite = values.filter((value) => value != null);
  const [low, high] = finite.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  if (!finite.length) return [0, 1];
  return low < high ? [low, high] : [low, low + (Math.abs(low) || 1)];
}

/** Functions from a step and a value to their place in the picture, and the ranges that they show. */
function scalesOf(curves) {
  const xs = zoom.range ?? extent(curves.flatMap(({ series }) => series.x));
  const isShown = (x) => x >= xs[0] && x <= xs[1];
  const shown = curves.flatMap(({ series: { x, y, low = [], high = [] } }) =>
    x.flatMap((step, i) => (isShown(step) ? [y[i], low[i], high[i]] : [])));
  const most = curves.some(({ isShare }) => isShare) ? 1 : Infinity;
  const [lowest, highest] = extent(shown).map((value) => Math.min(value, most));
  const bottom = Math.min(lowest, 0) || 0;
  const distance = roundDistance(bottom, highest, 4);
  const ys = [Math.floor(bottom / distance + 1e-9) * distance, Math.ceil(highest / distance - 1e-9) * distance];
  const place = ([low, high], start, end) => (value) => start + ((value - low) / (high - low)) * (end - start);
  return { xs, ys, distance, isShown, x: place(xs, FRAME.left, FRAME.right), y: place(ys, FRAME.bottom, FRAME.top) };
}

/** The path of a line; it ends before each value that is missing, and a value alone is a dot. */
function linePath(xs, ys, scales) {
  let isDown = false;
  return xs.map((x, i) => {
    if (ys[i] == null || !scales.isShown(x)) {
      isDown = false;
      return "";
    }
    const command = isDown ? "L" : "M";
    const dot = isDown ? "" : "h0";
    isDown = true;
    return `${command}${scales.x(x).toFixed(1)} ${scales.y(ys[i]).toFixed(1)}${dot}`;
  }).join("");
}

/** Lines with numbers beside them, for both axes. */
function axes(scales, format) {
  const rows = multiples(...scales.ys, scales.distance).flatMap((value) => [
    shape("line", { class: "grid", x1: FRAME.left, x2: FRAME.right, y1: scales.y(value), y2: scales.y(value) }),
    shape("text", { x: FRAME.left - 6, y: scales.y(value) + 4, "text-anchor": "end" }, format(value).replace(".0%", "%")),
  ]);
  const steps = multiples(...scales.xs, Math.max(1, roundDistance(...scales.xs, 6)));
  const columns = steps.map((step) =>
    shape("text", { x: scales.x(step), y: FRAME.bottom + 16, "text-anchor": "middle" }, step.toLocaleString("en")));
  const title = shape("text", { x: FRAME.left - 6, y: FRAME.bottom + 16, "text-anchor": "end" }, "step");
  return [...rows, ...columns, title];
}

/** A curve: dots with intervals for held-out scores, else a pale line under its running mean. */
function curveShapes({ series, color, isHeldOut, dash }, scales) {
  const line = (ys, className) =>
    shape("path", { class: className, d: linePath(series.x, ys, scales), style: `stroke: ${color}`,
      ...(dash && { "stroke-dasharray": dash }) });
  if (!isHeldOut) return [line(series.y, "pale"), line(series.mean, "strong")];
  const points = series.x.map((x, i) => ({ x, y: series.y[i], low: series.low?.[i], high: series.high?.[i] }));
  const shown = points.filter(({ x, y }) => y != null && scales.isShown(x));
  const dots = shown.flatMap(({ x, y, low, high }) => {
    const cx = scales.x(x);
    const dot = shape("circle", { cx, cy: scales.y(y), r: 3, style: `fill: ${color}` });
    if (low == null || high == null) return [dot];
    const ends = { x1: cx, x2: cx, y1: scales.y(low), y2: scales.y(high) };
    return [shape("line", { class: "interval", ...ends, style: `stroke: ${color}` }), dot];
  });
  return [line(series.y, "held-out"), ...dots];
}

/** A dashed line with a triangle at the step of a warning, whose text shows under the pointer. */
function markShapes({ step, text }, scales) {
  if (!scales.isShown(step)) return [];
  const x = scales.x(step);
  const line = shape("line", { class: "mark", x1: x, x2: x, y1: FRAME.top, y2: FRAME.bottom });
  const triangle = shape("path", { class: "mark-head", d: `M${x - 5} ${FRAME.top - 9}h10l-5 9z` });
  const title = shape("title", {}, `step ${step}: ${text}`);
  return [shape("g", {}, title, line, triangle)];
}

/** Draws curves into an element, with what the pointer does there: values of the nearest step, and zoom by dragging. */
function drawPlot(element, curves, marks, format, redrawAll) {
  const scales = scalesOf(curves);
  const cursor = shape("line", { class: "cursor", y1: FRAME.top, y2: FRAME.bottom, visibility: "hidden" });
  const content = [...axes(scales, format), ...marks.flatMap((mark) => markShapes(mark, scales)),
    ...curves.flatMap((curve) => curveShapes(curve, scales)), cursor];
  const picture = shape("svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}` }, ...content);
  const readout = make("div", { className: "readout", hidden: true });
  element.replaceChildren(picture, readout);
  const stepAt = (event) => {
    const { left, width } = picture.getBoundingClientRect();
    const x = ((event.clientX - left) / width) * SIZE.width;
    const [low, high] = scales.xs;
    return low + ((x - FRAME.left) / (FRAME.right - FRAME.left)) * (high - low);
  };
  const steps = [...new Set(curves.flatMap(({ series }) => series.x))].filter(scales.isShown);
  let start = null;
  picture.onpointerdown = (event) => { start = stepAt(event); };
  picture.onpointermove = (event) => {
    if (!steps.length) return;
    const at = stepAt(event);
    const step = steps.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, scales.x(step));
    cursor.setAttribute("visibility", "visible");
    readout.hidden = false;
    readout.replaceChildren(`step ${step.toLocaleString("en")}`, ...curves.map((curve) => readValue(curve, step, format)));
  };
  picture.onpointerleave = () => {
    start = null;
    readout.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  picture.onpointerup = (event) => {
    const range = [start ?? NaN, stepAt(event)].sort((a, b) => a - b);
    if (range[1] - range[0] > 0.03 * (scales.xs[1] - scales.xs[0])) {
      zoom.range = range;
      redrawAll();
    }
  };
  picture.ondblclick = () => {
    zoom.range = null;
    redrawAll();
  };
}

/** The value of a curve at a step, with its interval and its name; null where it has none. */
function readValue({ series, name, color }, step, format) {
  const i = series.x.indexOf(step);
  if (i < 0 || series.y[i] == null) return "";
  const interval = series.low?.[i] == null ? "" : ` [${format(series.low[i])}, ${format(series.high[i])}]`;
  const dot = make("span", { className: "dot" });
  dot.style.background = color;
  return make("div", {}, dot, `${name} ${format(series.y[i])}${interval}`);
}
