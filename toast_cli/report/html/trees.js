"use strict";
// Parts of a whole: as layers under each other (icicle), or as areas inside each other (treemap). A click goes in.

// data: unit; root: {n: name, a: amount, k: kind, t: note, c: parts}.
function parted(figure, data, drawInside) {
  const trail = block("nav", "trail", figure);
  const holder = block("div", "", figure);
  let way = [data.root];
  let width = 0;
  function draw(now) {
    width = now;
    trail.replaceChildren();
    way.forEach((node, k) => {
      const button = block("button", "", trail, node.n);
      button.disabled = k === way.length - 1;
      button.addEventListener("click", () => { way = way.slice(0, k + 1); hideTip(); draw(width); });
    });
    trail.hidden = way.length === 1;
    holder.replaceChildren();
    drawInside(holder, way.at(-1), width, (path) => { way = [...way, ...path]; hideTip(); draw(width); });
  }
  return draw;
}

function partLines(node, path, whole, unit) {
  return [node.n, `${quantity(node.a, unit)}, ${percent(node.a / whole)}`, node.t, path.slice(1, -1).map((one) => one.n).join(" / ")];
}

function part(svg, box, className, label, lines, action) {
  const group = element("g", { class: action ? "part in" : "part" }, svg);
  element("rect", { x: box.x, y: box.y, width: Math.max(box.w - 1, 0.5), height: Math.max(box.h - 1, 0.5), class: className }, group);
  if (label) element("text", { x: box.x + 5, y: box.y + 15, class: "label" }, group, label);
  told(group, lines);
  if (action) group.addEventListener("click", action);
  return group;
}

const ROW = 22;
charts.icicle = (figure, data) => parted(figure, data, (holder, focus, width, enter) => {
  const depthOf = (node) => 1 + Math.max(0, ...(node.c || []).map(depthOf));
  const svg = element("svg", { width, height: ROW * depthOf(focus) + 2 }, holder);
  const draw = (node, path, x, level) => {
    const w = (node.a / focus.a) * width;
    const label = w > 30 ? clipped(`${node.n}  ${quantity(node.a, data.unit)}`, w - 9) : "";
    const action = node.c && level ? () => enter(path.slice(1)) : null;
    part(svg, { x, y: level * ROW, w, h: ROW }, `fill ${node.k || "mixed"}`, label,
      () => partLines(node, path, data.root.a, data.unit), action);
    let at = x;
    for (const below of node.c || []) {
      const wide = (below.a / focus.a) * width;
      if (wide >= 0.5) draw(below, [...path, below], at, level + 1);
      at += wide;
    }
  };
  draw(focus, [focus], 0, 0);
});

// Bruls, Huizing, van Wijk, "Squarified treemaps" (2000): rows as long as their pieces get squarer.
function squares(parts, x, y, w, h) {
  const found = [];
  let left = parts.filter((one) => one.a > 0);
  let scale = (w * h) / (left.reduce((sum, one) => sum + one.a, 0) || 1);
  const worst = (row, side) => {
    const areas = row.map((one) => one.a * scale);
    const sum = areas.reduce((a, b) => a + b, 0);
    return Math.max(...areas.map((area) => Math.max((side * side * area) / (sum * sum), (sum * sum) / (side * side * area))));
  };
  while (left.length) {
    const side = Math.min(w, h);
    let count = 1;
    while (count < left.length && worst(left.slice(0, count + 1), side) <= worst(left.slice(0, count), side)) count += 1;
    const row = left.slice(0, count);
    const thick = (row.reduce((sum, one) => sum + one.a, 0) * scale) / (side || 1);
    let at = 0;
    for (const one of row) {
      const long = (one.a * scale) / (thick || 1);
      found.push([one, w >= h ? { x, y: y + at, w: thick, h: long } : { x: x + at, y, w: long, h: thick }]);
      at += long;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
    left = left.slice(count);
  }
  return found;
}

charts.treemap = (figure, data) => parted(figure, data, (holder, focus, width, enter) => {
  const height = Math.min(420, Math.max(260, width * 0.55));
  legend(holder, data.legend);
  const svg = element("svg", { width, height }, holder);
  const draw = (node, path, box, level) => {
    if (box.w < 2 || box.h < 2) return;
    const label = box.w > 34 && box.h > 19 ? clipped(`${node.n}  ${quantity(node.a, data.unit)}`, box.w - 10) : "";
    const action = node.c && level ? () => enter(path.slice(1)) : null;
    part(svg, box, `fill level${level % 2} ${node.k || "mixed"}`, label, () => partLines(node, path, data.root.a, data.unit), action);
    if (!node.c || box.w < 40 || box.h < 44) return;
    for (const [below, inner] of squares(node.c, box.x + 3, box.y + 20, box.w - 7, box.h - 24)) {
      draw(below, [...path, below], inner, level + 1);
    }
  };
  draw(focus, [focus], { x: 0, y: 0, w: width, h: height }, 0);
});
