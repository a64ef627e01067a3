"use strict";
// What the chart is drawn with: elements, quantities as people read them, axes, the words under the pointer, redrawing.
const charts = {};

function element(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function block(name, className, parent, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// Quantities: each unit as [size, name], the largest first.
const UNITS = {
  s: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]],
  B: [[2 ** 50, "PiB"], [2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]],
  "": [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]],
};
const unitFor = (value, unit) => UNITS[unit].find(([size]) => Math.abs(value) >= 0.9995 * size) || UNITS[unit].at(-1);

function quantity(value, unit, digits = 3) {
  if (value === 0 || (unit === "s" && Math.abs(value) < 0.9995e-9)) return unit === "" ? "0" : `0 ${unit}`;
  const [size, name] = unit === "" && value >= 1 && value < 1e6 ? [1, ""] : unitFor(value, unit);
  const scaled = value / size;
  const number = scaled >= 99.95 ? Math.round(scaled).toLocaleString("en") : `${+scaled.toPrecision(digits)}`;
  return name ? `${number} ${name}` : number;
}

const pen = document.createElement("canvas").getContext("2d");
function textWidth(text, size = 12) {
  pen.font = `${size}px system-ui, sans-serif`;
  return pen.measureText(text).width;
}
function clipped(text, room, size = 12) {
  if (textWidth(text, size) <= room) return text;
  let kept = Math.min(text.length, Math.floor(room / (size * 0.5)));
  while (kept > 1 && textWidth(`${text.slice(0, kept)}…`, size) > room) kept -= 1;
  return kept > 1 ? `${text.slice(0, kept)}…` : "";
}

// Axes. A scale turns values into pixels; ticks are [value, label].
function scaleOf(low, high, start, end) {
  const to = (value) => start + ((value - low) / (high - low || 1)) * (end - start);
  const back = (pixel) => low + ((pixel - start) / (end - start || 1)) * (high - low);
  return { low, high, to, back };
}

function ticksOf({ low, high }, most, unit) {
  const [size] = unitFor(Math.max(Math.abs(low), Math.abs(high)), unit);
  const rough = (high - low) / size / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = ([1, 2, 5, 10].find((m) => m * power >= rough) || 10) * power * size;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9) && ticks.length < 50; k += 1) {
    ticks.push([k * step, quantity(+(k * step).toPrecision(12), unit, 6)]);
  }
  return ticks;
}

// Draws both axes around a box; the words for the upright axis stand over it, where there is room at any width.
function axes(parent, box, x, y, words) {
  const most = Math.max(2, Math.floor((box.right - box.left) / 76));
  let edge = -Infinity;
  for (const [value, label] of ticksOf(x, most, words.xUnit)) {
    const at = x.to(value);
    const half = textWidth(label, 11) / 2;
    element("line", { x1: at, x2: at, y1: box.top, y2: box.bottom, class: "grid" }, parent);
    if (at - half < edge || at + half > box.right + 14) continue;
    element("text", { x: at, y: box.bottom + 15, class: "tick", "text-anchor": "middle" }, parent, label);
    edge = at + half + 6;
  }
  for (const [value, label] of ticksOf(y, Math.max(2, Math.floor((box.bottom - box.top) / 34)), words.yUnit)) {
    const at = y.to(value);
    element("line", { x1: box.left, x2: box.right, y1: at, y2: at, class: "grid" }, parent);
    element("text", { x: box.left - 6, y: at + 4, class: "tick", "text-anchor": "end" }, parent, label);
  }
  element("text", { x: 0, y: box.top - 8, class: "words" }, parent, words.y);
}

function leftOf(scale, most, unit) {
  return 10 + Math.max(20, ...ticksOf(scale, most, unit).map(([, label]) => textWidth(label, 11)));
}

// The words under the pointer: lines of text, the first in bold.
const tip = block("div", "tip", document.body);
function showTip(event, lines) {
  tip.replaceChildren();
  lines.filter(Boolean).forEach((line, k) => block(k ? "div" : "b", "", tip, line));
  tip.style.display = "block";
  const room = document.documentElement.clientWidth;
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, room - box.width - 8);
  const below = event.clientY + 16 + box.height < window.innerHeight;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${below ? event.clientY + 16 : Math.max(4, event.clientY - box.height - 12)}px`;
}
const hideTip = () => { tip.style.display = "none"; };
window.addEventListener("scroll", hideTip, { passive: true });

function told(node, lines) {
  node.addEventListener("pointermove", (event) => showTip(event, lines()));
  node.addEventListener("pointerleave", hideTip);
}

function legend(parent, entries) {
  const row = block("div", "legend", parent);
  for (const [name, className] of entries) {
    const entry = block("span", "", row);
    block("i", className, entry);
    entry.append(name);
  }
  return row;
}

// Dragging over `surface` chooses a range: `chosen` gets its two ends in pixels of the drawing.
function dragged(surface, layer, box, chosen) {
  let start = null;
  let mark = null;
  const at = (event) => {
    const found = surface.getBoundingClientRect();
    const inside = (value, low, high) => Math.min(Math.max(value, low), high);
    return inside(event.clientX - found.left, box.left, box.right);
  };
  surface.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType !== "touch") start = at(event);
  });
  surface.addEventListener("pointermove", (event) => {
    if (start === null) return;
    const now = at(event);
    mark = mark || element("rect", { class: "chosen" }, layer);
    mark.setAttribute("x", Math.min(start, now));
    mark.setAttribute("width", Math.abs(now - start));
    mark.setAttribute("y", box.top);
    mark.setAttribute("height", box.bottom - box.top);
  });
  const end = (event) => {
    if (start === null) return;
    const [from, now] = [start, at(event)];
    start = null;
    if (mark) mark.remove();
    mark = null;
    if (Math.abs(now - from) > 6) chosen(Math.min(from, now), Math.max(from, now));
  };
  surface.addEventListener("pointerup", end);
  surface.addEventListener("pointerleave", end);
}

// Every chart of the page: drawn as wide as there is room, and again when that changes.
function start() {
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const draw = charts[figure.dataset.chart](figure, data);
    let width = 0;
    const fit = () => {
      const now = Math.floor(figure.clientWidth);
      if (!now || now === width) return;
      width = now;
      draw(width);
      figure.dataset.drawn = "yes";
    };
    fit();
    new ResizeObserver(() => setTimeout(fit)).observe(figure);
  }
}
document.addEventListener("DOMContentLoaded", start);

// A part of a chart with its words and its tip.
function part(svg, box, className, label, lines) {
  const group = element("g", { class: "part" }, svg);
  element("rect", { x: box.x, y: box.y, width: Math.max(box.w - 1, 0.5), height: Math.max(box.h - 1, 0.5), class: className }, group);
  if (label) element("text", { x: box.x + 5, y: box.y + 15, class: "label" }, group, label);
  told(group, lines);
  return group;
}
