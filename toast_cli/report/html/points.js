"use strict";
// Points with names between logarithmic axes.

// data: x, y: {words, unit}; points: [{x, y, n, lines, k, big, bad}]; seen: [[x, y], ...] that are to be in the
// picture as well; lines: [{n, k, points: [[x, y], ...], at: a point with its name beside it}].
charts.points = (figure, data) => {
  const holder = block("div", "", figure);
  const back = block("button", "back", figure, "whole picture");
  back.hidden = true;
  const every = [...data.points.map((one) => [one.x, one.y]), ...(data.seen || [])];
  const whole = ["0", "1"].map((k) => spread(every.map((at) => at[k]).filter((value) => value > 0)));
  let view = whole;
  let width = 0;

  function draw(now) {
    width = now;
    back.hidden = view === whole;
    holder.replaceChildren();
    legend(holder, data.legend);
    const height = Math.min(440, Math.max(300, width * 0.6));
    const svg = element("svg", { width, height }, holder);
    const probe = scaleOf(...view[1], 0, 1, true);
    const left = leftOf(probe, Math.floor((height - 70) / 34), data.y.unit);
    const box = { left, right: width - 12, top: 26, bottom: height - 40 };
    const x = scaleOf(...view[0], box.left, box.right, true);
    const y = scaleOf(...view[1], box.bottom, box.top, true);
    const clip = `clip${Math.random().toString(36).slice(2)}`;
    const hole = element("clipPath", { id: clip }, svg);
    element("rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top }, hole);
    axes(svg, box, x, y, { x: data.x.words, xUnit: data.x.unit, y: data.y.words, yUnit: data.y.unit });
    const inside = element("g", { "clip-path": `url(#${clip})` }, svg);
    const taken = [];
    const lines = [];
    for (const line of data.lines) {
      const path = line.points.map(([a, b], k) => `${k ? "L" : "M"}${x.to(a)} ${y.to(b)}`).join("");
      element("path", { d: path, class: `line ${line.k}` }, inside);
      line.points.slice(1).forEach(([a, b], k) => {
        const [from, to] = [line.points[k], [a, b]].map(([u, v]) => [x.to(u), y.to(v)]);
        const straight = Math.abs(from[0] - to[0]) < 1 || Math.abs(from[1] - to[1]) < 1;
        if (straight) lines.push([Math.min(from[0], to[0]), Math.min(from[1], to[1]), Math.max(from[0], to[0]), Math.max(from[1], to[1])]);
      });
    }
    for (const one of data.points) {
      const [cx, cy] = [x.to(one.x), y.to(one.y)];
      const r = one.big ? 7 : 5;
      const mark = one.bad
        ? element("path", { d: `M${cx - 5} ${cy - 5}l10 10m0 -10l-10 10`, class: `cross ${one.k}` }, inside)
        : element("circle", { cx, cy, r, class: `dot ${one.k}` }, inside);
      told(mark, () => one.lines);
      taken.push([cx - r, cy - r, cx + r, cy + r]);
    }
    const named = data.points.filter((one) => one.n);
    for (const one of named.filter((each) => each.big)) name(svg, box, taken, x, y, one.n, [one.x, one.y], "name big");
    taken.push(...lines);
    for (const line of data.lines.filter((one) => one.n)) {
      const [cx, cy] = [Math.min(Math.max(x.to(line.at[0]), box.left), box.right), y.to(line.at[1])];
      const wide = textWidth(line.n, 12);
      const places = [[-wide - 4, -6], [-wide - 4, 16], [6, 18], [6, -8]];
      write(svg, box, taken, line.n, wide, [cx, cy], places, "words");
    }
    for (const one of named.filter((each) => !each.big)) name(svg, box, taken, x, y, one.n, [one.x, one.y], "name");
    dragged(svg, svg, box, (from, to) => {
      view = [[x.back(Math.min(from[0], to[0])), x.back(Math.max(from[0], to[0]))],
        [y.back(Math.max(from[1], to[1])), y.back(Math.min(from[1], to[1]))]];
      if (view.every(([a, b]) => b > a)) draw(width);
    });
  }
  back.addEventListener("click", () => { view = whole; draw(width); });
  return draw;
};

// Writes a name beside a point, or nothing where it has no room.
function name(svg, box, taken, x, y, text, [px, py], className) {
  const [cx, cy] = [x.to(px), y.to(py)];
  if (cx < box.left - 1 || cx > box.right + 1 || cy < box.top - 1 || cy > box.bottom + 1) return;
  const wide = textWidth(text, 12) + (className === "name" ? 2 : 8);
  const places = [[11, 4], [-wide - 11, 4], [-wide / 2, -12], [-wide / 2, 22], [8, -10], [8, 20], [-wide - 8, -10],
    [-wide - 8, 20],
    [14, 11], [14, -3], [0, -24], [0, 34], [-wide, -24], [-wide, 34]];
  write(svg, box, taken, text, wide, [cx, cy], places, className);
}

// Writes at the first of these places where nothing stands yet.
function write(svg, box, taken, text, wide, [cx, cy], places, className) {
  for (const [dx, dy] of places) {
    const at = [cx + dx, cy + dy - 11, cx + dx + wide, cy + dy + 3];
    const free = at[0] >= box.left && at[2] <= box.right && at[1] >= box.top && at[3] <= box.bottom
      && taken.every((other) => at[2] < other[0] || at[0] > other[2] || at[3] < other[1] || at[1] > other[3]);
    if (free) {
      taken.push(at);
      element("text", { x: at[0], y: cy + dy, class: className }, svg, text);
      return;
    }
  }
}

function spread(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = Math.max(high / low, 2) ** 0.08;
  return [low / room, high * room];
}
