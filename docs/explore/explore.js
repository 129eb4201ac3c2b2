// Draws the traces of data.js. A classic script: the page opens from the file system.
"use strict";

(function() {
const TRACES = window.TESSERA_TRACES;
const CHOICES = [
  {name: "length", title: "Length N", values: [256, 512, 1024]},
  {name: "headDim", title: "Head size D", values: [64, 128]},
  {name: "blockM", title: "Queries a tile", values: [32, 64, 128, 256]},
  {name: "blockN", title: "Keys a block", values: [32, 64, 128]},
  {name: "mask", title: "Mask", values: ["full", "causal", "window"]},
];

// An H200: 132 multiprocessors at 1.83 GHz, the clock of the data sheet's 989 TFLOP/s (132 x 4096 FLOP a clock).
const LEVELS = [
  {
    name: "Registers",
    size: "33 MiB",
    bytesPerSecond: 495e12,
    source:
        "Registers: 65,536 of 32 bits a multiprocessor (CUDA's Hopper tuning guide), 132 multiprocessors. Bandwidth derived: 128 lanes a " +
        "multiprocessor read three and write one of them a clock, at 1.83 GHz."
  },
  {
    name: "Shared memory",
    size: "29 MiB",
    bytesPerSecond: 30.9e12,
    source:
        "Shared memory: 228 KiB a multiprocessor (the same guide). Bandwidth derived: 32 banks of 4 bytes a clock, at 1.83 GHz."
  },
  {
    name: "L2",
    size: "60 MB",
    bytesPerSecond: 6.65e12,
    source:
        "L2: what the driver reports on an H200 (tessera info). Bandwidth: measured on an H100, the same die, in OpenXLA's cost model for GPUs."
  },
  {
    name: "HBM",
    size: "141 GB",
    bytesPerSecond: 4.8e12,
    source: "HBM: NVIDIA's data sheet of the H200. A copy reaches 4.27 TB/s of it (docs/lab/bwd_sm90.md)."
  },
];
const L2 = 2;
const MULTIPROCESSOR_BYTES = (228 + 256) * 1024;  // shared memory and registers of one
const ELEMENT_BYTES = 2, FLOAT_BYTES = 4;

const state = {
  length: 512,
  headDim: 64,
  blockM: 128,
  blockN: 64,
  mask: "causal",
  step: null
};
const byId = (id) => document.getElementById(id);
const keyOf = (s) => [s.length, s.headDim, s.blockM, s.blockN, s.mask].join("/");

// ---- a trace, unpacked --------------------------------------------------------------------------------------------

function unpack(chosen) {
  const packed = TRACES[keyOf(chosen)];
  const columns = Math.ceil(chosen.length / chosen.blockN);
  const rowTile = Math.floor(packed.row / chosen.blockM);
  const visited = [], tiles = [];
  const sum = new Array(8).fill(0);
  let rowStep = -1;
  for (let t = 0; t < packed.tiles.length; ++t) {
    const i = Math.floor(t / columns), j = t % columns;
    const letter = packed.tiles[t];
    if (letter === ".") {
      tiles.push({i, j, kind: "skipped"});
      continue;
    }
    const [kind, ...bytes] = packed.moves[letter.charCodeAt(0) - 65];
    bytes.forEach((value, at) => {
      sum[at] += value;
    });
    if (i === rowTile) ++rowStep;
    const tile = {i, j, kind, bytes, sum: sum.slice(), rowStep, ofRow: i === rowTile, step: visited.length};
    visited.push(tile);
    tiles.push(tile);
  }
  const names = ["m", "l", "lse", "norm", "distance"];
  const rowSteps = packed.steps.map((values) => {
    const step = {o: values.slice(names.length)};
    names.forEach((name, at) => {
      step[name] = values[at];
    });
    return step;
  });
  return {packed, tiles, visited, columns, rowTile, rowSteps, rows: Math.ceil(chosen.length / chosen.blockM)};
}

let trace = null;

// ---- words --------------------------------------------------------------------------------------------------------

function bytesText(value) {
  if (value < 1024) return value + " B";
  const units = ["KiB", "MiB", "GiB"];
  let unit = -1;
  do {
    value /= 1024;
    ++unit;
  } while (value >= 1000 && unit + 1 < units.length);
  return (value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0)) + " " + units[unit];
}
function timeText(seconds) {
  const ns = seconds * 1e9;
  return ns < 1000 ? ns.toFixed(ns < 10 ? 1 : 0) + " ns" : (ns / 1000).toFixed(2) + " µs";
}
const number = (value, digits = 4) => (value === null ? "−∞" : value.toFixed(digits).replace("-", "−"));
const smallText = (value) => {
  if (value === 0) return "0";
  const [mantissa, exponent] = value.toExponential(1).split("e");
  const raised = String(Number(exponent)).replace("-", "⁻").replace(/[0-9]/g, (d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[d]);
  return value >= 0.01 ? value.toPrecision(2) : mantissa + "\u00a0·\u00a010" + raised;
};

// ---- SVG ----------------------------------------------------------------------------------------------------------

function make(name, attributes, parent, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}
function canvas(holder, width, height, label) {
  holder.textContent = "";
  return make("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label}, holder);
}
const path = (points) => "M" + points.map(([x, y]) => x.toFixed(1) + " " + y.toFixed(1)).join("L");

// ---- the map of tiles ---------------------------------------------------------------------------------------------

let tileElements = [];

function drawMap() {
  const edge = 18, side = 320, scale = side / state.length;
  const svg = canvas(byId("map"), edge + side + 4, edge + side + 4, "Tiles of the score matrix");
  const definitions = make("defs", {}, svg);
  for (const [id, light, dark] of [["hatch-pending", "--tiled-soft", "--tiled-mid"], ["hatch-done", "--tiled", "--tiled-mid"]]) {
    const pattern =
        make("pattern", {id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"}, definitions);
    make("rect", {width: 6, height: 6, style: `fill: var(${light})`}, pattern);
    make("rect", {width: 2, height: 6, style: `fill: var(${dark})`}, pattern);
  }
  make("text", {x: edge, y: 11}, svg, "keys →");
  make("text", {transform: `translate(11 ${edge}) rotate(-90)`, "text-anchor": "end"}, svg, "← queries");
  const group = make("g", {transform: `translate(${edge} ${edge})`}, svg);
  const height = Math.min(state.blockM, state.length) * scale, width = state.blockN * scale;
  tileElements = trace.tiles.map((tile) => {
    const element =
        make("rect", {x: tile.j * width, y: tile.i * height, width, height, "stroke-width": width > 15 ? 1.5 : 0.75}, group);
    if (tile.step !== undefined) element.addEventListener("click", () => go(tile.step));
    return element;
  });
  const y = (trace.packed.row + 0.5) * scale;
  make("line", {class: "watched", x1: -4, x2: side + 4, y1: y, y2: y}, group);
  make("rect", {class: "current", id: "current", width, height, rx: 1}, group);
}

function markMap() {
  trace.tiles.forEach((tile, at) => {
    const done = tile.step !== undefined && tile.step <= state.step;
    tileElements[at].setAttribute("class", "tile " + tile.kind + (tile.kind === "skipped" ? "" : done ? " done" : " pending"));
  });
  const current = trace.visited[state.step], scale = 320 / state.length;
  byId("current").setAttribute("x", current.j * state.blockN * scale);
  byId("current").setAttribute("y", current.i * Math.min(state.blockM, state.length) * scale);
}

function caption(tile) {
  const range = (index, block) => `${index * block}–${Math.min((index + 1) * block, state.length) - 1}`;
  const seen = tile.kind === "full" ? "Every pair is visible: nothing is compared." :
                                      "The mask cuts through: every pair is compared with it.";
  const loaded = tile.bytes[4], fromHbm = tile.bytes[6], written = tile.bytes[5];
  const kv = 2 * Math.min(state.blockN, state.length) * state.headDim * ELEMENT_BYTES;
  const what = loaded > kv ? "Q, K and V" : "K and V";
  let memory = `${what}, ${bytesText(loaded)}, go into shared memory`;
  memory += fromHbm === loaded ? ", from HBM." :
      fromHbm === 0            ? "; L2 has them from an earlier tile." :
                                 `; ${bytesText(fromHbm)} of it from HBM, L2 has the rest.`;
  if (written) memory += ` The last block: O / ℓ and the LSE, ${bytesText(written)}, are written.`;
  return `<b>Queries ${range(tile.i, state.blockM)} meet keys ${range(tile.j, state.blockN)}.</b> ${seen} ${memory}`;
}

// ---- the row ------------------------------------------------------------------------------------------------------

function showRow() {
  const tile = trace.visited[state.step], at = tile.rowStep, steps = trace.rowSteps, row = trace.packed.row;
  const now = at >= 0 ? steps[at] : null, last = steps[steps.length - 1];
  byId("row-title").textContent = `Row ${row} converges`;
  byId("row-m").textContent = now ? number(now.m) : "−∞";
  byId("row-l").textContent = now ? number(now.l, now.l < 100 ? 4 : 2) : "0";
  byId("row-lse").textContent = now ? number(now.lse) : "−∞";
  byId("row-norm").textContent = now ? number(now.norm) : "0";
  let note;
  if (at < 0) {
    note = `Its tile, number ${trace.rowTile}, has not begun. Press R to go there.`;
  } else if (tile.i > trace.rowTile) {
    note = `Finished: ${steps.length} block${steps.length === 1 ? "" : "s"} of keys, the oracle's row to ${
        smallText(last.distance)}.`;
  } else if (now.m === null) {
    note = "This row sees none of these keys; others of its tile do.";
  } else {
    const before = at > 0 ? steps[at - 1] : null;
    if (!before || before.m === null)
      note = `The first keys that it sees set its maximum, ${number(now.m, 3)}.`;
    else if (before.l === now.l && before.m === now.m)
      note = "This row sees none of these keys: m, ℓ and O stay.";
    else if (before.m === now.m)
      note = "No score above the maximum: m stays, ℓ and O grow without rescaling.";
    else
      note = `A new maximum, ${number(before.m, 3)} → ${number(now.m, 3)}: what was summed is scaled by e<sup>m − m′</sup> = ${
          Math.exp(before.m - now.m).toFixed(3)}.`;
    if (at === steps.length - 1) note += ` The last block: the oracle's row to ${smallText(now.distance)}.`;
  }
  byId("row-note").innerHTML = note;
  byId("entries").innerHTML =
      last.o
          .map((_, entry) => {
            const exact = trace.packed.exact[entry + 1], value = now ? now.o[entry] : 0;
            const settled = now !== null && Math.abs(value - exact) < 5e-6 ? ' class="settled"' : "";
            return `<tr><td>O[${row}, ${entry}]</td><td${settled}>${number(value, 5)}</td><td>${number(exact, 5)}</td></tr>`;
          })
          .join("");
  drawLse(at);
  drawDistance(at);
}

const CHART = {
  left: 40,
  right: 8,
  top: 16,
  bottom: 20
};

function rowAxis(svg, width, height, count) {
  const step = (width - CHART.left - CHART.right) / count;
  make(
      "line", {class: "axis", x1: CHART.left, x2: width - CHART.right, y1: height - CHART.bottom, y2: height - CHART.bottom},
      svg);
  const every = Math.ceil(count / 8);
  for (let at = 0; at < count; at += every) {
    make("text", {x: CHART.left + (at + 0.5) * step, y: height - 6, "text-anchor": "middle"}, svg, at + 1);
  }
  return (at) => CHART.left + (at + 0.5) * step;
}

function drawLse(now) {
  const holder = byId("chart-lse"), width = Math.max(holder.clientWidth, 240), height = 165;
  const svg = canvas(holder, width, height, "m and LSE after each block of keys");
  const steps = trace.rowSteps, exact = trace.packed.exact[0];
  const values = steps.flatMap((s) => [s.m, s.lse]).filter((v) => v !== null).concat(exact);
  const low = Math.min(...values), high = Math.max(...values), pad = 0.08 * (high - low || 1);
  const y = (v) => CHART.top + (high + pad - v) / (high - low + 2 * pad) * (height - CHART.top - CHART.bottom);
  const x = rowAxis(svg, width, height, steps.length);
  for (let tick = Math.ceil(low); tick <= high; tick += Math.ceil((high - low) / 4)) {
    make("line", {class: "grid", x1: CHART.left, x2: width - CHART.right, y1: y(tick), y2: y(tick)}, svg);
    make("text", {x: CHART.left - 6, y: y(tick) + 4, "text-anchor": "end"}, svg, tick);
  }
  make("line", {class: "line exact", x1: CHART.left, x2: width - CHART.right, y1: y(exact), y2: y(exact)}, svg);
  for (const name of ["m", "lse"]) {
    const points = steps.map((s, at) => [at, s[name]]).filter(([, v]) => v !== null).map(([at, v]) => [x(at), y(v), at]);
    const seen = points.filter(([, , at]) => at <= now);
    if (points.length > 1) make("path", {class: "line future " + name, d: path(points)}, svg);
    if (seen.length > 1) make("path", {class: "line " + name, d: path(seen)}, svg);
    for (const [px, py, at] of points)
      make("circle", {class: "dot " + name + (at <= now ? "" : " future"), cx: px, cy: py, r: at === now ? 4.5 : 2.5}, svg);
  }
  const title = make("text", {x: CHART.left, y: 10}, svg);
  make("tspan", {style: "fill: var(--standard); font-weight: 600"}, title, "m");
  make("tspan", {dx: 10, style: "fill: var(--tiled); font-weight: 600"}, title, "LSE");
  make("tspan", {dx: 10}, title, "- - the oracle's LSE, over blocks of keys");
}

function drawDistance(now) {
  const holder = byId("chart-distance"), width = Math.max(holder.clientWidth, 240), height = 130;
  const svg = canvas(holder, width, height, "Distance of O from the oracle's row after each block of keys, log scale");
  const steps = trace.rowSteps, lowest = -17, highest = 1;
  const y = (v) => CHART.top + (highest - v) / (highest - lowest) * (height - CHART.top - CHART.bottom);
  const x = rowAxis(svg, width, height, steps.length);
  for (const tick of [0, -8, -16]) {
    make("line", {class: "grid", x1: CHART.left, x2: width - CHART.right, y1: y(tick), y2: y(tick)}, svg);
    const text = make("text", {x: CHART.left - 6, y: y(tick) + 4, "text-anchor": "end"}, svg, tick === 0 ? "1" : "10");
    if (tick) make("tspan", {dy: -4, "font-size": 8}, text, "−" + -tick);
  }
  const half = Math.min(14, (x(1) - x(0)) * 0.36);
  steps.forEach((step, at) => {
    const top = y(Math.max(lowest, Math.log10(Math.max(step.distance, 1e-17))));
    const bar = make(
        "rect", {
          class: "bar" + (at <= now ? "" : " future"),
          x: x(at) - half,
          width: 2 * half,
          y: top,
          height: Math.max(1.5, y(lowest) - top)
        },
        svg);
    make("title", {}, bar, `after block ${at + 1}: ${smallText(step.distance)}`);
  });
  make("text", {x: CHART.left, y: 10}, svg, "|O / ℓ − oracle|: exact only when the last key was seen");
}

// ---- the pyramid --------------------------------------------------------------------------------------------------

function drawPyramid() {
  const half = (at) => 46 * (8 + 25 * at) / (8 + 25 * LEVELS.length);
  byId("pyramid").innerHTML =
      LEVELS
          .map((level, at) => {
            const bandwidth = level.bytesPerSecond / 1e12;
            const corners = [[46 - half(at), 0], [46 + half(at), 0], [46 + half(at + 1), 100], [46 - half(at + 1), 100]];
            return `<li><svg viewBox="0 0 92 100" preserveAspectRatio="none" aria-hidden="true"><polygon points="${
                corners.join(" ")}"/></svg>
        <div><h3>${level.name} <span>${level.size} · ${bandwidth < 10 ? bandwidth : bandwidth.toFixed(0)} TB/s</span></h3>
          <div class="meter"><div class="track"><i class="all"></i><i class="now"></i></div><b class="tiled-bytes"></b><b class="tiled-time"></b></div>
          <div class="meter"><div class="track"><i class="std"></i></div><b class="standard-bytes"></b><b class="standard-time"></b></div>
          <div class="less"></div></div></li>`;
          })
          .join("");
}

function showBytes() {
  const sum = trace.visited[state.step].sum, {tiled, standard} = trace.packed;
  byId("pyramid").querySelectorAll("li").forEach((item, at) => {
    const of = (values) => values[2 * at] + values[2 * at + 1];
    const most = Math.max(of(tiled), of(standard)), ratio = of(standard) / of(tiled);
    item.querySelector(".all").style.width = 100 * of(tiled) / most + "%";
    item.querySelector(".now").style.width = 100 * of(sum) / most + "%";
    item.querySelector(".std").style.width = 100 * of(standard) / most + "%";
    for (const [name, values] of [["tiled", tiled], ["standard", standard]]) {
      item.querySelector(`.${name}-bytes`).textContent = bytesText(of(values));
      item.querySelector(`.${name}-time`).textContent = timeText(of(values) / LEVELS[at].bytesPerSecond);
    }
    item.querySelector(".less").textContent = `${bytesText(of(sum))} so far, at the end ` +
        (ratio >= 1 ? `${ratio.toFixed(1)} × less` : `${(1 / ratio).toFixed(1)} × more`);
  });
}

// ---- bytes over memory --------------------------------------------------------------------------------------------

function drawCurve() {
  const holder = byId("chart-curve"), width = Math.max(holder.clientWidth, 300), height = 340;
  const svg = canvas(holder, width, height, "Bytes into multiprocessors over the memory that a tile holds");
  const edge = {left: 58, right: 12, top: 14, bottom: 40};
  const points = [];
  for (const blockM of CHOICES[2].values) {
    CHOICES[3].values.forEach((blockN, series) => {
      const chosen = {...state, blockM, blockN}, packed = TRACES[keyOf(chosen)];
      points.push({
        blockM,
        blockN,
        series,
        memory: packed.memory[0] + packed.memory[1],
        bytes: packed.tiled[2 * L2] + packed.tiled[2 * L2 + 1]
      });
    });
  }
  const pairs = trace.packed.flops / (4 * state.headDim);
  const once = state.length * (2 * state.headDim * ELEMENT_BYTES + FLOAT_BYTES);  // Q, O and the LSE
  const floor = (memory) => once + 2 * ELEMENT_BYTES * (ELEMENT_BYTES + FLOAT_BYTES) * pairs * state.headDim ** 2 / memory;
  const standard = trace.packed.standard[2 * L2] + trace.packed.standard[2 * L2 + 1];
  const memories = points.map((p) => p.memory), low = Math.min(...memories) / 1.35,
        high = Math.max(...memories, MULTIPROCESSOR_BYTES) * 1.35;
  const values = points.map((p) => p.bytes).concat(standard, floor(high)), bottom = Math.min(...values) / 1.3,
        most = Math.max(...values) * 1.5;
  const log = (v, from, to) => Math.log(v / from) / Math.log(to / from);
  const x = (v) => edge.left + log(v, low, high) * (width - edge.left - edge.right);
  const y = (v) => height - edge.bottom - log(v, bottom, most) * (height - edge.top - edge.bottom);

  const clip = make("clipPath", {id: "plot"}, make("defs", {}, svg));
  make("rect", {x: edge.left, y: edge.top, width: width - edge.left - edge.right, height: height - edge.top - edge.bottom}, clip);
  const plot = make("g", {"clip-path": "url(#plot)"}, svg);
  const along = Array.from({length: 49}, (_, at) => low * (high / low) ** (at / 48));
  const curve = along.map((v) => [x(v), y(floor(v))]), twice = along.map((v) => [x(v), y(2 * floor(v))]);
  make("path", {class: "band", d: path(curve.concat(twice.reverse())) + "Z"}, plot);
  for (let v = 2 ** Math.ceil(Math.log2(low)); v <= high; v *= 2) {
    make("line", {class: "grid", x1: x(v), x2: x(v), y1: edge.top, y2: height - edge.bottom}, svg);
    make("text", {x: x(v), y: height - edge.bottom + 15, "text-anchor": "middle"}, svg, v / 1024);
  }
  for (let v = 2 ** Math.ceil(Math.log2(bottom)); v <= most; v *= 2) {
    make("line", {class: "grid", x1: edge.left, x2: width - edge.right, y1: y(v), y2: y(v)}, svg);
    make(
        "text", {x: edge.left - 6, y: y(v) + 4, "text-anchor": "end"}, svg,
        v < 1 << 20 ? v / 1024 + " KiB" : v / (1 << 20) + " MiB");
  }
  make("text", {x: (width + edge.left) / 2, y: height - 6, "text-anchor": "middle"}, svg, "KiB that a tile holds: M");
  make("path", {class: "floor", d: path(curve)}, plot);
  make("line", {class: "standard-line", x1: edge.left, x2: width - edge.right, y1: y(standard), y2: y(standard)}, svg);
  make(
      "text", {x: x(MULTIPROCESSOR_BYTES) - 8, y: y(standard) - 6, "text-anchor": "end", style: "fill: var(--standard)"}, svg,
      `standard attention in tiles of ${state.blockM} × ${state.blockN}`);
  make(
      "line", {class: "limit", x1: x(MULTIPROCESSOR_BYTES), x2: x(MULTIPROCESSOR_BYTES), y1: edge.top, y2: height - edge.bottom},
      svg);
  make(
      "text", {transform: `translate(${x(MULTIPROCESSOR_BYTES) - 5} ${height - edge.bottom - 6}) rotate(-90)`}, svg,
      "all of a multiprocessor");
  CHOICES[3].values.forEach((value, series) => {
    make("circle", {class: "series-" + series, cx: edge.left + 14, cy: height - edge.bottom - 48 + 16 * series, r: 5}, svg);
    make("text", {x: edge.left + 24, y: height - edge.bottom - 44 + 16 * series}, svg, value + " keys a block");
  });
  for (const p of points) {
    const chosen = p.blockM === state.blockM && p.blockN === state.blockN;
    const dot = make(
        "circle",
        {class: `point series-${p.series}` + (chosen ? " chosen" : ""), cx: x(p.memory), cy: y(p.bytes), r: chosen ? 8 : 6}, svg);
    make("title", {}, dot, `${p.blockM} queries × ${p.blockN} keys: ${bytesText(p.bytes)} with ${bytesText(p.memory)}`);
    dot.addEventListener("click", () => choose({blockM: p.blockM, blockN: p.blockN}));
    if (p.blockN === CHOICES[3].values[0])
      make("text", {x: x(p.memory) - 10, y: y(p.bytes) + 4, "text-anchor": "end", class: chosen ? "strong" : ""}, svg, p.blockM);
  }
  const now = points.find((p) => p.blockM === state.blockM && p.blockN === state.blockN);
  byId("curve-note").textContent =
      `Tiles of ${state.blockM} × ${state.blockN} hold ${bytesText(now.memory)} and move ${bytesText(now.bytes)} ` +
      `between L2 and the multiprocessors: ${
          (now.bytes / floor(now.memory)).toFixed(1)} times the floor. Numbers at points are queries a tile.`;
}

// ---- what the reader does -----------------------------------------------------------------------------------------

function show() {
  const tile = trace.visited[state.step];
  markMap();
  byId("slider").value = state.step;
  byId("step-text").textContent = `${state.step + 1} of ${trace.visited.length}`;
  byId("caption").innerHTML = caption(tile);
  showRow();
  showBytes();
  remember();
}

function go(step) {
  state.step = Math.min(Math.max(step, 0), trace.visited.length - 1);
  show();
}

// The first step of the tile of queries that is so many tiles on.
function goTile(by) {
  const i = trace.visited[state.step].i + by;
  const found = trace.visited.find((tile) => tile.i === i);
  if (found) go(found.step);
}
const goRow = () => go(trace.visited.find((tile) => tile.ofRow).step);

function choose(change) {
  Object.assign(state, change);
  trace = unpack(state);
  for (const button of document.querySelectorAll("#controls button")) {
    button.setAttribute("aria-pressed", String(state[button.dataset.name]) === button.dataset.value);
  }
  byId("slider").max = trace.visited.length - 1;
  drawMap();
  drawCurve();
  if (change.step !== undefined && change.step !== null)
    go(change.step);
  else
    goRow();
}

let timer = null;
function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => {
    if (state.step + 1 >= trace.visited.length)
      play(false);
    else
      go(state.step + 1);
  }, 300) : null;
  byId("play").textContent = on ? "❚❚" : "▶";
  byId("play").setAttribute("aria-label", on ? "Pause" : "Play");
}
function togglePlay() {
  if (timer === null && state.step + 1 >= trace.visited.length) go(0);
  play(timer === null);
}

const ACTIONS = {
  ArrowRight: () => go(state.step + 1),
  ArrowLeft: () => go(state.step - 1),
  ArrowDown: () => goTile(1),
  ArrowUp: () => goTile(-1),
  Home: () => go(0),
  End: () => go(trace.visited.length - 1),
  r: goRow,
  R: goRow,
  " ": togglePlay,
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || !ACTIONS[event.key]) return;
  const onButton = event.target.tagName === "BUTTON";
  if (event.key === " " && onButton) return;  // presses it
  event.preventDefault();
  if (event.key !== " ") play(false);
  ACTIONS[event.key]();
});

// ---- the address keeps what is shown ------------------------------------------------------------------------------

function remember() {
  const hash = "#" + [...CHOICES.map((c) => state[c.name]), state.step].join("/");
  try {
    history.replaceState(null, "", hash);
  } catch (_) { /* some browsers keep a file's address as it is */
  }
}
function fromAddress() {
  const parts = location.hash.slice(1).split("/"), found = {};
  CHOICES.forEach((choice, at) => {
    const value = choice.values.find((v) => String(v) === parts[at]);
    if (value !== undefined) found[choice.name] = value;
  });
  const step = Number(parts[CHOICES.length]);
  if (parts[CHOICES.length] && Number.isInteger(step)) found.step = step;
  return found;
}

function start() {
  byId("controls").innerHTML =
      CHOICES
          .map(
              (choice) => `<fieldset><legend>${choice.title}</legend><div class="segments">` +
                  choice.values.map((v) => `<button type="button" data-name="${choice.name}" data-value="${v}">${v}</button>`)
                      .join("") +
                  "</div></fieldset>")
          .join("");
  for (const button of document.querySelectorAll("#controls button")) {
    const choice = CHOICES.find((c) => c.name === button.dataset.name);
    button.addEventListener("click", () => {
      play(false);
      choose({[choice.name]: choice.values.find((v) => String(v) === button.dataset.value)});
    });
  }
  byId("sources").innerHTML = LEVELS.map((level) => `<li>${level.source}</li>`).join("");
  for (const [id, key] of [["first", "Home"], ["back", "ArrowLeft"], ["next", "ArrowRight"], ["last", "End"]]) {
    byId(id).addEventListener("click", () => {
      play(false);
      ACTIONS[key]();
    });
  }
  byId("play").addEventListener("click", togglePlay);
  byId("slider").addEventListener("input", (event) => {
    play(false);
    go(Number(event.target.value));
  });
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  window.addEventListener("resize", () => {
    drawCurve();
    showRow();
  });
  window.addEventListener("hashchange", () => choose(fromAddress()));
  drawPyramid();
  choose(fromAddress());
}

start();
})();
