"use strict";
// One step: memory over time, and below it what computes and what communicates, on one axis that can be zoomed.

// data: seconds; lanes: names; names, places, modules: texts, bands: [modules] colour, tops: [modules] name; slices: lists of equal
// length: lane, start, long, name, place, module, runs, hides; memory: {moments, limit, peak, views: {name: {band: sizes}}}.
const PITCH = 38;
charts.step = (figure, data) => {
  const { memory, slices } = data;
  const views = Object.keys(memory.views);
  let view = views[0];
  let range = [0, data.seconds];
  let width = 0;
  const bar = block("div", "tools", figure);
  const holder = block("div", "", figure);
  for (const name of views) {
    const button = block("button", "", bar, `memory ${name}`);
    button.addEventListener("click", () => { view = name; draw(width); });
    button.dataset.view = name;
  }
  const zoom = block("span", "zoom", bar);
  for (const [sign, words, act] of [
    ["−", "zoom out", () => scaled(2)], ["+", "zoom in", () => scaled(0.5)],
    ["◀", "earlier", () => moved(-0.4)], ["▶", "later", () => moved(0.4)],
    ["whole step", "whole step", () => { range = [0, data.seconds]; draw(width); }],
  ]) {
    const button = block("button", "", zoom, sign);
    button.setAttribute("aria-label", words);
    button.addEventListener("click", act);
  }
  function scaled(factor, at = (range[0] + range[1]) / 2) {
    const low = Math.max(0, at - (at - range[0]) * factor);
    const high = Math.min(data.seconds, at + (range[1] - at) * factor);
    if (high - low > data.seconds * 1e-6) range = [low, high];
    draw(width);
  }
  function moved(share) {
    const wide = range[1] - range[0];
    const low = Math.min(Math.max(0, range[0] + share * wide), data.seconds - wide);
    range = [low, low + wide];
    draw(width);
  }

  const lanes = data.lanes.map((_, lane) => slices.lane.flatMap((one, k) => (one === lane ? [k] : [])));
  const band = (k) => data.bands[slices.module[k]];

  function draw(now) {
    width = now;
    for (const button of bar.querySelectorAll("[data-view]")) button.setAttribute("aria-pressed", button.dataset.view === view);
    holder.replaceChildren();
    const sizes = Object.entries(memory.views[view]);
      legend(holder, sizes.map(([name, one]) => [name, one.k]).reverse());
    const top = Math.max(memory.peak * 1.08, memory.limit < 1.6 * memory.peak ? memory.limit * 1.05 : 0);
    const tall = 200;
    const laneTop = 26 + tall + 44;
    const height = laneTop + PITCH * (data.lanes.length + 1);
    const svg = element("svg", { width, height, tabindex: 0, class: "zoomable" }, holder);
    const box = { left: leftOf(scaleOf(0, top, 0, 1), 5, "B"), right: width - 12, top: 26, bottom: 26 + tall };
    const x = scaleOf(...range, box.left, box.right);
    const y = scaleOf(0, top, box.bottom, box.top);
    axes(svg, box, x, y, { xUnit: "s", y: "memory on each device", yUnit: "B" });
    areas(svg, box, x, y, sizes);
    if (memory.limit <= top) {
      const at = y.to(memory.limit);
      element("line", { x1: box.left, x2: box.right, y1: at, y2: at, class: "line limit" }, svg);
      element("text", { x: box.right, y: at - 4, class: "words", "text-anchor": "end" }, svg, "limit");
    }
    modules(svg, box, x, laneTop);
    data.lanes.forEach((name, lane) => drawLane(svg, box, x, lane, laneTop + PITCH * (lane + 1), lane ? `collectives over ${name}` : name));
    const cross = element("line", { y1: box.top, y2: height - 6, class: "cross-hair", visibility: "hidden" }, svg);
    const surface = element("rect", { x: box.left, y: box.top, width: box.right - box.left, height: tall, class: "surface" }, svg);
    surface.addEventListener("pointermove", (event) => {
      const at = x.back(event.clientX - svg.getBoundingClientRect().left);
      cross.setAttribute("x1", x.to(at));
      cross.setAttribute("x2", x.to(at));
      cross.setAttribute("visibility", "visible");
      const k = momentAt(at);
      const alive = sizes.map(([name, one]) => [name, one.v[k]]).filter(([, size]) => size > 0).reverse();
      showTip(event, [`${quantity(alive.reduce((sum, [, size]) => sum + size, 0), "B")} at ${quantity(at, "s")}`,
        ...alive.map(([name, size]) => `${name}: ${quantity(size, "B")}`)]);
    });
    surface.addEventListener("pointerleave", () => { hideTip(); cross.setAttribute("visibility", "hidden"); });
    dragged(svg, svg, { ...box, bottom: height - 6 }, (from, to) => {
      range = [x.back(from), x.back(to)];
      draw(width);
    });
    svg.addEventListener("dblclick", () => { range = [0, data.seconds]; draw(width); });
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      scaled(event.deltaY > 0 ? 1.4 : 0.7, x.back(event.clientX - svg.getBoundingClientRect().left));
    }, { passive: false });
    svg.addEventListener("keydown", (event) => {
      const act = { "+": () => scaled(0.5), "-": () => scaled(2), ArrowLeft: () => moved(-0.2), ArrowRight: () => moved(0.2),
        0: () => { range = [0, data.seconds]; draw(width); } }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
      holder.querySelector("svg").focus();
    });
  }

  function momentAt(seconds) {
    let [low, high] = [0, memory.moments.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (memory.moments[middle] <= seconds) low = middle; else high = middle - 1;
    }
    return low;
  }

  function areas(svg, box, x, y, sizes) {
    const [first, last] = [momentAt(range[0]), Math.min(momentAt(range[1]) + 1, memory.moments.length - 1)];
    let floor = new Array(memory.moments.length).fill(0);
    const inside = (value) => Math.min(Math.max(x.to(value), box.left), box.right);
    for (const [, one] of sizes) {
      const ceiling = floor.map((size, k) => size + one.v[k]);
      const edge = (level, k) => `H${inside(memory.moments[k]).toFixed(1)}V${y.to(level[k]).toFixed(1)}`;
      let path = `M${box.left} ${y.to(ceiling[first]).toFixed(1)}`;
      for (let k = first + 1; k <= last; k += 1) path += edge(ceiling, k);
      path += `H${box.right}V${y.to(floor[last]).toFixed(1)}`;
      for (let k = last; k > first; k -= 1) path += `H${inside(memory.moments[k]).toFixed(1)}V${y.to(floor[k - 1]).toFixed(1)}`;
      element("path", { d: `${path}H${box.left}Z`, class: `area ${one.k}` }, svg);
      floor = ceiling;
    }
  }

  // Neighbours too thin to be told apart are one piece.
  function pieces(numbers, x, box, alike) {
    const found = [];
    for (const k of numbers) {
      const [from, to] = [x.to(slices.start[k]), x.to(slices.start[k] + slices.long[k])];
      if (to < box.left || from > box.right) continue;
      const last = found.at(-1);
      const joined = last && (alike ? alike(last.k, k) : false);
      if (last && (joined || (to - last.from < 1.2 && from - last.to < 1.2))) {
        last.count += 1;
        const sliver = to - from < 1.2 && last.to - last.from > 6;
        last.mixed = last.mixed || !(joined || sliver);
        if (band(k) !== band(last.k) && !sliver) last.bands = 2;
        last.to = to;
      } else found.push({ from, to, k, count: 1, mixed: false, bands: 1 });
    }
    for (const one of found) {
      one.from = Math.max(one.from, box.left);
      one.to = Math.min(one.to, box.right);
    }
    return found;
  }

  function modules(svg, box, x, top) {
    element("text", { x: 0, y: top - 4, class: "words" }, svg, "module");
    const all = slices.lane.map((_, k) => k);
    const titleOf = (k) => data.tops[slices.module[k]];
    for (const one of pieces(all, x, box, (a, b) => titleOf(a) === titleOf(b))) {
      const text = one.mixed ? "several modules" : titleOf(one.k);
      const wide = one.to - one.from;
      const kind = one.mixed || one.bands > 1 ? "mixed" : band(one.k);
      part(svg, { x: one.from, y: top, w: Math.max(wide, 1.2), h: 20 }, `fill ${kind}`,
        wide > 34 ? clipped(text, wide - 9) : "", () => [text, `${one.count} slices`]);
    }
  }

  function drawLane(svg, box, x, lane, top, title) {
    element("text", { x: 0, y: top - 4, class: "words" }, svg, title);
    element("rect", { x: box.left, y: top, width: box.right - box.left, height: 19, class: "lane" }, svg);
    for (const one of pieces(lanes[lane], x, box, null)) {
      const { k } = one;
      const wide = one.to - one.from;
      const thin = wide < 6 ? " thin" : "";
      const kind = lane ? (slices.hides[k] ? "communication hides" : "communication") : band(k);
      const text = one.count > 1 ? `${one.count} slices` : data.names[slices.name[k]];
      part(svg, { x: one.from, y: top, w: Math.max(wide, 1.2), h: 20 }, `fill ${kind}${thin}`, wide > 34 ? clipped(text, wide - 9) : "",
        () => (one.count > 1 ? [`${one.count} slices`, "zoom in to see each"] : [
          `${data.names[slices.name[k]]}, ${quantity(slices.long[k], "s")}`, data.modules[slices.module[k]],
          data.places[slices.place[k]], slices.runs[k] > 1 ? `${quantity(slices.runs[k], "")} runs together` : "",
          `begins ${quantity(slices.start[k], "s")} into the step`, slices.hides[k] ? "may hide behind compute" : ""]));
    }
  }
  return draw;
};
